"""``sorl-lab``: what a study is, what it measures, whole small studies; and the tables of docs/stability.md."""

from __future__ import annotations

import dataclasses
import json
import math
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sorl_env.errors import UserError
from sorl_train.algorithms import ALGORITHMS
from sorl_train.lab.cli import main
from sorl_train.lab.study import load_study, table, write_results
from sorl_train.run.folder import RunDir
from sorl_train.run.stability import measure

WORLD = {"entities": 240, "lookalikes": 4, "train_questions": 48, "test_questions": 16, "hops": [1, 2]}
SMALL = {
    "task_args": WORLD,
    "tiny": {"hidden_size": 48, "num_layers": 2, "num_heads": 4},
    "hardware.threads": 1,
    "sft.num_demos": 48,
    "sft.steps": 60,
    "sft.batch_size": 8,
    "sft.lr": 6e-3,
    "rollout.batch_size": 16,
    "update.steps": 2,
    "update.mini_batch_size": 8,
    "eval.num_examples_final": 8,
    "eval.every": 1,
    "eval.num_examples": 8,
    "checkpoint.every": 1,
    "log.tensorboard": False,
}


def write_study(path: Path, **changes: Any) -> Path:
    study = {
        "base": "minihop",
        "settings": SMALL,
        "seeds": [0, 1],
        "arms": {"ppo": {"algo": "ppo"}, "so_grpo": {"algo": "so_grpo", "rollout.group_size": 4}},
        "axes": {"optim.lr": [1e-4, 1e-3]},
    }
    path.write_text(json.dumps(study | changes))  # YAML is a superset of JSON
    return path


def test_runs_are_every_combination_first_seeds_first(tmp_path: Path) -> None:
    study = load_study(str(write_study(tmp_path / "mine.yaml")))
    assert study.name == "mine" and len(study.runs) == 8 and len({run.id for run in study.runs}) == 8
    assert [run.seed for run in study.runs] == [0] * 4 + [1] * 4
    assert study.runs[0].cell == "ppo, optim.lr=0.0001"
    assert (study.runs[3].config.algo, study.runs[3].config.optim.lr) == ("so_grpo", 1e-3)


def test_an_arm_may_set_what_only_some_points_of_an_axis_read(tmp_path: Path) -> None:
    arms = {"ppo": {"algo": "ppo", "update.trust_max_scale": 2, "task_args": {"hops": [2]}}}
    axes, settings = {"update.trust_kl": [None, 0.01]}, {**SMALL, "task_args.hops": [1]}
    study = load_study(
        str(write_study(tmp_path / "mine.yaml", arms=arms, axes=axes, settings=settings, seeds=[0]))
    )
    assert [run.config.update.trust_kl for run in study.runs] == [None, 0.01]
    for run in study.runs:
        assert run.config.update.trust_max_scale == 2 and run.config.task_args["hops"] == [2]
    with pytest.raises(UserError, match=r"ppo at .*trust_max_scale 2\.0 has no effect"):
        load_study(str(write_study(tmp_path / "mine.yaml", arms=arms, axes={})))


@pytest.mark.slow
def test_packaged_studies_are_valid() -> None:
    severe = load_study("severe")
    papers = {"ppo", "turn_ppo", "s_ppo", "so_ppo", "grpo", "gspo", "so_grpo"}  # not the later algorithms
    assert {run.config.algo for run in severe.runs} == papers and papers < set(ALGORITHMS)
    grouped = [run.config.rollout.group_size for run in severe.runs if run.config.algorithm.needs_groups]
    assert set(grouped) == {8}
    assert len(load_study("region").runs) == 4 * 14 * 5
    turns = {run.arm: run.config for run in load_study("turn_credit").runs}
    assert {"grpo", "mt_grpo", "gigpo"} <= set(turns) and turns["gigpo"].loss.gamma == 0.95
    assert load_study("alarm").runs[0].config.optim.warmup_ratio == 1.0
    assert len(load_study("smollm2_severe").runs) == 3 * 8 and len(load_study("qwen_severe").runs) == 5


def test_an_axis_may_have_named_settings(tmp_path: Path) -> None:
    axes = {
        "reuse": {"once": None, "thrice": {"update.epochs": 3, "optim.lr": 1e-3}},
        "sampler.temperature": [0.5],
    }
    runs = load_study(str(write_study(tmp_path / "mine.yaml", axes=axes, seeds=[0]))).runs
    assert [run.cell for run in runs[:2]] == [
        f"ppo, reuse={name}, sampler.temperature=0.5" for name in ("once", "thrice")
    ]
    assert [run.config.update.epochs for run in runs[:2]] == [1, 3]
    assert runs[1].config.optim.lr == 1e-3 and runs[1].facts["reuse"] == "thrice"


