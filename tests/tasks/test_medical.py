"""The medical benchmarks: samples, published and prepared rows, prompts, rewards, environments, real questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sorl_env import Example, Task, ToolUseEnv, UserError, load_examples, load_task, parse_turn
from sorl_env.commands.check_task import check_task
from sorl_env.rewards import normalize_answer
from sorl_tasks import alphamed19k, bioasq, medical
from sorl_tools.corpus import read_corpus

SAMPLES = Path(medical.__file__).parent / "samples"
CHOICE = ("medqa", "medmcqa", "pubmedqa", "mmlu_medical", "medxpertqa")
REAL = {  # file of the shared data, questions in it
    "medqa": ("medqa_test", 626),
    "medmcqa": ("medmcqa_dev", 2124),
    "pubmedqa": ("pubmedqa", 736),
    "mmlu_medical": ("mmlu_med_test", 515),
    "medxpertqa": ("medxpertqa_text", 131),
    "bioasq": ("bioasq_factoid_yesno", 669),
}


@pytest.fixture(params=REAL)
def task(request: pytest.FixtureRequest) -> Task:
    return load_task(request.param)


def score(task: Task, example: Example, answer: str) -> float:
    turns = [parse_turn(f"<think>so</think><answer>{answer}</answer>")]
    return sum(task.reward(example, turns).values())


def examples(task: Task) -> list[Example]:
    assert task.embedded is not None
    return [*task.embedded("train"), *task.embedded("test")]


# --- the tasks as a whole -------------------------------------------------------------------------------------


def test_real_questions_keep_the_contract(task: Task, shared_data: Path) -> None:
    name, count = REAL[task.name]
    env = ToolUseEnv(task, data=str(shared_data / "medical" / f"{name}.jsonl.gz"), split="test")
    assert len(env.examples) == count
    assert [check for check in check_task(env, limit=count) if not check.passed] == []


def test_the_sample_is_one_and_its_passages_answer_it(task: Task) -> None:
    assert load_examples(task, split="test").is_sample
    found = examples(task)
    assert len({example.id for example in found}) == len({e.question for e in found}) == len(found) == 8
    corpus = "literature" if task.name in ("pubmedqa", "bioasq") else "alphamed19k"
    text = normalize_answer(
        " ".join(f"{p.title} {p.text}" for p in read_corpus(SAMPLES / f"{corpus}_corpus.jsonl"))
    )
    for example in found:
        golds = [example.options[example.golden_answers[0]]] if example.options else example.golden_answers
        if golds[0] in ("yes", "no", "maybe", "Factor VIII"):  # the last one is asked for with "except"
            continue
        # an option may put it in other words: the main one has to be there
        assert max(normalize_answer(golds[0]).split(), key=len) in text, example.question


@pytest.mark.parametrize("name", CHOICE)
def test_choice_tasks_use_the_papers_prompt_and_score_the_letter(name: str) -> None:
    task = load_task(name)
    example = examples(task)[0]
    assert task.prompt(example) == alphamed19k.prompt(example)
    gold = example.golden_answers[0]
    other = next(letter for letter in example.options or {} if letter != gold)
    assert score(task, example, gold) == score(task, example, f"({gold.lower()})") == 1.0
    assert score(task, example, other) == score(task, example, f"{gold} or {other}") == 0.0


# --- rows as published ----------------------------------------------------------------------------------------
def test_medmcqa_published_row() -> None:
    row = {
        "id": "e9ad821a",
        "question": "Lack of which vitamin causes scurvy?",
        "cop": 2,
        "opa": "A",
        "opb": "B1",
        "opc": "C",
        "opd": "D",
        "choice_type": "single",
        "exp": None,
        "subject_name": "Biochemistry",
        "topic_name": None,
    }
    example = medical.MEDMCQA.parse_row(row)
    assert example.options == {"A": "A", "B": "B1", "C": "C", "D": "D"}
    assert (example.id, example.golden_answers) == ("e9ad821a", ("C",))
    assert example.metadata == {"subject": "Biochemistry"}
    for withheld in (-1, 4, "2", None, True):
        with pytest.raises(ValueError, match="'cop' must number one of 4 options from 0"):
            medical.MEDMCQA.parse_row({**row, "cop": withheld})


def test_pubmedqa_published_row() -> None:
    row = {"pubid": 21645374, "question": "Do they?", "context": {}, "final_decision": "maybe"}
    example = medical.PUBMEDQA.parse_row(row)
    assert (example.id, example.golden_answers) == ("21645374", ("C",))
    assert example.options == {"A": "yes", "B": "no", "C": "maybe"}
    with pytest.raises(ValueError, match="'final_decision' must be yes, no or maybe, not 'perhaps'"):
        medical.PUBMEDQA.parse_row({**row, "final_decision": "perhaps"})
    with pytest.raises(UserError, match="task pubmedqa has no data set on the hub"):
        load_examples(medical.PUBMEDQA, "hf:")


def test_mmlu_published_row() -> None:
    row = {"question": "How many?", "subject": "anatomy", "choices": ["1", "2", "3", "4"], "answer": 3}
    example = medical.MMLU_MEDICAL.parse_row(row)
    assert (example.golden_answers, example.metadata) == (("D",), {"subject": "anatomy"})
    assert example.options == {"A": "1", "B": "2", "C": "3", "D": "4"}
    with pytest.raises(ValueError, match="'answer' must number one of 4"):
        medical.MMLU_MEDICAL.parse_row({**row, "answer": 4})
    with pytest.raises(ValueError, match="'choices' must be a list of texts"):
        medical.MMLU_MEDICAL.parse_row({**row, "choices": "1234"})


MEDXPERT = {
    "id": "Text-1",
    "question": "What is it?\nAnswer Choices: (A) Gout (B) Rash",
    "options": {"A": "Gout", "B": "Rash"},
    "label": "B",
    "body_system": "Skin",
}


def test_medxpertqa_published_rows_of_both_places() -> None:
    on_the_hub = medical.MEDXPERTQA.parse_row(MEDXPERT)
    listed = [{"letter": "A", "content": "Gout"}, {"letter": "B", "content": "Rash"}]
    in_the_repository = medical.MEDXPERTQA.parse_row({**MEDXPERT, "options": listed, "label": ["B"]})
    assert on_the_hub == in_the_repository
    assert (on_the_hub.question, on_the_hub.golden_answers) == ("What is it?", ("B",))
    with pytest.raises(ValueError, match="'label' must hold one letter"):
        medical.MEDXPERTQA.parse_row({**MEDXPERT, "label": ["A", "B"]})


def test_medxpertqa_cuts_only_the_choices() -> None:
    kept = medical.MEDXPERTQA.parse_row({**MEDXPERT, "question": "Answer Choices: what are they?"})
    assert kept.question == "Answer Choices: what are they?"


def test_prepared_choice_rows_name_the_letter_in_golden_answers(tmp_path: Path) -> None:
    row = {"id": "1", "question": "Which?", "options": {"A": "x", "B": "y"}, "golden_answers": ["B"]}
    for name in (*CHOICE, "alphamed19k"):
        assert load_task(name).parse_row(row).golden_answers == ("B",)
        for bad in (["A", "B"], [], "B", [1]):
            with pytest.raises(ValueError, match="'golden_answers' must hold one letter"):
                load_task(name).parse_row({**row, "golden_answers": bad})
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps({**row, "golden_answers": ["C"]}))
    with pytest.raises(UserError, match=r"test\.jsonl:1: .*'golden_answers' is 'C', not one of"):
        load_examples(load_task("medqa"), path, "test")


def release(kind: str, answer: Any) -> dict[str, Any]:
    return {"id": "5", "body": "Which one?", "type": kind, "exact_answer": answer}


@pytest.mark.parametrize(
    ("kind", "answer", "golds"),
    [
        ("yesno", "Yes", ("yes",)),
        ("yesno", "no", ("no",)),
        ("factoid", [["XIa", "factor XIa"]], ("XIa", "factor XIa")),
        ("factoid", ["XIa"], ("XIa",)),
        ("factoid", "XIa ", ("XIa",)),
        ("factoid", [["a", "b"], ["a"]], ("a", "b")),
    ],
)
def test_bioasq_released_rows(kind: str, answer: Any, golds: tuple[str, ...]) -> None:
    example = bioasq.parse_row(release(kind, answer))
    assert (example.id, example.question, example.golden_answers) == ("5", "Which one?", golds)
    assert example.metadata == {"type": kind}
    assert bioasq.prompt(example).endswith("Answer yes or no.\n") is (kind == "yesno")
    assert score(bioasq.TASK, example, golds[-1].upper()) == 1.0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (release("list", [["a"]]), "'type' must be one of factoid, yesno, not 'list'"),
        (release("yesno", "maybe"), "'exact_answer' must be yes or no"),
        (release("factoid", [[]]), "'golden_answers' must be a text or a list of texts"),
        (release("factoid", None), "'exact_answer' must hold texts"),
    ],
)
def test_bioasq_bad_rows(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bioasq.parse_row(row)
