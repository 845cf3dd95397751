"""What the report makes of a run folder: whole, running, broken, or several of them."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sorl_env.trajectory import Trajectory
from sorl_train.report.dialogues import choose_dialogues, question_of, segments
from sorl_train.report.groups import group_runs
from sorl_train.report.page import SECTIONS, chart_data, stage_seconds
from sorl_train.report.report import main, write_report
from sorl_train.report.run import read_run

MakeRun = Callable[..., Path]
MakeTrajectory = Callable[..., Trajectory]


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


# --- the page ------------------------------------------------------------------------------------
def test_a_finished_run(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(tmp_path / "so_ppo-s0")
    page = write_report([run], tmp_path / "new" / "report.html")
    assert page == tmp_path / "new" / "report.html"
    text = text_of(page)
    assert len(text) < 300_000, "ten dialogues and forty steps make a small page"
    figures = (">0.620<", ">0.973<", ">0.012<", "3 min 51 s", "1.9 GB")  # 1840.5 MiB
    for expected in ("so_ppo on minihop", "finished, 40 steps", *figures):
        assert expected in text
    assert "<dt>loss.clip_bias_norm</dt><dd>rms</dd>" in text
    assert "on what is missing" not in text
    assert "Embedded sample" not in text
    assert len(re.findall(r'<details class="dialogue"', text)) == 10
    assert "3 hits · " in text and "2 attempts" in text


def test_it_loads_nothing_and_an_embedded_sample_is_marked(make_run: MakeRun, tmp_path: Path) -> None:
    text = text_of(write_report([make_run(tmp_path / "run", is_sample=True)], tmp_path / "report.html"))
    outside_scripts = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert re.findall(r'(?:src|href)="([^"]*)"', outside_scripts) == ["data:,"]
    assert "@import" not in text and "url(" not in text
    assert "default-src 'none'" in text
    assert "<strong>Embedded sample, not the benchmark.</strong>" in text
    assert "embedded sample of minihop" in text


def test_everything_from_the_run_is_escaped(
    make_run: MakeRun, make_trajectory: MakeTrajectory, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run")
    evil = "</script></pre><script>alert(1)</script>"
    (run / "config.yaml").write_text(json.dumps({"algo": evil, "task": evil, evil: evil}))
    (run / "manifest.json").write_text(
        json.dumps({"started": evil, "data": {"is_sample": True, "source": evil}})
    )
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": 41, evil: 1.0}) + "\n")
    text = text_of(write_report([run], tmp_path / "report.html"))
    assert evil not in text
    assert html.escape(evil, quote=False) in text.replace("&#34;", '"').replace("&#39;", "'")
    assert len(re.findall(r"<script", text)) == 6


# --- runs that are not whole ---------------------------------------------------------------------
def test_a_running_run_shows_what_there_is(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=25, finished=False)
    read = read_run(run, "run")
    assert not read.finished and read.status == "unfinished: step 25 of 25"
    assert read.results["cold_start_success"] == 0.62
    assert read.results["final_success"] == read.results["best_success"] > 0.62
    assert read.notes == ["summary.json is missing: the run has not finished"]
    assert "figures are as of its last evaluation" in text_of(write_report([run], tmp_path / "report.html"))


def test_missing_and_broken_files_are_named(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "manifest.json").unlink()
    (run / "config.yaml").write_text("algo: [")
    (run / "summary.json").write_text("[]")
    (run / "timings.jsonl").unlink()
    metrics = run / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-30])
    last = run / "trajectories" / "step_000040.jsonl"
    last.write_bytes(last.read_bytes()[:-30])
    read = read_run(run, "run")
    assert [note.partition(" ")[0] for note in read.notes] == [
        "config.yaml", "manifest.json", "metrics.jsonl:41", "timings.jsonl", "summary.json",
        "trajectories/step_000040.jsonl",
    ]  # fmt: skip
    assert "step_000040.jsonl:12: not valid JSON" in read.notes[-1]
    assert read.last_step == 39 and len(read.dialogues) == 10
    assert "6 notes about missing data" in text_of(write_report([run], tmp_path / "report.html"))


def test_numbers_that_no_float_can_hold_are_left_out(make_run: MakeRun, tmp_path: Path) -> None:
    run, huge = make_run(tmp_path / "run"), "7" * 400
    steps = run / "trajectories" / "step_000040.jsonl"
    steps.write_text(re.sub(r'"metadata": ?"[^"]*"', '"metadata": {}', steps.read_text(), count=1))
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write(
            f'{{"step": 1e999}}\n{{"step": {huge}}}\n{{"step": 41, "loss/x": {huge}, "eval/success": {huge}}}\n'
        )
    read = read_run(run, "run")
    assert read.last_step == 41 and read.results["final_success"] < 1
    assert [note.partition(" ")[0] for note in read.notes] == [
        "metrics.jsonl:42", "metrics.jsonl:43", "trajectories/step_000040.jsonl",
    ]  # fmt: skip
    assert "3 notes about missing data" in text_of(write_report([run], tmp_path / "report.html"))


def test_only_metrics(tmp_path: Path) -> None:
    """Whatever a killed first step, or another program, left behind."""
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 2, "loss/kl": null}\n{"step": 1, "loss/lr": 1e-4}\n[]\n'
    )
    read = read_run(tmp_path, "run")
    assert [row["step"] for row in read.metrics] == [1, 2]
    data = chart_data([read], group_runs([read]), ["run"])
    assert data["figures"] == [] and [figure["title"] for figure in data["more"]] == ["loss/lr"]
    assert data["runs"][0]["values"]["loss/lr"] == [1e-4, None]
    assert "The run saved no dialogues." in text_of(write_report([tmp_path], tmp_path / "report.html"))


def test_a_repeated_step_counts_once(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 3, "rollout/success": 0.125}\n')
    read = read_run(run, "run")
    assert [row["step"] for row in read.metrics] == [0, 1, 2, 3]
    assert read.metrics[-1]["rollout/success"] == 0.125


# --- figures -------------------------------------------------------------------------------------
def test_every_metric_is_in_one_figure(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / "run"), "run")]
    data = chart_data(runs, group_runs(runs), ["run"])
    figures = [figure.id for section in SECTIONS for figure in section.figures]
    assert [figure["id"] for figure in data["figures"]] == figures and len(set(figures)) == len(figures)
    drawn = [name for figure in data["figures"] + data["more"] for name in figure["metrics"]]
    assert sorted(drawn) == sorted(set(drawn))
    assert set(drawn) >= set(data["runs"][0]["values"])
    assert data["runs"][0]["delta"] == 0.003


def test_seconds_by_stage(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    (run / "timings.jsonl").write_text(
        '{"step": 0, "time/eval_s": 3.0}\n'
        '{"step": 1, "time/rollout_s": 2.0, "time/update_s": 5.0, "time/tool_p99_s": 9.0, "time/step_s": 7.5}\n'
        '{"step": 2, "time/rollout_s": 2.0, "time/update_s": null, "time/tokens_per_s": 99.0, "time/step_s": 6.0}\n'
    )
    # 13.5 s of steps are less than the 12 s of stages and an evaluation outside any step
    assert stage_seconds(read_run(run, "run")) == {"update": 5.0, "rollout": 4.0, "eval": 3.0, "other": 1.5}


# --- dialogues -----------------------------------------------------------------------------------
def chosen(folder: Path, **options: Any) -> list[tuple[int, float, str]]:
    notes: list[str] = []
    found = choose_dialogues(folder, notes, **options)
    assert notes == []
    return [(d.step, d.trajectory.reward, d.why.partition(" ")[0]) for d in found]


def test_lowest_and_highest_of_the_last_step(batches: Callable[..., Path]) -> None:
    folder = batches(step_000001=[0.5] * 40, step_000009=[0.0] * 100 + [-1.0, 2.0] + [0.0] * 100)
    found = chosen(folder)
    assert len(found) == 10
    assert [row for row in found if row[2]] == [(9, -1.0, "lowest"), (9, 2.0, "highest")]
    assert [row[0] for row in found] == [1] * 3 + [9] * 7
    # more steps than places: spread over the run
    folder = batches(**{f"step_{step:06d}": [0.0, 1.0] for step in range(10, 90)})
    steps = sorted({row[0] for row in chosen(folder)})
    assert len(steps) == 9 and steps[-1] == 89 and max(np.diff(steps)) <= 12


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (
            {"step_000001": [None, 0.5, 1.0]},
            [(1, 0.5, "lowest"), (1, 1.0, "highest")],
        ),  # an outage has no reward
        ({"step_000002": [None]}, [(2, 0.0, "lowest")]),
        ({"step_000001": [1.0]}, [(1, 1.0, "lowest")]),
        (
            {"eval_000000": [0.0], "eval_000010": [1.0, 0.0]},
            [(0, 0.0, ""), (10, 0.0, "lowest"), (10, 1.0, "highest")],
        ),
        ({"eval_000010": [1.0, 0.0], "step_000003": [1.0]}, [(3, 1.0, "lowest")]),  # evaluations come second
    ],
)
def test_few_trajectories_outages_and_evaluations(
    files: dict[str, list[float | None]], found: list[tuple[int, float, str]], batches: Callable[..., Path]
) -> None:
    assert chosen(batches(**files), count=min(3, len(found))) == found


def test_a_folder_without_trajectories(tmp_path: Path) -> None:
    notes: list[str] = []
    assert choose_dialogues(tmp_path / "trajectories", notes) == []
    assert notes == ["there are no dialogues: the run has no trajectories/step_*.jsonl"]


def test_segments() -> None:
    text = "so <think>a\n<b></think>\n<search>q</search><information>f</information><answer>x"
    assert segments(text) == [
        ("plain", "so "),
        ("think", "<think>a\n<b></think>"),
        ("plain", "\n"),
        ("tool", "<search>q</search>"),
        ("forged", "<information>f</information>"),
        ("plain", "<answer>x"),
    ]


@given(st.lists(st.sampled_from(["<think>", "</think>", "<search>", "</search>", "a", " ", "<", "\n"])))
def test_segments_join_to_the_text(parts: list[str]) -> None:
    text = "".join(parts)
    assert "".join(piece for _, piece in segments(text)) == text


@pytest.mark.parametrize(
    "prompt, expected",
    [
        ("Example.\nQuestion: first?\nNow.\nQuestion: Who wrote it?\n", "Who wrote it?"),
        ("Search, then answer. Who?\n\n", "Search, then answer. Who?"),
        ("", "train-1"),
    ],
)
def test_the_question_of_a_prompt(make_trajectory: MakeTrajectory, prompt: str, expected: str) -> None:
    trajectory = make_trajectory("1/0", np.random.default_rng(0))
    object.__setattr__(trajectory, "prompt", prompt)
    object.__setattr__(trajectory, "example_id", "train-1")
    assert question_of(trajectory) == expected


def changed(name: str, value: Any) -> Callable[[bytes], bytes]:
    """Takes lines of trajectories, and returns them with another value of a field."""
    return lambda whole: b"".join(
        json.dumps({**json.loads(line), name: value}).encode() + b"\n" for line in whole.splitlines()
    )


# What can have happened to a file of trajectories: each takes it whole and returns what is left of it.
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut in the first line": lambda whole: whole[:50],
    "zeros": lambda whole: bytes(len(whole)),
    "not UTF-8": lambda whole: whole.replace(b"a", b"\xff"),
    "not JSON": lambda whole: b"<html>\n" * 20,
    "lists": lambda whole: b"[1, 2]\n" * 20,
    "deep": lambda whole: b"[" * 200_000 + b"\n",
    "large number": lambda whole: b'{"reward": ' + b"9" * 5000 + b"}\n",
    "no fields": lambda whole: b"{}\n" * 20,
    "turns are a number": changed("turns", 5),
    "turns are numbers": changed("turns", [5]),
    "tokens are a text": changed("token_ids", "abc"),
    "tokens are huge": changed("token_ids", [2**70]),
    "unknown stop reason": changed("stop_reason", "tired"),
    "reward is null": changed("reward", None),
    "another version": changed("schema_version", 99),
}


def test_curves_are_shown_whatever_happened_to_the_trajectories(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", steps=3)
    saved = run / "trajectories" / "step_000001.jsonl"
    whole = saved.read_bytes()
    saved.write_bytes(b"")
    for step, damage in enumerate(DAMAGES.values(), start=2):
        saved.with_name(f"step_{step:06d}.jsonl").write_bytes(damage(whole))
    assert main([str(run)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{run / 'report.html'}\n" and f"no viewer of {run}: " in said.err
    for step, name in enumerate(DAMAGES, start=2):
        assert f"step_{step:06d}.jsonl is damaged, and used only up to there" in said.err, name
    page = html.unescape(text_of(run / "report.html"))
    assert SECTIONS[0].figures[0].title in page and "is damaged, and used only up to there" in page
    assert "The run saved no dialogues." in page