def test_values_of_an_axis_may_be_lists_and_hardly_differ(tmp_path: Path) -> None:
    axes = {
        "task_args.hops": [[1], [1, 2]],
        "update.steps": [1_000_000, 1_000_001],
        "optim.lr": [0.1, 0.1000001],
    }
    runs = load_study(str(write_study(tmp_path / "mine.yaml", axes=axes, settings={}, seeds=[0]))).runs
    assert len({run.cell for run in runs}) == len(runs) == 16
    assert runs[0].cell == "ppo, task_args.hops=[1], update.steps=1000000, optim.lr=0.1"
    assert runs[7].config.task_args["hops"] == [1, 2] and runs[7].facts["task_args.hops"] == [1, 2]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"arms": {"ppo": {"algo": "pppo"}}}, "ppo at .*pppo"),
        ({"arms": ["ppo"]}, r"arms: \['ppo'\]: expected names with their settings"),
        ({"arms": {"ppo": "ppo"}}, "arm ppo: ppo: expected settings"),
        ({"arms": {"fast": {"optim.lr": 1e-2}}}, "arm fast sets optim.lr: .* not in both"),
        ({"axes": {"optim.lr": 1e-3}}, "optim.lr: 0.001: expected a list"),
        ({"axes": {"optim.lr": []}}, "optim.lr: .*: expected a list"),
        ({"axes": {"seed": [1, 2]}}, "the seeds in the key seeds"),
        ({"axes": {"reuse": {}}}, "reuse: .*: expected a list"),
        ({"axes": {"reuse": {"once": 1}}}, "axis reuse: .*: expected names with their settings"),
        ({"axes": {"reuse": {"once": {"algo": "ppo"}}}}, "arm ppo sets algo: .* not in both"),
        ({"axes": {"reuse": {"once": {"seed": 1}}}}, "the seeds in the key seeds"),
        ({"settings": ["algo"]}, r"settings: \['algo'\]: expected"),
        ({"seeds": []}, "seeds: .*: expected a list"),
        ({"seeds": [0, 0]}, "seed 0 is there twice"),
        ({"axes": {"optim.lr": [1e-3, 1e-3]}}, "optim.lr=0.001, seed 0 is there twice"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=complaint):
        load_study(str(write_study(tmp_path / "mine.yaml", **changes)))
    with pytest.raises(UserError, match="Did you mean 'severe'"):
        load_study("sevre")


def run_with(folder: Path, curve: list[float], grad_norm: float | None = 1.0, questions: int = 64) -> Path:
    """A run folder with a success curve, one evaluation a step."""
    folder.mkdir()
    figures = {"grad_norm": 0.5, "grad_norm_max": grad_norm, "normalized_frac": 0.25, "effective_lr": 2e-4}
    trained = {f"loss/{name}": value for name, value in {**figures, "clip_frac": 0.1}.items()}
    lines = [
        {"step": step, "eval/success": success, "eval/questions": questions} | (trained if step else {})
        for step, success in enumerate(curve)
    ]
    RunDir(folder).metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def test_measures_by_hand(tmp_path: Path) -> None:
    fell = measure(run_with(tmp_path / "fell", [0.6, 0.8, 0.5, 0.3, 0.1], grad_norm=None))
    assert (fell["peak"], fell["final"], fell["collapse_step"]) == (0.8, 0.1, 3.0)
    assert fell["kept"] == pytest.approx(0.125) and fell["worst_drop"] == pytest.approx(0.7)
    assert (fell["normalized"], fell["mean_rate"], fell["max_grad_norm"]) == (0.25, 2e-4, math.inf)
    dipped = measure(run_with(tmp_path / "dipped", [0.6, 0.2, 0.9]))
    assert (dipped["kept"], dipped["worst_drop"]) == (1.0, pytest.approx(0.4))
    assert math.isnan(dipped["collapse_step"])
    assert measure(run_with(tmp_path / "never", [0.0, 0.02]))["kept"] == 0.0
    # of three evaluations there is one mean of three, which would hide the fall
    assert measure(run_with(tmp_path / "short", [0.64, 0.6, 0.16]))["kept_mean"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("curve", "learned"),
    [
        ([0.65625] * 4, 0.0),  # final / peak is 1
        ([0.65625, 0.65625 + 6 / 64], 0.0),
        ([0.65625, 0.65625 + 7 / 64], 1.0),
        ([0.65625, 0.96875, 0.75], 0.0),  # where it ends counts, not where it was
        ([0.0, 0.1], 1.0),
        ([1.0, 1.0], 0.0),
    ],
)
def test_who_learned_ends_above_the_cold_start(curve: list[float], learned: float, tmp_path: Path) -> None:
    assert measure(run_with(tmp_path / "run", curve))["learned"] == learned


