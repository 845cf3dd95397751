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

from sorl_train.config.files import load_config
from sorl_train.evaluate.arguments import add_options, make_envs, make_parser
from sorl_train.evaluate.cli import main
from sorl_train.evaluate.find_policy import find_policy, fingerprint
from sorl_train.evaluate.results import EvalResultsFile

from .conftest import WORLD

FOLDERS = ("evaluation", "evaluation-step_000001")  # best, and a step
FILES = ["manifest.json", "results.jsonl", "settings.json", "summary.json", "table.md"]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def failing(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    assert main(list(command)) == 2
    return capsys.readouterr().err


def test_a_run_folder_brings_its_task_and_its_best_checkpoint(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = [str(run_folder), *"--mode direct agent --limit 5 --hardware.threads 1 --out".split(), str(out)]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert (
        "| small (agent) |" in printed.out and "evaluate: 100%" in printed.err and "10.0/10.0" in printed.err
    )
    assert sorted(path.name for path in out.iterdir()) == FILES
    rows = rows_of(out)
    order = [(row["mode"] == "agent", row["index"]) for row in rows]
    assert order == sorted(order)
    assert all(row["example_id"].startswith("test-") for row in rows)
    settings = json.loads((out / "settings.json").read_text())
    assert settings["tasks"]["minihop"]["examples"] == 64
    (direct, agent) = json.loads((out / "summary.json").read_text())["entries"]
    assert agent["questions"] == 5 and sum(agent["stop_reasons"].values()) == 5
    assert direct["searches"] == 0 and direct["answer_in_retrieved"] is None

    before = (out / "results.jsonl").read_bytes()
    assert main([*command, "--json"]) == 0  # all is there: nothing is answered again
    printed = capsys.readouterr()
    assert "evaluate:" not in printed.err
    assert json.loads(printed.out) == json.loads((out / "summary.json").read_text())
    assert (out / "results.jsonl").read_bytes() == before


def test_all_names_of_a_checkpoint_are_the_same_policy(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = run_folder / "checkpoints" / "best"
    names = [find_policy(str(path)) for path in (run_folder, best, best / "policy")]
    assert {(source.folder, source.label) for source in names} == {(str(best / "policy"), "small")}
    assert all(source.config is not None and source.config.task == "minihop" for source in names)
    assert names[1].config is not None and names[1].config.task_args["entities"] == WORLD["entities"]
    step_folder = "checkpoints/step_000001"
    step = find_policy(str(run_folder / step_folder))
    assert step.label == "small-step_000001" and step.run == run_folder
    for inside, name in (("checkpoints", "step_000001"), (step_folder, "."), (f"{step_folder}/policy", "..")):
        monkeypatch.chdir(run_folder / inside)
        assert find_policy(name) == step

    copied = tmp_path / "model"
    copied.mkdir()
    for file in (best / "policy").iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    plain = find_policy(str(copied))
    assert (plain.label, plain.run) == ("model", None)
    (copied / "README.md").write_text("a card that was edited")
    assert fingerprint(str(copied)) == fingerprint(str(best / "policy"))
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert fingerprint(str(copied)) != fingerprint(str(best / "policy"))


def test_an_interrupted_evaluation_goes_on_where_it_stopped(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [str(run_folder), *"--mode direct agent --limit 6 --sampler.max_concurrency 2 --quiet".split()]
    options += ["--limits.max_new_tokens", "6"]
    assert main([*options, "--out", str(tmp_path / "whole")]) == 0
    add = EvalResultsFile.add

    def stopping(self: EvalResultsFile, *arguments: Any) -> None:
        add(self, *arguments)
        if len(self.results) == 5:
            raise KeyboardInterrupt

    part = ["--out", str(tmp_path / "part")]
    with monkeypatch.context() as patch:
        patch.setattr(EvalResultsFile, "add", stopping)
        assert main([*options, *part]) == 130
    assert "the same command goes on" in capsys.readouterr().err
    kept = rows_of(tmp_path / "part")
    assert 5 <= len(kept) < 12
    assert main([*options, *part]) == 0
    part_of, whole = ((tmp_path / name / "results.jsonl").read_bytes() for name in ("part", "whole"))
    assert part_of == whole


@pytest.mark.slow  # three processes
def test_a_killed_evaluation_goes_on_to_the_same_file(run_folder: Path, tmp_path: Path) -> None:
    options = "--mode direct cot rag agent --sampler.max_concurrency 3 --hardware.threads 1".split()
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
    assert (killed / "table.md").read_bytes() == (whole / "table.md").read_bytes()


def test_a_kill_before_the_first_result_leaves_a_folder_that_can_be_used(
    run_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "manifest.json").write_text("{}")  # it is written first, then settings.json
    assert main([str(run_folder), "--limit", "1", "--out", str(tmp_path), "--quiet"]) == 0
    (tmp_path / "results.jsonl").unlink()
    assert main([str(run_folder), "--limit", "1", "--out", str(tmp_path), "--quiet"]) == 0
    assert len(rows_of(tmp_path)) == 1


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
    assert "6.00/6.00" in capsys.readouterr().err  # and not six and two
    assert main([*options, str(whole), *wider, "--quiet"]) == 0
    for name in ("results.jsonl", "settings.json", "table.md"):
        assert (grown / name).read_bytes() == (whole / name).read_bytes()


def test_a_refused_evaluation_does_not_bind_its_folder(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(run_folder), "--limits.max_new_tokens", "4", "--out", str(tmp_path / "out"), "--quiet"]
    assert main([*command, "--limit", "1"]) == 0
    before = (tmp_path / "out" / "settings.json").read_bytes()
    failing(capsys, *command, "--limit", "9", "--hardware.device", "tpu")
    assert (tmp_path / "out" / "settings.json").read_bytes() == before
    assert (tmp_path / "out" / "summary.json").is_file()
    assert main([*command, "--limit", "1"]) == 0


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


def test_an_embedded_sample_is_marked_as_such(run_folder: Path, tmp_path: Path) -> None:
    options = ["--task", "nq", "--limit", "2", "--quiet", "--mode", "direct", "--out", str(tmp_path / "out")]
    assert main([str(run_folder), *options]) == 0
    table = (tmp_path / "out" / "table.md").read_text()
    assert "2 questions of the task's embedded sample, which is not the benchmark" in table


def test_a_corpus_replaces_the_runs_server_and_its_cache(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"id": "0", "title": "A river", "text": "flows"}')
    run = load_config(
        "quickstart", {"task": "nq", "search.url": "http://127.0.0.1:9", "search.cache": "kept"}
    )
    parser = make_parser("sorl-eval")
    add_options(parser)
    args = parser.parse_args(["--search.corpus", str(tmp_path / "corpus.jsonl")])
    assert list(make_envs(args, [], run)) == ["nq"]
