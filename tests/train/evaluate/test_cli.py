"""``sorl-eval`` as a person runs it: folders, kills, samples, mistakes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sorl_train.evaluate.cli import main
from sorl_train.evaluate.find_policy import find_policy, fingerprint
from sorl_train.evaluate.journal import Journal

from .conftest import WORLD

FOLDERS = ("evaluation", "evaluation-step_000001")  # best, and a step
FILES = (
    "manifest.json",
    "results.jsonl",
    "settings.json",
    "summary.json",
    "table.md",
    "table.tex",
    "timings.jsonl",
)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def failing(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    assert main(list(command)) == 2
    return capsys.readouterr().err


def test_a_run_folder_brings_its_task_and_its_best_checkpoint(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = [
        str(run_folder),
        "--mode",
        "direct",
        "agent",
        "--limit",
        "5",
        "--out",
        str(out),
        "--hardware.threads",
        "1",
    ]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert "| small (agent) |" in printed.out and "evaluate: 10 of 10 (100%)" in printed.err
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)
    rows = rows_of(out)
    assert [(row["mode"], row["index"]) for row in rows] == sorted(
        ((row["mode"], row["index"]) for row in rows), key=lambda key: (key[0] == "agent", key[1])
    )
    assert all(row["example_id"].startswith("test-") for row in rows)
    settings = json.loads((out / "settings.json").read_text())
    assert settings["tasks"]["minihop"]["examples"] == 64
    timings = [json.loads(line) for line in (out / "timings.jsonl").read_text().splitlines()]
    assert len(timings) == 10 and all(line["total_s"] >= line["generate_s"] > 0 for line in timings)
    (direct, agent) = json.loads((out / "summary.json").read_text())["entries"]
    assert agent["questions"] == 5 and sum(agent["stop_reasons"].values()) == 5
    assert direct["searches"] == 0 and direct["answer_in_retrieved"] is None

    before = (out / "results.jsonl").read_bytes()
    assert main([*command, "--json"]) == 0  # all is there: nothing is answered again
    printed = capsys.readouterr()
    assert "evaluate:" not in printed.err
    assert json.loads(printed.out) == json.loads((out / "summary.json").read_text())
    assert (out / "results.jsonl").read_bytes() == before


def test_all_names_of_a_checkpoint_are_the_same_policy(run_folder: Path, tmp_path: Path) -> None:
    best = run_folder / "checkpoints" / "best"
    names = [find_policy(str(path)) for path in (run_folder, best, best / "policy")]
    assert {(source.folder, source.label) for source in names} == {(str(best / "policy"), "small")}
    assert all(source.config is not None and source.config.task == "minihop" for source in names)
    assert names[1].config is not None and names[1].config.task_args["entities"] == WORLD["entities"]
    step = find_policy(str(run_folder / "checkpoints" / "step_000001"))
    assert step.label == "small-step_000001" and step.run == run_folder

    copied = tmp_path / "model"
    copied.mkdir()
    for file in (best / "policy").iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    plain = find_policy(str(copied))
    assert (plain.label, plain.run) == ("model", None)
    assert fingerprint(str(copied)) == fingerprint(str(best / "policy"))
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert fingerprint(str(copied)) != fingerprint(str(best / "policy"))


def test_an_interrupted_evaluation_goes_on_where_it_stopped(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        str(run_folder),
        "--mode",
        "direct",
        "agent",
        "--limit",
        "6",
        "--sampler.max_concurrency",
        "2",
        "--quiet",
    ]
    options += ["--limits.max_new_tokens", "6"]
    assert main([*options, "--out", str(tmp_path / "whole")]) == 0
    add = Journal.add

    def stopping(self: Journal, *arguments: Any) -> None:
        add(self, *arguments)
        if len(self.rows) == 5:
            raise KeyboardInterrupt

    part = ["--out", str(tmp_path / "part")]
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", stopping)
        assert main([*options, *part]) == 130
    assert "the same command goes on" in capsys.readouterr().err
    kept = rows_of(tmp_path / "part")
    assert 5 <= len(kept) < 12
    assert main([*options, *part]) == 0
    assert (tmp_path / "part" / "results.jsonl").read_bytes() == (
        tmp_path / "whole" / "results.jsonl"
    ).read_bytes()


@pytest.mark.slow  # three processes
def test_a_killed_evaluation_goes_on_to_the_same_file(run_folder: Path, tmp_path: Path) -> None:
    options = [
        "--mode",
        "direct",
        "cot",
        "rag",
        "agent",
        "--sampler.max_concurrency",
        "3",
        "--hardware.threads",
        "1",
    ]
    options += ["--limits.max_new_tokens", "6"]  # fast, and yet not over before the kill

    def command(out: Path) -> list[str]:
        return [sys.executable, "-m", "sorl_train.evaluate.cli", str(run_folder), *options, "--out", str(out)]

    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(whole), env=environment, check=True, capture_output=True, timeout=600)
    process = subprocess.Popen(
        command(killed), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    results = killed / "results.jsonl"
    deadline = time.monotonic() + 600
    while not results.is_file() or results.read_bytes().count(b"\n") < 40:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    half = results.read_bytes()
    done = half.count(b"\n")
    assert 40 <= done < 256 and not (killed / "summary.json").exists()
    results.write_bytes(half + b'{"task": "minihop", "mo')  # as a kill in the middle of a write leaves it

    finished = subprocess.run(command(killed), env=environment, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stderr
    assert results.read_bytes() == (whole / "results.jsonl").read_bytes()
    assert results.read_bytes().count(b"\n") == 256
    seconds = (killed / "timings.jsonl").read_text().splitlines()
    assert len(seconds) == 256
    figures = [json.loads((folder / "summary.json").read_text())["entries"] for folder in (whole, killed)]
    for entries in figures:
        for entry in entries:
            del entry["seconds"]
    assert figures[0] == figures[1]


def test_samples_give_pass_at_k(run_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main([str(run_folder), "--samples", "4", "--limit", "3", "--out", str(out), "--quiet"]) == 0
    assert json.loads((out / "settings.json").read_text())["temperature"] == 1.0
    rows = rows_of(out)
    assert [row["sample"] for row in rows] == [0, 1, 2, 3] * 3
    assert len({row["turns"][0]["text"] for row in rows[:4]}) > 1
    (entry,) = json.loads((out / "summary.json").read_text())["entries"]
    assert list(entry["pass_at_k"]) == ["1", "2", "4"] and (entry["questions"], entry["samples"]) == (3, 4)
    assert entry["pass_at_k"]["1"] == entry["metrics"]["em"]


def test_an_evaluation_grows(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With one question in flight a batch holds no other, and the same bytes come in whatever order."""
    options = [str(run_folder), "--limits.max_new_tokens", "6", "--sampler.max_concurrency", "1", "--out"]
    grown, whole = tmp_path / "grown", tmp_path / "whole"
    assert main([*options, str(grown), "--mode", "agent", "--limit", "2", "--quiet"]) == 0
    wider = ["--mode", "direct", "agent", "--limit", "3"]
    assert main([*options, str(grown), *wider]) == 0
    assert "evaluate: 6 of 6 (100%)" in capsys.readouterr().err
    assert main([*options, str(whole), *wider, "--quiet"]) == 0
    for name in ("results.jsonl", "settings.json", "table.md"):
        assert (grown / name).read_bytes() == (whole / name).read_bytes()


