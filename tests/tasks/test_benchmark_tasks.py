"""NQ, HotpotQA and AlphaMed19K: samples, rows, prompts, rewards, environments."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from sorl_env import Example, Task, ToolSettings, ToolUseEnv, UserError, load_examples, load_task, parse_turn
from sorl_env.commands.check_task import check_task
from sorl_env.rewards import normalize_answer
from sorl_tasks import alphamed19k
from sorl_tools.corpus import Passage, read_corpus

SAMPLES = Path(alphamed19k.__file__).parent / "samples"
IDS = {"nq": "sorl/NQ-v0", "hotpotqa": "sorl/HotpotQA-v0", "alphamed19k": "sorl/AlphaMed19K-v0"}


@pytest.fixture(params=IDS)
def task(request: pytest.FixtureRequest) -> Task:
    return load_task(request.param)


def corpus(task: Task) -> list[Passage]:
    return list(read_corpus(SAMPLES / f"{task.name}_corpus.jsonl"))


def rows(task: Task) -> list[dict[str, Any]]:
    lines = (SAMPLES / f"{task.name}_questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def examples(task: Task) -> list[Example]:
    assert task.embedded is not None
    return [*task.embedded("train"), *task.embedded("test")]


def score(task: Task, example: Example, *turns: str) -> float:
    return sum(task.reward(example, [parse_turn(turn) for turn in turns]).values())


def answer(text: str) -> str:
    return f"<think>so</think><answer>{text}</answer>"


def test_contract(task: Task) -> None:
    for split in ("train", "test"):
        assert [check for check in check_task(ToolUseEnv(task, split=split)) if not check.passed] == []


def test_environment_passes_the_checker_without_warnings(task: Task) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make(IDS[task.name])
        assert env.unwrapped.task is task
        check_env(env.unwrapped)
        env.close()


def test_sample_splits(task: Task) -> None:
    assert task.embedded is not None
    train, test = task.embedded("train"), task.embedded("test")
    assert len(train) + len(test) == len(rows(task)) >= 24
    every_fourth = [task.parse_row(row).question for row in rows(task)[3::4]]
    assert [example.question for example in test] == every_fourth
    assert not {example.id for example in train} & {example.id for example in test}
    assert len({example.question for example in examples(task)}) == len(rows(task))
    with pytest.raises(UserError, match="Did you mean 'train'"):
        task.embedded("trian")


def test_corpus_answers_the_questions(task: Task) -> None:
    passages = corpus(task)
    assert len({passage.id for passage in passages}) == len({p.title for p in passages}) == len(passages)
    assert len(passages) >= len(rows(task)) + 10  # distractors
    texts = [f" {normalize_answer(f'{p.title} {p.text}')} " for p in passages]
    for example in examples(task):
        golds = [example.options[example.golden_answers[0]]] if example.options else example.golden_answers
        if golds[0] in ("yes", "no"):
            continue
        if example.options:  # the passage has the option's main word, not always the whole option
            golds = [max(golds[0].split(), key=len)]
        assert any(f" {normalize_answer(gold)} " in text for gold in golds for text in texts), (
            example.question
        )


def test_real_questions_over_sample_passages_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SORL_CACHE", str(tmp_path / "cache"))
    data, passages = tmp_path / "q.jsonl", tmp_path / "c.jsonl"
    data.write_text('{"question": "Who?", "golden_answers": ["x"]}\n')
    passages.write_text('{"id": "0", "contents": "\\"Who\\"\\nA band."}\n')
    ToolUseEnv("nq", data=str(data))
    assert "searches only its embedded sample of passages: give the corpus" in caplog.text
    caplog.clear()
    ToolUseEnv("nq", data=str(data), tool_settings=ToolSettings(corpus=str(passages)))
    assert "embedded sample" not in caplog.text


@pytest.mark.parametrize("name", ["nq", "hotpotqa"])
def test_qa_prompt(name: str) -> None:
    task = load_task(name)
    prompt = task.prompt(Example("0", " who wrote it ", ("x",)))
    assert prompt.endswith("Question: who wrote it?\n")
    assert task.prompt(Example("0", "Who wrote it?", ("x",))).endswith("Question: Who wrote it?\n")
    for tag in ("<think>", "<search>", "<information>", "<answer>"):
        assert tag in prompt


@pytest.mark.parametrize("name", ["nq", "hotpotqa"])
def test_qa_reward(name: str) -> None:
    task = load_task(name)
    example = Example("0", "q", ("The Beatles", "Beatles, The"))
    assert score(task, example, answer("the  beatles!")) == 1.0
    assert score(task, example, answer("Beatles, or the Stones")) == 0.0
    assert score(task, example) == 0.0
    assert score(task, example, "<think>x</think><search>The Beatles</search>") == 0.0
    assert score(task, example, "<answer>The Beatles</answer>") == 0.0  # invalid: no think block
    # a gold that normalizes to nothing is no free reward, and the prompt's own example answer is never read
    assert score(task, Example("0", "q", ("the",))) == 0.0
    unsure = "<think>I do not know</think><search>x</search>"
    assert score(task, Example("0", "q", ("Beijing",)), unsure) == 0.0


def test_qa_rows() -> None:
    parse = load_task("hotpotqa").parse_row
    row = {"id": 5, "question": " Who? ", "golden_answers": ["a", "b"]}
    assert parse(row) == Example("5", "Who?", ("a", "b"))
    official = {"_id": "x", "question": "Who?", "answer": "a", "type": "bridge", "level": "hard"}
    example = parse({**official, "context": []})
    assert (example.golden_answers, example.metadata) == (("a",), {"type": "bridge", "level": "hard"})
    assert example.id == parse({"question": "Who?", "answer": ["b"]}).id  # the question's hash
    for row, column in (({"question": "Who?"}, "golden_answers"), ({"golden_answers": ["a"]}, "question")):
        with pytest.raises(KeyError, match=column):
            parse(row)
    for bad in ([], None, [1], {"a": 1}, 3):
        with pytest.raises(ValueError, match="'golden_answers' must be a text or a list of texts"):
            parse({"question": "Who?", "golden_answers": bad})
    for bad_question in ("", "  ", None, 3):
        with pytest.raises(ValueError, match="'question' must be a text"):
            parse({"question": bad_question, "golden_answers": ["a"]})


PUBLISHED = {
    "question": "A man has gout.\nWhich drug helps?\nA: Aspirin\nB: Colchicine\nC: Insulin\nD: Zinc",
    "answer": "B",
    "subset_name": "medqa",
}


def test_alphamed_published_columns() -> None:
    example = alphamed19k.parse_row(PUBLISHED)
    assert example.question == "A man has gout.\nWhich drug helps?"
    assert example.options == {"A": "Aspirin", "B": "Colchicine", "C": "Insulin", "D": "Zinc"}
    assert (example.golden_answers, example.metadata) == (("B",), {"subset_name": "medqa"})
    assert example.id == alphamed19k.parse_row(dict(PUBLISHED)).id


def test_alphamed_options_as_a_mapping() -> None:
    letters = "ABCDEFGHIJ"
    options = {letter: f"option {letter}" for letter in letters}
    row = {"id": "7", "question": "Which?", "options": options, "answer_idx": "J", "answer": "option J"}
    example = alphamed19k.parse_row(row)
    assert (example.id, example.question, example.golden_answers) == ("7", "Which?", ("J",))
    assert example.options == options
    padded = {"A": "yes", "B": "no", "C": "maybe", "D": None}  # as Parquet fills up shorter rows
    kept = {letter: text for letter, text in padded.items() if text}
    assert alphamed19k.parse_row({**row, "options": padded, "answer_idx": "C"}).options == kept


@pytest.mark.parametrize(
    ("question", "stem", "options"),
    [
        ("Which? A: x B: y", "Which?", {"A": "x", "B": "y"}),
        ("Which?\n\nA:x\nB:  y\nC: z \n", "Which?", {"A": "x", "B": "y", "C": "z"}),
        ("Hepatitis A: common?\nA: yes\nB: no", "Hepatitis A: common?", {"A": "yes", "B": "no"}),
        ("Types A: and B: exist?\nA: yes\nB: no", "Types A: and B: exist?", {"A": "yes", "B": "no"}),
        ("Which?\nA: type D: mild\nB: rash", "Which?", {"A": "type D: mild", "B": "rash"}),
        ("Which?\nA: x\nB: y\nB: again", "Which?", {"A": "x", "B": "y\nB: again"}),
        ("Ratio 3:4?\nA: 1:2\nB: 3:4", "Ratio 3:4?", {"A": "1:2", "B": "3:4"}),
    ],
)
def test_alphamed_inline_options(question: str, stem: str, options: dict[str, str]) -> None:
    assert alphamed19k.split_options(question) == (stem, options)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"question": "No options"}, ValueError, "has no options"),
        ({"question": "One\nA: x"}, ValueError, "has no options"),
        ({"answer": "E"}, ValueError, "'answer' is 'E', not one of the options A, B, C, D"),
        ({"answer": "Colchicine"}, ValueError, "'answer' is 'Colchicine'"),
        ({"answer": None}, ValueError, "'answer' must be a text"),
        ({"options": {"A": "x", "B": "y"}}, KeyError, "answer_idx"),
        ({"options": {"A": "x"}, "answer_idx": "A"}, ValueError, "two or more of the letters A to J"),
        (
            {"options": {"1": "x", "2": "y"}, "answer_idx": "1"},
            ValueError,
            "two or more of the letters A to J",
        ),
        ({"options": ["x", "y"], "answer_idx": "A"}, ValueError, "'options' must map letters to texts"),
    ],
)
def test_alphamed_bad_rows(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        alphamed19k.parse_row({**PUBLISHED, **change})


@pytest.mark.parametrize(
    ("given", "reward"), [("B", 1.0), ("b: colchicine", 1.0), ("A", 0.0), ("B: Insulin", 0.0)]
)
def test_alphamed_reward(given: str, reward: float) -> None:
    assert score(alphamed19k.TASK, alphamed19k.parse_row(PUBLISHED), answer(given)) == reward


def test_alphamed_prompt_is_the_papers() -> None:
    prompt = alphamed19k.TASK.prompt(alphamed19k.parse_row(PUBLISHED))
    assert prompt.startswith(
        "Answer the given medical multiple-choice question. Think step-by-step inside <think>"
    )
    assert "with ONLY the letter (e.g., <answer>A</answer>)." in prompt
    assert prompt.endswith(
        "Question: A man has gout.\nWhich drug helps?\nOptions:\nA: Aspirin\nB: Colchicine\nC: Insulin\nD: Zinc\n"
    )


def test_alphamed_shaped_rows_agree_with_their_options(shared_data: Path) -> None:
    """Real questions in both forms: the inline split gives the options that were put in."""
    whole = {
        example.id: example
        for name in ("medqa_test", "medmcqa_dev")
        for example in load_examples(
            alphamed19k.TASK, str(shared_data / "medical" / f"{name}.jsonl.gz")
        ).examples
    }
    inline = load_examples(alphamed19k.TASK, str(shared_data / "alphamed" / "train_shaped.jsonl.gz")).examples
    shared = [example for example in inline if example.id in whole]
    assert len(shared) > 2_500
    for example in shared:
        assert example.options == whole[example.id].options
        assert example.golden_answers == whole[example.id].golden_answers
