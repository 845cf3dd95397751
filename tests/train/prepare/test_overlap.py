"""Questions in both splits: planted ones are found, hand arithmetic holds, brute force finds no more."""

from __future__ import annotations

import random

import pytest

from sorl_env import Example, UserError, load_examples, load_task
from sorl_train.prepare.overlap import Pair, count_pairs, count_repeated, find_pairs


def ask(text: str, *golds: str, options: dict[str, str] | None = None, name: str = "") -> Example:
    return Example(name or text, text, golds or ("x",), options)


def test_case_punctuation_articles_and_unicode_forms_do_not_hide_a_copy() -> None:
    train = [ask("Who wrote  the \uff26aust?"), ask("Who wrote Faust II?")]
    (pair,) = [pair for pair in find_pairs(train, [ask("who wrote faust")]) if pair.kind == "exact"]
    assert pair == Pair(
        "Who wrote  the \uff26aust?",
        "who wrote faust",
        "exact",
        1.0,
        True,
        train[0].question,
        "who wrote faust",
    )


def test_the_similarity_is_the_jaccard_of_the_shingles() -> None:
    """5 words make 4 pairs of words; with another last word 3 of them are shared by 5: 3 / 5."""
    train, test = [ask("b c d e f")], [ask("b c d e g", "y")]
    assert find_pairs(train, test, threshold=0.6) == [
        Pair("b c d e f", "b c d e g", "near", 0.6, False, *("b c d e f", "b c d e g"))
    ]
    assert find_pairs(train, test, threshold=0.61) == []
    # single words: 4 of 6
    (pair,) = find_pairs(train, test, shingle=1, threshold=0.5)
    assert pair.similarity == pytest.approx(4 / 6, abs=1e-4)
    # shorter than a shingle: the text as a whole
    assert [pair.kind for pair in find_pairs([ask("who")], [ask("Who?")], shingle=5)] == ["exact"]


def test_options_belong_to_the_question_in_any_order() -> None:
    stem = "Which is true?"
    first = ask(stem, "A", options={"A": "Gout hurts", "B": "Gout itches"}, name="1")
    shuffled = ask(stem, "B", options={"A": "Gout itches", "B": "Gout hurts"}, name="2")
    other = ask(stem, "A", options={"A": "Zinc is a metal", "B": "Iron is a gas"}, name="3")
    assert [(p.train_id, p.kind, p.same_answer) for p in find_pairs([first, other], [shuffled])] == [
        ("1", "exact", True)
    ]


def test_templates_about_different_things_show_another_answer() -> None:
    (pair,) = find_pairs(
        [ask("who won the most medals for norway in the winter games of 1998", "Daehlie")],
        [ask("who won the most medals for norway in the winter games of 2018", "Bjørgen")],
    )
    assert (pair.kind, pair.same_answer) == ("near", False)


def test_it_finds_what_brute_force_finds() -> None:
    rng = random.Random(0)
    words = [f"w{i}" for i in range(12)]
    splits = [
        [ask(" ".join(rng.choices(words, k=rng.randint(1, 7))), name=str(i)) for i in range(150)]
        for _ in "ab"
    ]

    def shingles(text: str) -> set[tuple[str, ...]]:
        found = text.split()
        return {tuple(found[i : i + 2]) for i in range(max(1, len(found) - 1))}

    for threshold in (0.2, 0.5, 0.75, 1.0):
        expected = set()
        for one in splits[0]:
            for other in splits[1]:
                a, b = shingles(one.question), shingles(other.question)
                if len(a & b) / len(a | b) >= threshold:
                    expected.add((one.id, other.id))
        pairs = find_pairs(*splits, threshold=threshold)
        assert {(pair.train_id, pair.test_id) for pair in pairs} == expected
        assert len(pairs) == len(expected) > 0
        assert pairs == find_pairs(splits[0], splits[1], threshold=threshold)


def test_counts() -> None:
    train = [ask("b c d e f", name="1"), ask("b c d e f", name="2"), ask("unrelated words here", name="3")]
    test = [ask("b c d e f", name="t1"), ask("b c d e g", name="t2")]
    assert count_pairs(find_pairs(train, test)) == {
        "exact_pairs": 2,
        "exact_train": 2,
        "exact_test": 1,
        "near_pairs": 2,
        "near_train": 2,
        "near_test": 1,
    }
    assert (count_repeated(train), count_repeated(test)) == (1, 0)


@pytest.mark.parametrize(("shingle", "threshold"), [(0, 0.5), (2, 0.0), (2, 1.1)])
def test_settings_out_of_range(shingle: int, threshold: float) -> None:
    with pytest.raises(UserError, match=f"shingle={shingle}, threshold={threshold}"):
        find_pairs([], [], shingle=shingle, threshold=threshold)


def test_planted_copies_are_found_among_real_questions(shared_data) -> None:
    """Test questions put into train as they are, re-cased, and with one word changed: all of them, and no others."""
    test = load_examples(load_task("nq"), shared_data / "nq/test.jsonl.gz", "test").examples
    train = load_examples(load_task("nq"), shared_data / "nq/train.jsonl.gz").examples
    before = {(pair.train_id, pair.test_id) for pair in find_pairs(train, test)}
    long = [example for example in test if len(example.question.split()) >= 10][:60]
    planted = []
    for i, example in enumerate(long):
        words = example.question.split()
        text = [example.question, f"The {example.question.upper()}?!", " ".join([*words[:-1], "zzz"])][i % 3]
        planted.append(Example(f"planted_{i}", text, example.golden_answers))
    pairs = {(pair.train_id, pair.test_id): pair.kind for pair in find_pairs([*train, *planted], test)}
    assert {ids for ids in pairs if not ids[0].startswith("planted")} == before
    for i, example in enumerate(long):
        assert pairs[f"planted_{i}", example.id] == ("near" if i % 3 == 2 else "exact")
