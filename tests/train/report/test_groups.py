"""Which runs a report shows, which belong together, and what its table says of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sorl_train.algorithms import ALGORITHMS
from sorl_train.report.groups import (
    COLUMNS,
    Group,
    RunFolder,
    TableRow,
    choices,
    find_runs,
    group_rows,
    group_runs,
    name_runs,
    run_rows,
)
from sorl_train.report.page import chart_data
from sorl_train.report.report import main, write_report
from sorl_train.report.run import ReportRun, read_run

MakeRun = Callable[..., Path]


def read(paths: Sequence[Path]) -> list[ReportRun]:
    return [read_run(path, path.name, 0) for path in paths]


def cells(row: TableRow) -> dict[str, tuple[str, str]]:
    return {column.name: (cell.text, cell.range) for column, cell in zip(COLUMNS, row.cells, strict=True)}


# --- which runs ----------------------------------------------------------------------------------
def test_a_study_stands_for_its_runs(make_run: MakeRun, tmp_path: Path) -> None:
    study = tmp_path / "study"
    names = ["so_ppo-s0-aa", "ppo-s10-bb", "ppo-s2-cc"]
    aside = "ppo-s0-0123456789-2"  # an earlier start, which sorl-lab has moved aside
    for name in (*names, aside):
        make_run(study / "runs" / name, algo=name.partition("-")[0], steps=2, batch=3)
    (study / "runs" / "logs").mkdir()
    results = [{"id": "ppo-s2-cc", "cell": "ppo, optim.lr=0.0003"}]
    (study / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in results))
    other = make_run(tmp_path / "other", steps=2, batch=3)
    found = find_runs([study, other])
    assert found == [
        RunFolder(study / "runs" / "ppo-s2-cc", "ppo, optim.lr=0.0003"),
        RunFolder(study / "runs" / "ppo-s10-bb", "ppo"),  # not in the results yet
        RunFolder(study / "runs" / "so_ppo-s0-aa", "so_ppo"),
        RunFolder(other),
    ]


def test_a_run_that_ended_early_says_so(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"s{seed}", seed=seed, steps=8, batch=3, finished=seed < 2) for seed in range(3)
    ]
    for run in (runs[0], runs[2]):
        metrics = run / "metrics.jsonl"
        metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:6]))  # steps 0 to 5
    early, whole, broken = read(runs)
    assert early.status == "ended early (eval.patience or alarm.action): step 5 of 8"
    assert (whole.status, broken.status) == ("finished, 8 steps", "unfinished: step 5 of 8")
    text = write_report(runs, tmp_path / "report.html").read_text()
    assert all(f'<td class="muted">{state} ' in text for state in ("ended at step 5", "done", "at step 5"))
    sft = dataclasses.replace(early, config=early.config | {"stage": "sft", "sft.steps": 5})
    assert sft.status == "finished, 5 steps"


def test_the_bound_is_that_of_runs_that_normalize(make_run: MakeRun, tmp_path: Path) -> None:
    runs = read([make_run(tmp_path / algo, algo=algo, steps=2, batch=3) for algo in ("ppo", "so_ppo")])
    data = chart_data(runs, group_runs(runs), ["a", "b"])
    assert [run["delta"] for run in data["runs"]] == [None, 0.003]
    for name, algorithm in ALGORITHMS.items():
        named = dataclasses.replace(runs[0], config=runs[0].config | {"algo": name})
        assert named.normalizes is algorithm.normalize
    outside = dataclasses.replace(runs[0], config=runs[0].config | {"algo": "my_algo.py"})
    assert not dataclasses.replace(outside, metrics=[{"loss/normalized_frac": 0.0}]).normalizes
    assert dataclasses.replace(outside, metrics=[{"loss/normalized_frac": 0.5}]).normalizes


def test_the_first_settings_are_those_that_the_surrogate_reads(make_run: MakeRun, tmp_path: Path) -> None:
    ppo, sapo = read([make_run(tmp_path / algo, algo=algo, steps=2, batch=3) for algo in ("ppo", "sapo")])
    assert ppo.key_settings["loss.clip_eps"] == 0.2 and "loss.sapo_tau_neg" not in ppo.key_settings
    assert (sapo.key_settings["loss.sapo_tau_pos"], sapo.key_settings["loss.sapo_tau_neg"]) == (1.0, 1.05)
    cispo = dataclasses.replace(sapo, config=sapo.config | {"algo": "cispo", "loss.clip_eps_high": 4.0})
    assert cispo.key_settings["loss.clip_eps_high"] == 4.0 and "loss.sapo_tau_pos" not in cispo.key_settings


# --- which belong together -----------------------------------------------------------------------
def test_groups_differ_in_more_than_the_seed(make_run: MakeRun, tmp_path: Path) -> None:
    made = [
        make_run(tmp_path / f"{algo}-{lr}-{seed}", algo=algo, lr=lr, seed=seed, steps=2, batch=3)
        for seed in (0, 1)
        for algo, lr in (("so_ppo", 3e-4), ("ppo", 3e-4), ("ppo", 1e-3))
    ]
    runs = read(made)
    groups = group_runs(runs)
    assert [(group.label, group.members) for group in groups] == [
        ("so_ppo, optim.lr=0.0003", [0, 3]),
        ("ppo, optim.lr=0.0003", [1, 4]),
        ("ppo, optim.lr=0.001", [2, 5]),
    ]
    assert groups[2].settings == {"algo": "ppo", "optim.lr": 1e-3}
    # in a study, its name of the cell, for unfinished runs of it too, and in the order of the settings
    named = [dataclasses.replace(runs[0], cell="ours"), *runs[1:]]
    assert [group.label for group in group_runs(named)] == [
        "ppo, optim.lr=0.0003", "ppo, optim.lr=0.001", "ours",
    ]  # fmt: skip
    assert [group.label for group in group_runs(runs[:1])] == ["so_ppo-0.0003-0"]
    assert [group.label for group in group_runs([runs[0], runs[3]])] == ["so_ppo on minihop"]


def test_what_to_call_a_run(make_run: MakeRun, tmp_path: Path) -> None:
    """A study's folders are hashes, so its runs go by cell and seed; folders that a person named keep their names."""
    made = [
        make_run(tmp_path / f"{algo}-s{seed}-aa", algo=algo, seed=seed, steps=2, batch=3)
        for algo, seed in (("ppo", 0), ("ppo", 7), ("so_ppo", 0))
    ]
    runs = read(made)
    assert name_runs(runs, group_runs(runs)) == ["ppo-s0-aa", "ppo-s7-aa", "so_ppo-s0-aa"]
    in_study = [dataclasses.replace(run, cell=run.config["algo"]) for run in runs]
    assert name_runs(in_study, group_runs(in_study)) == ["ppo, seed 0", "ppo, seed 7", "so_ppo"]
    assert name_runs(in_study[:2], group_runs(in_study[:2])) == ["ppo-s0-aa", "ppo-s7-aa"]


