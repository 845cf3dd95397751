"""benchmarks/eval_agreement.py finds what differs between two evaluations, and says why."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from sorl_train.evaluate.cli import main

from .conftest import WORLD

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "eval_agreement.py"
EMBEDDING = "model.embed_tokens.weight"
Row = dict[str, Any]


@pytest.fixture(scope="module")
def folder(run_folder: Path) -> Path:
    return run_folder / "checkpoints" / "best" / "policy"


@pytest.fixture(scope="module")
def evaluated(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("agreement") / "here"
    knobs = [f"--task_args.{key}={value}" for key, value in WORLD.items()]
    command = ["--task", "minihop", *knobs, "--quiet", "--hardware.threads", "1", "--out", str(out)]
    options = [
        "--mode",
        "direct",
        "agent",
        "--limit",
        "4",
        "--limits.max_new_tokens",
        "8",
        "--limits.max_turns",
        "2",
    ]
    assert main([str(folder), *command, *options]) == 0
    return out


def changed(evaluated: Path, out: Path, *changes: Callable[[Row], None]) -> list[Row]:
    """A copy of the evaluation with the first rows of mode agent changed, one change each; returns its rows."""
    shutil.copytree(evaluated, out)
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    agents = [row for row in rows if row["mode"] == "agent"]
    for row, change in zip(agents, changes, strict=False):
        change(row)
    (out / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return agents


def agreement(folder: Path, a: Path, b: Path, report: Path) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, str(SCRIPT), str(folder), str(a), str(b), "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    figures = json.loads(report.read_text()) if report.is_file() else {}
    return done.returncode, figures, done.stdout + done.stderr


def test_the_same_twice(folder: Path, evaluated: Path, tmp_path: Path) -> None:
    status, figures, output = agreement(folder, evaluated, evaluated, tmp_path / "report.json")
    assert status == 0 and figures["differences"] == []
    assert "| all | | 8 | 8 (100.0%) | 8 (100.0%) | 8 (100.0%) | none |" in output


@pytest.mark.slow
def test_a_near_tie_is_told_from_another_choice(folder: Path, evaluated: Path, tmp_path: Path) -> None:
    """The embedding is the output projection too: a token with a copy of another's row is exactly as likely."""

    def swap(row: Row, turn: int, token: int) -> None:
        row["turns"][turn]["token_ids"][2] = token

    weights = load_file(folder / "model.safetensors")
    rows = changed(evaluated, tmp_path / "plain")
    drawn = {i for row in rows for turn in row["turns"] for i in turn["token_ids"]}
    twin, other = [i for i in range(20, len(weights[EMBEDDING])) if i not in drawn][:2]
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    weights[EMBEDDING][twin] = weights[EMBEDDING][rows[0]["turns"][1]["token_ids"][2]]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})

    changed(evaluated, tmp_path / "tie", lambda row: swap(row, 1, twin))
    status, figures, output = agreement(model, evaluated, tmp_path / "tie", tmp_path / "tie.json")
    (found,) = figures["differences"]
    assert (status, found["cause"], found["turn"], found["position"]) == (0, "near tie", 1, 2)
    assert found["gap"] == pytest.approx(0.0, abs=1e-6) and found["candidates"][1]["token_id"] == twin
    assert "near tie" in output and "same answer" in output

    changed(evaluated, tmp_path / "other", lambda row: swap(row, 0, other))
    status, figures, _ = agreement(model, evaluated, tmp_path / "other", tmp_path / "other.json")
    (found,) = figures["differences"]
    assert (status, found["cause"], found["turn"], found["position"]) == (1, "choice", 0, 2)
    low, high = sorted(candidate["log_prob"] for candidate in found["candidates"])
    assert found["gap"] >= high - low > 1e-3


def test_what_is_no_matter_of_numbers(folder: Path, evaluated: Path, tmp_path: Path) -> None:
    def shorter(row: Row) -> None:
        row["turns"][0]["token_ids"].pop()

    def fewer_turns(row: Row) -> None:
        row["turns"].pop()

    def observation(row: Row) -> None:
        row["turns"][0]["observation"] += "!"

    def answer(row: Row) -> None:
        row["answer"], row["scores"]["em"] = "Rome", 1.0

    def prompt(row: Row) -> None:
        row["prompt"] += "?"

    def text(row: Row) -> None:
        row["turns"][1]["text"] += "</answer>"

    def counts(row: Row) -> None:
        row["action_tokens"] += 1

    first = (shorter, fewer_turns, observation, answer)
    changed(evaluated, tmp_path / "a", *first)
    status, figures, output = agreement(folder, evaluated, tmp_path / "a", tmp_path / "a.json")
    assert status == 1
    assert [one["cause"] for one in figures["differences"]] == ["length", "length", "observation", "reading"]
    (direct, agent) = figures["cells"]
    assert (direct["same_tokens"], agent["same_tokens"]) == (4, 0)
    assert (agent["questions"], agent["same_answer"], agent["same_answer_up_to_numerics"]) == (4, 3, 3)
    assert "answers None and 'Rome'" in output
    changed(evaluated, tmp_path / "b", prompt, text, counts)
    status, figures, _ = agreement(folder, evaluated, tmp_path / "b", tmp_path / "b.json")
    assert (status, [one["cause"] for one in figures["differences"]]) == (1, ["prompt", "text", "counts"])


def test_a_question_that_one_side_lacks_is_counted(folder: Path, evaluated: Path, tmp_path: Path) -> None:
    def outage(row: Row) -> None:
        row["excluded"] = True

    changed(evaluated, tmp_path / "b", outage)
    status, figures, output = agreement(folder, evaluated, tmp_path / "b", tmp_path / "b.json")
    assert (status, figures["answered_on_one_side"], figures["differences"]) == (1, 1, [])
    assert "1 of the questions: answered on one side alone" in output


def test_what_cannot_be_compared_is_refused(folder: Path, evaluated: Path, tmp_path: Path) -> None:
    rows = changed(evaluated, tmp_path / "old", lambda row: row["turns"][0].pop("token_ids"))
    assert len(rows[0]["turns"]) == 2
    status, _, output = agreement(folder, evaluated, tmp_path / "old", tmp_path / "r.json")
    assert status == 2 and "without token ids" in output
    settings = json.loads((evaluated / "settings.json").read_text())
    settings["tasks"]["minihop"]["limits"]["max_new_tokens"] = 9
    (tmp_path / "old" / "settings.json").write_text(json.dumps(settings))
    status, _, output = agreement(folder, evaluated, tmp_path / "old", tmp_path / "r.json")
    assert status == 2 and "limits.max_new_tokens: 8 there, 9 now" in output