def test_each_checkpoint_of_a_run_has_a_folder_of_its_own(run_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "small"
    shutil.copytree(run_folder, run)
    for model in (run, run / "checkpoints" / "step_000001"):
        assert main([str(model), "--limit", "1", "--limits.max_new_tokens", "4", "--quiet"]) == 0
    labels = [json.loads((run / name / "summary.json").read_text())["label"] for name in FOLDERS]
    assert labels == ["small", "small-step_000001"]


def test_other_settings_do_not_go_into_the_same_folder(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert main([str(run_folder), "--limit", "2", "--out", out, "--quiet"]) == 0
    error = failing(capsys, str(run_folder), "--limit", "1", "--seed", "1", "--mode", "rag", "--out", out)
    assert "limit: 2 there, 1 now" in error and "seed: 0 there, 1 now" in error and "--out" in error
    assert "modes: ['agent'] there, ['rag'] now" in error and "can grow" in error
    error = failing(capsys, str(run_folder), "--task", "hotpotqa", "--limit", "2", "--out", out)
    assert "tasks.minihop: there, not now\n  tasks.hotpotqa: not there, now\n" in error
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    error = failing(capsys, str(run_folder), "--limit", "2", "--out", str(tmp_path / "notes"))
    assert "holds no evaluation of ours" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["RUN", "--mode", "agnet"], "Did you mean 'agent'"),
        (["RUN", "--task", "minihopp"], "Did you mean 'minihop'"),
        (["RUN", "--task", "minihop", "minihop"], "names 'minihop' twice"),
        (["RUN", "--samples", "2", "--sampler.temperature", "0"], "raise the temperature"),
        (["RUN", "--samples", "0"], "--samples must be at least 1, it is 0"),
        (["RUN", "--limits.max_turn", "2"], "Did you mean '--limits.max_turns'"),
        (["RUN", "--limits.max_turns", "0"], "must be at least 1"),
        (["RUN", "--task_args", "hops"], "Did you mean '--task_args.KEY'"),
        (["RUN", "--task", "minihop", "nq", "--task_args.hops", "[1]"], "write --task_args.NAME.hops"),
        (["RUN", "--task", "minihop", "nq", "--data", "a", "b"], "with several of them write minihop=a"),
        (
            ["RUN", "--task", "nq", "medqa", "--data", "nq=a", "medq=b"],
            "no task 'medq' is given with --task. Did",
        ),
        (["RUN", "--task", "nq", "--search.corpus", "nowhere.jsonl"], "nowhere.jsonl"),
        (
            ["RUN", "--sampler.max_concurrency", "0"],
            "--sampler.max_concurrency must lie between 1 and 65536, it is 0",
        ),
        (["RUN", "--colour"], "unknown option --colour. Did you mean"),
        (["RUNS"], "there is no model at"),
        ([], "give a model folder"),
        (["RUN/trajectories"], "is no model folder"),
        (["compare", "RUN", "RUN"], "holds no evaluation"),
        (["rescore", "RUN/checkpoints", "--reward", "em"], "holds no evaluation"),
        (["table", "RUN"], "holds no finished evaluation"),
    ],
)
def test_mistakes_are_named_with_the_next_move(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    command = [option.replace("RUN", str(run_folder)) for option in options]
    if command and command[0].startswith(str(run_folder)):
        command += ["--out", str(tmp_path / "out")]
    error = failing(capsys, *command)
    assert error.startswith("sorl-eval: ") and message in error and "Traceback" not in error


def test_a_model_without_a_run_needs_a_task(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = tmp_path / "model"
    copied.mkdir()
    for file in (run_folder / "checkpoints" / "best" / "policy").iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    assert "give --task NAME, one or several. Known: alphamed19k" in failing(capsys, str(copied))


def test_an_embedded_sample_is_marked_as_such(run_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [
        str(run_folder),
        "--task",
        "nq",
        "--limit",
        "2",
        "--out",
        str(out),
        "--quiet",
        "--mode",
        "direct",
    ]
    assert main(command) == 0
    assert (
        "2 questions of the task's embedded sample, which is not the benchmark"
        in (out / "table.md").read_text()
    )


@pytest.mark.slow  # trains a policy that gives answers
def test_searching_over_turns_beats_searching_once_beats_not_searching(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([str(trained_run), "--mode", "direct", "rag", "agent", "--out", str(out), "--quiet"]) == 0
    entries = json.loads((out / "summary.json").read_text())["entries"]
    direct, rag, agent = (entry["metrics"]["em"] for entry in entries)
    assert direct["high"] < rag["low"] and rag["high"] < agent["low"]
    capsys.readouterr()
    assert main(["compare", f"{out}:rag", f"{out}:agent"]) == 0
    assert "B is better" in capsys.readouterr().out