def test_runs_without_settings_stay_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "loss/lr": 1e-4}\n')
    groups = group_runs(read([tmp_path / "a", tmp_path / "b"]))
    assert [(group.label, group.members) for group in groups] == [("a", [0]), ("b", [1])]


def test_what_groups_can_be_chosen_by() -> None:
    def groups(**columns: list[Any]) -> list[Group]:
        rows = zip(*columns.values(), strict=True)
        return [Group("", dict(zip(columns, row, strict=True)), [i]) for i, row in enumerate(rows)]

    found = choices(
        groups(
            algo=["ppo", "ppo", "so_ppo", "so_ppo"],
            loss=["a", "a", "b", "b"],  # says what algo says
            lr=[1e-4, 1e-3, 1e-4, 1e-3],
            name=["q", "r", "s", "t"],  # another one for each group: the table does that
            eps=[None, 0.2, 0.2, 0.2],
        )
    )
    assert found == {"algo": ["ppo", "so_ppo"], "lr": ["0.0001", "0.001"], "eps": ["none", "0.2"]}


# --- the table -----------------------------------------------------------------------------------
def write_curve(run: Path, success: list[float], norms: list[float | None]) -> Path:
    """Metrics of which ``measure`` can be computed by hand."""
    lines = []
    for step, value in enumerate(success):
        line: dict[str, Any] = {"step": step, "eval/success": value}
        if step:
            line |= {"loss/grad_norm": 1.0, "loss/grad_norm_max": norms[step - 1]}
            line |= {"loss/normalized_frac": 0.5, "loss/effective_lr": 1e-4, "loss/clip_frac": 0.1}
        lines.append(json.dumps(line) + "\n")
    (run / "metrics.jsonl").write_text("".join(lines))
    (run / "summary.json").unlink(missing_ok=True)
    return run


def test_rows_by_hand(make_run: MakeRun, tmp_path: Path) -> None:
    kept = write_curve(make_run(tmp_path / "kept", steps=2, batch=3), [0.5, 0.8, 0.6], [2.0, 4.0])
    lost = write_curve(make_run(tmp_path / "lost", seed=1, steps=2, batch=3), [0.5, 0.1, 0.0], [7.0, None])
    runs = read([kept, lost])
    groups = group_runs(runs)
    first, second = run_rows(runs, groups, name_runs(runs, groups))
    assert (first.key, second.key) == ("r0", "r1")
    assert {name: text for name, (text, of) in cells(first).items() if not of} == {
        "cold_start_success": "0.500", "best_success": "0.800", "final_success": "0.600", "kept": "0.750",
        "worst_drop": "0.200", "collapse_step": "none", "max_grad_norm": "4", "normalized": "0.500",
        "wall_s": "–",  # noqa: RUF001
    }  # fmt: skip
    assert cells(second)["collapse_step"] == ("step 1", "")
    assert cells(second)["max_grad_norm"] == ("inf", "") and second.cells[7].sort == "Infinity"
    (row,) = group_rows(runs, groups)
    assert (row.key, row.members) == ("g0", [0, 1])
    assert cells(row) | {"wall_s": None} == {
        "cold_start_success": ("0.500", ""),
        "best_success": ("0.650", "0.500 to 0.800"),
        "final_success": ("0.300", "0.000 to 0.600"),
        "kept": ("0.375", "0.000 to 0.750"),
        "worst_drop": ("0.350", "0.200 to 0.500"),
        "collapse_step": ("1 of 2", "median step 1"),
        "max_grad_norm": ("inf", "4 to inf"),
        "normalized": ("0.500", ""),
        "wall_s": None,
    }


