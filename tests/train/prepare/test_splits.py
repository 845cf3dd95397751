"""Nobody trains on test: neither on a test split nor on copies of its questions, which are found where they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sorl_env import Example, UserError, load_examples, load_task
from sorl_train.cli import main as train_main
from sorl_train.config.settings import TrainConfig
from sorl_train.prepare.build import Pair, count_pairs, find_pairs
from sorl_train.rollout.environments import make_env, training_examples

from .files import made, rows_of

pytestmark = pytest.mark.usefixtures("offline")


def test_training_on_a_test_split_is_refused(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, command = load_task("nq"), ["--task", "nq", "--model", str(tmp_path)]
    assert len(load_examples(task, prepared, "train")) == 4
    assert len(load_examples(task, prepared / "test.jsonl", "test")) == 2
    copy = tmp_path / "train.jsonl"  # a copy under a harmless name is still test data
    copy.write_bytes((prepared / "test.jsonl").read_bytes())
    for path in (prepared / "test.jsonl", copy):
        with pytest.raises(UserError, match=r"jsonl:1: this is a test question .* training on it is refused"):
            load_examples(task, path, "train")
        assert train_main([*command, "--data", str(path), "--run_dir", str(tmp_path / "run")]) == 2
        assert "sorl-train: " in (error := capsys.readouterr().err) and "this is a test question" in error
        assert not (tmp_path / "run").exists()
    # nor does calling the split by its name help; to evaluate on it is what it is for
    config = TrainConfig(task="nq", data=str(prepared), split="test")
    refused = r"split 'test' of .*test\.jsonl contains test questions .* training on them is refused"
    for read in (make_env, training_examples):  # the latter is where OpenRLHF takes its prompts from
        with pytest.raises(UserError, match=refused):
            read(config)
    assert len(training_examples(replace(config, split="train"))) == 4
    assert (
        train_main([*command, "--data", str(prepared), "--split", "test", "--dry_run"]) == 2
        and "training on them is refused" in capsys.readouterr().err
    )
    assert len(make_env(replace(config, split="train"), evaluation=True).examples) == 2
    with pytest.raises(UserError, match="no rows of nq for split 'train'"):
        made("nq", tmp_path / "again", f"train={prepared / 'test.jsonl'}")


def test_train_is_checked_against_other_benchmarks(shared_data: Path, tmp_path: Path) -> None:
    """The shared file in AlphaMed19K's columns was made of benchmark questions: it shows."""
    medqa = tmp_path / "medqa"
    made("medqa", medqa, f"test={shared_data / 'medical/medqa_test.jsonl.gz'}")
    train = f"train={shared_data / 'alphamed/train_shaped.jsonl.gz'}"
    mmlu = shared_data / "medical/mmlu_med_test.jsonl.gz"
    tests = (medqa / "test.jsonl", mmlu)
    manifest = made("alphamed19k", tmp_path / "alphamed", train, against=tests, drop="exact")
    counts = manifest["overlap"]["with"]
    assert {name: found["test"] for name, found in counts.items()} == {
        "medqa/test.jsonl": 626,
        "medical/mmlu_med_test.jsonl.gz": 0,
    }
    assert manifest["files"]["train.jsonl"]["rows"] == 5809 - 626
    assert {row["with"] for row in rows_of(tmp_path / "alphamed" / "overlap.jsonl")} == {"medqa/test.jsonl"}
    with pytest.raises(UserError, match="--against needs a train split to check, and none is prepared"):
        made("medqa", medqa, f"test={shared_data / 'medical/medqa_test.jsonl.gz'}", against=(mmlu,))
    with pytest.raises(UserError, match=r"another file has the same name medqa/test\.jsonl"):
        made("alphamed19k", tmp_path / "alphamed", train, against=(medqa / "test.jsonl",) * 2)


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
