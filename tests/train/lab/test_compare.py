"""``sorl-lab compare``: each algorithm at its own best rate, and at ten times it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from sorl_env.errors import UserError
from sorl_train.lab import compare
from sorl_train.lab.cli import main
from sorl_train.lab.study import Study, load_study

from .test_study import write_study

RATES = [5e-5, 1.6e-4, 5e-4, 1.6e-3, 5e-3]


def study_of(tmp_path: Path, rates: list[float] = RATES, **changes: Any) -> Study:
    return load_study(str(write_study(tmp_path / "mine.yaml", axes={"optim.lr": rates}, **changes)))


def result(
    arm: str, rate: float, seed: int, curve: list[float], step_s: float | None = 1.0
) -> dict[str, Any]:
    figures = {"final": curve[-1], "peak": max(curve), "curve": list(enumerate(curve)), "step_s": step_s}
    return {"arm": arm, "optim.lr": rate, "seed": seed, **figures}


def test_rates_are_those_that_have_their_tenfold(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    assert compare.rates_of(study) == {5e-5: 5e-4, 1.6e-4: 1.6e-3, 5e-4: 5e-3}
    first = compare.first_runs(study)
    assert len(first) == 12 and {run.config.optim.lr for run in first} == {5e-5, 1.6e-4, 5e-4}


@pytest.mark.parametrize(
    ("axes", "complaint"),
    [
        ({"optim.lr": [1e-4, 1e-3], "update.epochs": [1, 2]}, "its axes: optim.lr, update.epochs"),
        ({"optim.lr": [1e-4, 2e-4]}, "none of its rates 0.0001, 0.0002 is 10 times another"),
    ],
)
def test_a_study_that_cannot_be_compared_is_refused(
    axes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    study = load_study(str(write_study(tmp_path / "mine.yaml", axes=axes)))
    with pytest.raises(UserError, match=complaint):
        compare.rates_of(study)


def test_the_best_rate_by_hand(tmp_path: Path) -> None:
    """The highest mean; of equal means the one that is good sooner; of those the lower rate."""
    study = study_of(tmp_path)
    results = [
        *(result("ppo", 5e-5, seed, [0.5, 0.7, 0.9]) for seed in (0, 1)),
        *(result("ppo", 1.6e-4, seed, [0.5, 0.9, 0.9]) for seed in (0, 1)),
        *(result("ppo", 5e-4, seed, [0.5, 0.9, 0.9]) for seed in (0, 1)),
        *(result("so_grpo", 5e-5, seed, [0.5, 0.95, 0.8]) for seed in (0, 1)),
        result("so_grpo", 1.6e-4, 0, [0.5, 1.0, 1.0]),
        result("so_grpo", 1.6e-4, 1, [0.5, 1.0, 0.5]),
        *(result("so_grpo", 5e-4, seed, [0.5, 0.9, 0.81]) for seed in (0, 1)),
    ]
    assert compare.best_rates(study, results) == {"ppo": 1.6e-4, "so_grpo": 5e-4}
    runs = compare.tenfold_runs(study, results)
    expected = {(arm, rate, seed) for arm, rate in (("ppo", 1.6e-3), ("so_grpo", 5e-3)) for seed in (0, 1)}
    assert {(run.arm, run.config.optim.lr, run.seed) for run in runs} == expected
    assert compare.best_rates(study, results[:-2]) == {"ppo": 1.6e-4}  # so_grpo lacks a rate


def test_the_table_by_hand(tmp_path: Path) -> None:
    study = study_of(tmp_path, [1e-4, 1e-3])
    results = [
        result("ppo", 1e-4, 0, [0.5, 0.7, 0.8], 2.0),
        result("ppo", 1e-4, 1, [0.5, 0.92, 0.9], 2.2),
        result("ppo", 1e-3, 0, [0.5, 0.8, 0.3], 9.0),
        result("ppo", 1e-3, 1, [0.5, 0.8, 0.5], 9.0),
        result("so_grpo", 1e-4, 0, [0.5, 0.95, 0.95], 4.2),
        result("so_grpo", 1e-4, 1, [0.5, 0.85, 0.95], 4.2),
    ]
    heads, _, so_grpo, ppo = compare.table(study, results).splitlines()
    assert heads.startswith("| | best rate | final success | steps to 0.9, by seed | at 10 times the rate |")
    assert so_grpo == "| so_grpo | 0.0001 | 0.95 (0.95 to 0.95) | 1 2 | not run | | 2.00 |"
    assert ppo == "| ppo | 0.0001 | 0.85 (0.80 to 0.90) | - 1 | 0.40 (0.30 to 0.50) | 1 of 2 | 1.00 |"
    assert math.isinf(compare.steps_to(results[0]))


def test_a_run_that_broke_off_has_lost_everything(tmp_path: Path) -> None:
    """Otherwise the mean would be that of the seeds that survived, and an arm whose runs all broke off was gone."""
    study = study_of(tmp_path, [1e-4, 1e-3], arms={"ppo": {"algo": "ppo"}})
    results = [result("ppo", 1e-4, 0, [0.5, 0.9, 0.9]) | {"id": study.runs[0].id}]
    for run in study.runs[1:]:  # the second seed at the rate, and both at ten times it
        (tmp_path / "runs" / run.id).mkdir(parents=True)
    assert compare.with_lost(study, results, tmp_path) == results  # they may still go on
    for run in study.runs[1:]:
        (tmp_path / "runs" / run.id / "non_finite_000003.jsonl").touch()
    *_, line = compare.table(study, compare.with_lost(study, results, tmp_path)).splitlines()
    assert line == "| ppo | 0.0001 | 0.45 (0.00 to 0.90) | 1 - | 0.00 (0.00 to 0.00) | 2 of 2 | 1.00 |"


@pytest.mark.slow
def test_ten_times_the_best_rate_is_run_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also: the same command goes on where it stopped."""
    monkeypatch.setenv("SORL_CACHE", str(tmp_path / "cache"))
    axes = {"optim.lr": [1e-4, 2e-4, 1e-3, 2e-3]}
    study = write_study(tmp_path / "mine.yaml", axes=axes, seeds=[0], arms={"ppo": {"algo": "ppo"}})
    command = ["compare", "--config", str(study), "--out", str(tmp_path / "out"), "--jobs", "1"]
    assert main(command) == 0
    results = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [run["optim.lr"] for run in results][:2] == [1e-4, 2e-4] and len(results) == 3
    out, error = capsys.readouterr()
    assert "| ppo | 0.000" in out and out.count("| 1.00 |") == 1 and "1 runs, 0 done" in error
    assert main(command) == 0
    assert "1 runs, 1 done" in capsys.readouterr().err
