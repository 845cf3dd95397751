"""Questions in both splits: planted copies are found, and nothing else."""

from __future__ import annotations

from sorl_env import Example, load_examples, load_task
from sorl_train.prepare.build import Pair, count_pairs, find_pairs


def ask(text: str, *golds: str, options: dict[str, str] | None = None, name: str = "") -> Example:
    return Example(name or text, text, golds or ("x",), options)


def test_case_punctuation_articles_and_unicode_forms_do_not_hide_a_copy() -> None:
    train = [ask("Who wrote  the \uff26aust?"), ask("Who wrote Faust II?")]
    assert find_pairs(train, [ask("who wrote faust", "y")]) == [
        Pair("Who wrote  the \uff26aust?", "who wrote faust", False, train[0].question, "who wrote faust")
    ]


def test_options_belong_to_the_question_in_any_order() -> None:
    stem = "Which is true?"
    first = ask(stem, "A", options={"A": "Gout hurts", "B": "Gout itches"}, name="1")
    shuffled = ask(stem, "B", options={"A": "Gout itches", "B": "Gout hurts"}, name="2")
    other = ask(stem, "A", options={"A": "Zinc is a metal", "B": "Iron is a gas"}, name="3")
    assert [(p.train_id, p.same_answer) for p in find_pairs([first, other], [shuffled])] == [("1", True)]


def test_counts() -> None:
    train = [ask("b c d e f", name="1"), ask("b c d e f", name="2"), ask("unrelated words here", name="3")]
    pairs = find_pairs(train, [ask("b c d e f", name="t1"), ask("b c d e g", name="t2")])
    assert count_pairs(pairs) == {"pairs": 2, "train": 2, "test": 1}


def test_planted_copies_are_found_among_real_questions(shared_data) -> None:
    """Test questions put into train as they are, re-cased, and with one word changed: the first two are found."""
    test = load_examples(load_task("nq"), shared_data / "nq/test.jsonl.gz", "test").examples
    train = load_examples(load_task("nq"), shared_data / "nq/train.jsonl.gz").examples
    before = find_pairs(train, test)
    planted = []
    for i, example in enumerate(test[:60]):
        words = example.question.split()
        text = [example.question, f"The {example.question.upper()}?!", " ".join([*words[:-1], "zzz"])][i % 3]
        planted.append(Example(f"planted_{i}", text, example.golden_answers))
    pairs = find_pairs([*train, *planted], test)
    assert [pair for pair in pairs if not pair.train_id.startswith("planted")] == before
    found = {pair.train_id: pair.test_id for pair in pairs if pair.train_id.startswith("planted")}
    assert found == {f"planted_{i}": test[i].id for i in range(60) if i % 3 != 2}