def test_without_a_cold_start_it_is_not_known(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", [0.5, 0.9, 0.9])
    _, *rest = RunDir(run).metrics.read_text().splitlines(keepends=True)
    RunDir(run).metrics.write_text("".join(rest))
    assert math.isnan(measure(run)["learned"])


def test_what_was_not_finite_is_in_no_mean(tmp_path: Path) -> None:
    """Of .5 and a figure that was not finite the mean is .5, not .25."""
    run = run_with(tmp_path / "run", [0.6, 0.8, 0.5])
    first, second, last = [json.loads(line) for line in RunDir(run).metrics.read_text().splitlines()]
    figures = {name: None for name in last if name.startswith("loss/")}
    lines = [first, second, last | figures | {"eval/success": None}]
    RunDir(run).metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = measure(run)
    assert (found["peak"], found["final"], found["worst_drop"]) == (0.8, 0.8, 0.0)
    assert (found["grad_norm"], found["normalized"], found["clip_frac"]) == (0.5, 0.25, 0.1)
    assert math.isinf(found["max_grad_norm"])
    RunDir(run).metrics.write_text("".join(f"{json.dumps(line)}\n" for line in (first, lines[2])))
    assert math.isnan(measure(run)["clip_frac"])


def test_results_are_json_and_a_table_of_medians(tmp_path: Path) -> None:
    """Two seeds, of which one exploded, and a cell of one seed, which has no interval."""
    study = load_study(str(write_study(tmp_path / "mine.yaml", axes={})))
    curves = {0: [0.5, 0.8, 0.6], 1: [0.5, 0.8, 0.2]}
    for run in [run for run in study.runs if (run.arm, run.seed) != ("so_grpo", 1)]:
        folder = tmp_path / "runs" / run.id
        folder.parent.mkdir(exist_ok=True)
        run_with(folder, curves[run.seed], grad_norm=None if run.seed else 2.0)
        RunDir(folder).summary.write_text("{}")
    write_results(study, tmp_path)
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    results = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [row["max_grad_norm"] for row in results] == [2.0, 2.0, None]
    assert [row["collapse_step"] for row in results] == [None, None, 2.0]
    write_results(dataclasses.replace(study, runs=study.runs[:1]), tmp_path)
    assert (tmp_path / "results.jsonl").read_text().splitlines() == lines  # those of the others, too
    *_, ppo, so_grpo = table(results).splitlines()
    assert ppo.startswith("| ppo | 2 | 0.800 (0.800-0.800) | 0.400 (0.200-0.600) | 0.50 (0.25-0.75) |")
    assert ppo.endswith(
        "| inf (2-inf) | 0.25 (0.25-0.25) | 2.0e-04 (2.0e-04-2.0e-04) | 1/2 | 1/2, median step 2 |"
    )
    assert so_grpo.startswith("| so_grpo | 1 | 0.800 | 0.600 | 0.75 |")
    assert so_grpo.endswith("| 2 | 0.25 | 2.0e-04 | 0/1 | 0/1 |")
    shutil.rmtree(tmp_path / "runs")  # to save space: what was measured stays
    assert write_results(dataclasses.replace(study, runs=study.runs[:1]), tmp_path) == results[:1]
    assert sorted((tmp_path / "results.jsonl").read_text().splitlines()) == sorted(lines)


def test_a_table_of_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run without an evaluation is left out by name; later the run folders are gone, and the table still prints."""
    path = write_study(tmp_path / "mine.yaml", axes={"optim.lr": [1e-4, 1e-3]}, seeds=[0])
    good, bad, *_ = load_study(str(path)).runs
    (tmp_path / "runs").mkdir()
    for run, curve in ((good, [0.5, 0.8]), (bad, [])):
        RunDir(run_with(tmp_path / "runs" / run.id, curve)).summary.write_text("{}")
    for is_gone in (False, True):
        for command, row in (
            ("stability", f"| {good.cell} | 1 | 0.800 "),
            ("compare", "| ppo | 0.0001 | 0.80 "),
        ):
            assert main([command, "--config", str(path), "--out", str(tmp_path), "--table"]) == 0
            out, error = capsys.readouterr()
            said = (
                f"sorl-lab: {bad.cell}, seed 0 is not in the table: {tmp_path}/runs/{bad.id}: no evaluation"
            )
            assert row in out and error.startswith(said) is not is_gone
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)


@pytest.mark.slow
def test_a_study_runs_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SORL_CACHE", str(tmp_path / "cache"))
    study = write_study(tmp_path / "mine.yaml", axes={}, seeds=[0])
    command = ["stability", "--config", str(study), "--out", str(tmp_path / "out"), "--jobs", "1"]
    assert main([*command, "--only", "ppo,"]) == 0
    results = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    assert len(results) == 1 and json.loads(results[0])["arm"] == "ppo"
    assert main(command) == 0
    out, error = capsys.readouterr()
    assert "2 runs, 1 done" in error and out.count("| ppo | 1 |") == 2 and "| so_grpo | 1 |" in out
    first = (tmp_path / "out" / "results.jsonl").read_text()
    run_id = json.loads(first.splitlines()[1])["id"]
    run_dir = RunDir(tmp_path / "out" / "runs" / run_id)
    run_dir.summary.unlink()  # as if it had been killed before its end
    assert main(command) == 0
    assert (tmp_path / "out" / "results.jsonl").read_text() == first
    assert main([*command, "--only", "gspo"]) == 2
    assert "the cells are\n  ppo\n  so_grpo" in capsys.readouterr().err


ROOT = Path(__file__).resolve().parents[3]


def test_the_tables_of_the_page_are_made_from_the_results() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/stability_tables.py")]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (made.returncode, made.stderr) == (0, ""), made.stdout


def test_averages_over_a_grid() -> None:
    """Shares of cells above a bar, means, and differences at the same points, with intervals."""
    runs = runpy.run_path(str(ROOT / "benchmarks/stability_tables.py"))
    average, share_above = runs["average"], runs["share_above"]
    three = {("a", 1.0): [1.0, 1.0, 1.0], ("b", 1.0): [0.2, 0.3, 0.1], ("c", 1.0): [1.0, 0.2, 1.0]}
    # Wilson: three cells say little
    assert share_above(0.95, three) == pytest.approx((2 / 3, 0.2077, 0.9385), abs=1e-4)
    all_above = {point: [1.0] for point in three}
    assert share_above(0.95, all_above)[1:] == pytest.approx((0.4385, 1.0), abs=1e-4)  # it was 100% to 100%
    assert average(three)[0] == pytest.approx((1.0 + 0.2 + 1.0) / 3)
    halves = {("x", float(i)): [float(i % 2)] for i in range(40)}
    mean, low, high = average(halves)
    spread = 1.96 * math.sqrt(0.25 / 40)
    assert mean == pytest.approx(0.5)
    assert (low, high) == pytest.approx((0.5 - spread, 0.5 + spread), abs=0.03)


def test_the_table_of_remedies_has_the_cells_that_all_of_them_have_run() -> None:
    """GRPO has run 24 of 25. Of PPO's runs one did not move and one fell below its start: neither has held."""
    tables = runpy.run_path(str(ROOT / "benchmarks/stability_tables.py"))
    kinds = ("4 of 8", "4 of 8 stale", "3 of 32", "6 of 16", "12 of 8")
    points = [(reuse, rate) for reuse in kinds for rate in tables["RATES"]]
    runs = [
        {"arm": arm, "reuse": reuse, "optim.lr": rate, "seed": 0, "kept_mean": 1.0, "final": 0.9}
        | {"curve": [[0, 0.6], [1, 0.9]]}
        for arm in ("ppo whole", "grpo whole")
        for reuse, rate in points
    ]
    runs[0]["curve"], runs[1]["curve"] = [[0, 0.6], [1, 0.6]], [[0, 0.6], [1, 0.9], [2, 0.55]]
    runs[1] |= {"final": 0.55, "kept_mean": 0.0}
    tables["remedies"].__globals__["read"] = lambda name: runs[:-1]
    assert tables["remedies"]().splitlines()[2:] == [
        "| whole | 22 | 0.89 (0.86 to 0.90) | 0.55 | 2 | 24 | 0.90 (0.90 to 0.90) | 0.90 | 0 |"
    ]


def test_the_best_of_three_settings_stands_beside_the_published_one() -> None:
    """PPO's VCPO has two cells, of which the published one has held none; GRPO's is not in the results."""
    tables = runpy.run_path(str(ROOT / "benchmarks/stability_tables.py"))
    begun = {"seed": 0, "reuse": "12 of 8", "curve": [[0, 0.6], [1, 0.9]]}
    runs = {
        "remedies": [
            begun | {"arm": arm, "optim.lr": rate, "kept_mean": 0.9, "final": final}
            for arm in ("ppo VCPO", "grpo VCPO", "ppo alone", "grpo alone")
            for rate, final in ((1.6e-3, 0.1), (5e-3, 0.3), (5e-4, 1.0))
        ],
        "remedies_best": [
            begun | {"arm": "ppo VCPO clipped 2", "optim.lr": rate, "kept_mean": kept, "final": 0.8}
            for rate, kept in ((1.6e-3, 0.96), (5e-3, 0.9))
        ],
    }
    tables["remedies_best"].__globals__["read"] = runs.__getitem__
    assert tables["remedies_best"]().splitlines()[2:] == [
        "| VCPO | clipped 2: 1; 0.80 (0.20) | - |",
        "| alone | 0; 0.20 | 0; 0.20 |",
    ]