def test_a_run_that_cannot_be_measured(make_run: MakeRun, tmp_path: Path) -> None:
    """An earlier version's metrics, or a run before its first step."""
    run = make_run(tmp_path / "run", steps=2, batch=3)
    (run / "metrics.jsonl").write_text('{"step": 0, "eval/success": 0.5}\n')
    runs = read([run])
    assert not runs[0].is_measured
    (row,) = run_rows(runs, group_runs(runs), ["run"])
    assert cells(row)["kept"] == cells(row)["collapse_step"] == ("–", "")  # noqa: RUF001
    assert 'id="result-kept"' in write_report([run], tmp_path / "report.html").read_text()


# --- events, and pages of many runs --------------------------------------------------------------
def test_events(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2, batch=3)
    alarm = '{"step": 9, "kind": "collapse_alarm", "reason": "</td><script>", "action": "stop"}'
    (run / "events.jsonl").write_text(f'{alarm}\n{{"step": 4, "kind": "moved_back"}}\n{{"step": 5}}\n[]')
    read_back = read_run(run, "run", 0)
    assert read_back.events == [
        {"step": 9, "kind": "collapse_alarm", "reason": "</td><script>", "action": "stop"},
        {"step": 4, "kind": "moved_back", "reason": "", "action": ""},
    ]
    assert [note.partition(" ")[0] for note in read_back.notes] == ["events.jsonl:3", "events.jsonl:4"]
    assert chart_data([read_back], group_runs([read_back]), ["run"])["runs"][0]["alarms"] == [9]
    text = write_report([run], tmp_path / "report.html").read_text()
    assert "&lt;/td&gt;&lt;script&gt;" in text and "</td><script>" not in text
    assert "collapse alarm (stop)</td>" in text and ">moved back</td>" in text


def test_an_event_leads_to_the_dialogues_nearest_before_it(make_run: MakeRun, tmp_path: Path) -> None:
    """Also to held-out ones: sampled ones are saved more seldom."""
    # an alarm in step 12; steps 1, 10 and 20 saved
    run = make_run(tmp_path / "run", algo="ppo", steps=20, batch=3)
    page = tmp_path / "report.html"
    assert main([str(run), "--out", str(page)]) == 0
    assert 'viewer.html#step=10">dialogues of step 10<' in page.read_text()
    saved = run / "trajectories"
    (saved / "eval_000011.jsonl").write_bytes((saved / "step_000010.jsonl").read_bytes())
    write_report([run], page)
    assert 'viewer.html#step=11">dialogues of step 11<' in page.read_text()


def test_many_runs_leave_out_what_is_long(make_run: MakeRun, tmp_path: Path) -> None:
    for seed in range(9):
        make_run(tmp_path / "runs" / f"ppo-s{seed}", seed=seed, steps=3, batch=3)
    text = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert f"<h1>{tmp_path.name}: 9 runs</h1>" in text
    assert '<details class="dialogue"' not in text and "manifest (versions" not in text
    assert "are only in the report of each run" in text
    few = write_report([tmp_path / "runs" / f"ppo-s{seed}" for seed in range(8)], tmp_path / "few.html")
    assert '<details class="dialogue"' in few.read_text()


def test_links_to_viewers(make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report of a single run writes its viewer; one of several runs links to those that exist."""
    runs = [make_run(tmp_path / "a b" / f"s{seed}", seed=seed, steps=2, batch=3) for seed in (0, 1)]
    out = tmp_path / "pages" / "report.html"
    arguments = [*map(str, runs), "--out", str(out)]
    assert main(arguments) == 0
    assert "viewer.html" not in out.read_text()
    assert main([str(runs[1])]) == main(arguments) == 0
    assert capsys.readouterr().out.splitlines() == [str(out), str(runs[1] / "report.html"), str(out)]
    assert "s0/viewer.html" not in out.read_text()
    assert 'href="../a%20b/s1/viewer.html"' in out.read_text()
    assert 'href="../a%20b/s1/viewer.html#open=step-1/s1-p0/0"' in out.read_text()
