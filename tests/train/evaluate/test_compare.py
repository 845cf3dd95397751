"""Comparing and tables: on folders written by hand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sorl_env.errors import UserError
from sorl_train.evaluate.answers import scores
from sorl_train.evaluate.cli import main
from sorl_train.evaluate.compare import compare
from sorl_train.evaluate.intervals import mean_interval
from sorl_train.evaluate.results import EvalResult, EvalResultsFile
from sorl_train.evaluate.summary import published, summarize, tables


def row(
    index: int, score: float, *, task: str = "nq", mode: str = "agent", sample: int = 0, **changes: Any
) -> EvalResult:
    answered = {"turns": ({"text": "t"},), "answer": "right" if score else "wrong", "reward": score}
    record: dict[str, Any] = {
        "example_id": f"q{index}",
        "question": f"question {index}?",
        "golden_answers": ("right",),
        "options": None,
        "prompt": "p",
        "scores": {"em": score, "f1": score, "subem": score},
        "stop_reason": "answer",
        "searches": 0,
        "seed": 0,
    }
    return EvalResult(task=task, mode=mode, index=index, sample=sample, **(record | answered | changes))


def write(folder: Path, rows: Sequence[EvalResult]) -> str:
    folder.mkdir()
    settings = {"label": folder.name, "tasks": ["minihop"], "modes": ["agent"], "limit": None, "samples": 1}
    (folder / "settings.json").write_text(json.dumps(settings))
    (folder / "summary.json").write_text("{}")
    (folder / "results.jsonl").write_text("".join(json.dumps(dataclasses.asdict(r)) + "\n" for r in rows))
    return str(folder)


def test_a_planted_difference_of_three_points_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """2000 questions, 1200 right in A; B loses 60 of them and gains 120: +3 points, p = 9e-6 by McNemar."""
    a = [float(i < 1200) for i in range(2000)]
    b = [float((i < 1200 and i >= 60) or 1200 <= i < 1320) for i in range(2000)]
    folders = [write(tmp_path / "A", [row(i, score) for i, score in enumerate(a)])]
    folders += [write(tmp_path / "B", [row(i, score) for i, score in enumerate(b)])]
    (found,) = compare(*folders)
    result = found.result
    assert (result.questions, result.gained, result.lost) == (2000, 120, 60)
    assert result.difference.mean == pytest.approx(0.03)
    assert 0.015 < result.difference.low < 0.019 and 0.041 < result.difference.high < 0.045  # +- 1.96 * .0067
    assert (result.test, result.p) == ("McNemar", pytest.approx(9.3e-6, rel=0.1))
    assert (len(found.gained), len(found.lost)) == (120, 60) and found.lost[0] == ("q0", "question 0?")
    assert main(["compare", *folders]) == 0
    printed = capsys.readouterr().out
    assert "| nq | agent | em | 2000 | 60.00 | 63.00 | +3.00 |" in printed and "B is better" in printed
    assert main(["compare", *folders, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)[0]["gained"]) == 120
    (backwards,) = compare(*folders[::-1])
    assert backwards.result.difference.high < 0


def test_only_shared_questions_count_and_modes_can_be_compared(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [row(0, 1.0), row(1, 0.0), row(2, 1.0), row(3, 1.0, excluded=True)])
    elsewhere = [{"example_id": f"q{i}", "question": f"question {i}?"} for i in (1, 2)]
    b = write(
        tmp_path / "b", [row(7, 1.0, **elsewhere[0]), row(8, 0.0, **elsewhere[1]), row(3, 0.0), row(9, 1.0)]
    )
    (found,) = compare(a, b)
    assert found.result.questions == 2
    assert (found.gained, found.lost) == ((("q1", "question 1?"),), (("q2", "question 2?"),))
    both = write(tmp_path / "both", [row(0, 0.0, mode="rag"), row(0, 1.0)])
    (modes,) = compare(f"{both}:rag", f"{both}:agent")
    assert (modes.mode_a, modes.mode_b, modes.result.gained) == ("rag", "agent", 1)
    with pytest.raises(UserError, match="name a mode on both sides"):
        compare(f"{both}:rag", a)
    with pytest.raises(UserError, match=r"share no question: a has nq \(agent\) against c has"):
        compare(a, write(tmp_path / "c", [row(0, 1.0, task="other")]))
    with pytest.raises(UserError, match="share no question"):  # with the ids of a, of another seed
        compare(a, write(tmp_path / "d", [row(0, 1.0, question="another?")]))
    with pytest.raises(UserError, match=r"no metric 'choice'"):
        compare(a, b, "choice")


def test_an_unfinished_side_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [write(tmp_path / name, [row(0, 1.0)]) for name in "ab"]
    assert main(["compare", *folders]) == 0
    assert capsys.readouterr().err == ""
    settings = {"label": "b", "tasks": {"nq": {}}, "modes": ["agent"], "limit": 1, "samples": 1}
    (tmp_path / "b" / "settings.json").write_text(json.dumps(settings))
    EvalResultsFile(tmp_path / "b", settings | {"limit": 2}).add(row(1, 1.0))  # it grows, and is killed
    assert main(["compare", *folders]) == 0
    assert capsys.readouterr().err.startswith(
        f"sorl-eval: {folders[1]} holds an unfinished evaluation, in which"
    )


def test_samples_are_averaged_and_doubled_ids_told_apart(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [row(0, 1.0), row(0, 0.0, sample=1), row(1, 1.0, example_id="q0")])
    b = write(tmp_path / "b", [row(0, 1.0), row(0, 1.0, sample=1), row(1, 0.0, example_id="q0")])
    (found,) = compare(a, b)
    assert (found.result.questions, found.result.mean_a, found.result.mean_b) == (2, 0.75, 0.5)
    assert found.result.test == "sign flips"


def test_answers_to_one_question_are_averaged_before_the_interval() -> None:
    """Two questions with 50 samples each are two questions, not a hundred."""
    (entry,) = summarize([row(i, float(i == 0), sample=n) for i in range(2) for n in range(50)])
    assert (entry["questions"], entry["samples"]) == (2, 50)
    assert entry["metrics"]["em"] == dataclasses.asdict(mean_interval([1.0, 0.0]))


def test_questions_with_options_are_averaged_beside_open_ones() -> None:
    (entry,) = summarize([row(0, 1.0), row(1, 0.0), row(2, 0.0, scores={"choice": 1.0})])
    assert (entry["questions"], entry["main"]) == (3, "em")
    assert (entry["metrics"]["em"]["mean"], entry["metrics"]["choice"]["mean"]) == (0.5, 1.0)
    assert scores("A", (), {"A": "yes"}) == {"choice": 0.0}  # whose right option is not known


def summary(label: str, rows: Sequence[EvalResult], is_sample: bool = False) -> dict[str, Any]:
    return {"label": label, "entries": [{**entry, "is_sample": is_sample} for entry in summarize(rows)]}


def test_published_averages_are_those_of_their_rows() -> None:
    lines = [line for group in published()["groups"] for line in group["rows"]]
    assert len(lines) == 7
    for line in lines:  # the paper cuts 53.888 to 53.88 and rounds 55.334 to 55.34
        assert sum(line["values"]) / 5 == pytest.approx(line["average"], abs=0.0085), line["name"]


def test_published_rows_stand_beside_ours_and_are_marked() -> None:
    choice = {"options": {"A": "x", "B": "y"}, "golden_answers": ("A",)}
    rows = [
        row(i, 0.0, task=task, mode=mode, scores={"choice": float(i < 3)}, **choice)
        for task in ("medqa", "medmcqa", "pubmedqa", "mmlu_medical", "medxpertqa")
        for mode in ("cot", "agent")
        for i in range(4)
    ]
    text = tables([summary("my_model", rows)])
    assert "| Model | MedQA† | MedMCQA† | PubMedQA* | MMLU-M* | MedXpert* | Avg. |" in text
    llama = "| Llama-3.1-8B-Instruct (CoT), published | 48.62 | 59.80 | 64.40 | 54.20 | 13.02 | 48.01 |"
    assert llama in text
    ours = [line for line in text.splitlines() if line.startswith("| my_model")]
    assert len(ours) == 2 and ours[0].startswith("| my_model (CoT) | 75.00 [30.1, 95.4] |")
    assert ours[1].endswith("| 75.00 |") and "published" not in "".join(ours)
    assert text.index("my_model (CoT)") < text.index("Retrieval-Augmented") < text.index("my_model (agent)")


def test_other_tasks_get_a_table_of_their_own_and_missing_cells_a_dash() -> None:
    rows = [row(0, 1.0, task="nq"), row(0, 0.0, task="medqa", scores={"choice": 0.0})]
    text = tables([summary("m", rows, is_sample=True), summary("n", [row(0, 1.0)])])
    first, second = text[: text.index("| Model | nq |")], text[text.index("| Model | nq |") :]
    assert "| m (agent) | 0.00 [0.0, 79.3] | - | - | - | - | - |" in first
    assert "embedded sample, which is not the benchmark" in second
    # the paper's headings stand over its own rows only
    assert "Methods" not in second and "published" not in second and "m (agent)" in second
