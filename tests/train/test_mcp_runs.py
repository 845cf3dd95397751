"""A task whose only tools are those of an MCP server, a real command: it trains, is evaluated and played."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from sorl_env.commands import play
from sorl_train import cli
from sorl_train.evaluate import cli as evaluate

from . import mcp_task

pytest.importorskip("mcp", reason="needs pip install -e '.[mcp]'")

TASK = str(Path(mcp_task.__file__))


@pytest.mark.slow
def test_train_and_evaluate(tmp_path: Path) -> None:
    run = tmp_path / "run"
    sizes = {"rollout.batch_size": 8, "rollout.group_size": 4, "update.mini_batch_size": 8, "update.steps": 2}
    small = {"sft.steps": 40, "tiny.hidden_size": 32, "tiny.num_layers": 2, "search.timeout_s": 120}
    options = [word for name, value in (sizes | small).items() for word in (f"--{name}", str(value))]
    status = cli.main(["--task", TASK, "--algo", "grpo", "--run_dir", str(run), *options])
    assert status == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line.get("step") in (1, 2) and "rollout/excluded_rate" in line]
    assert len(steps) == 2 and all(line["rollout/excluded_rate"] == 0 for line in steps)
    manifest = (run / "manifest.json").read_text()
    assert "servers.py stock (stock 1.2)" in manifest

    out = tmp_path / "evaluation"
    added = ["--tools", mcp_task.STOCK.replace("mcp:", "mcp+episode:").replace(" stock", " liar pid")]
    status = evaluate.main([str(run), "--limit", "2", "--out", str(out), *added])
    assert status != 0  # both servers have a tool called shelf
    assert evaluate.main([str(run), "--limit", "2", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(row.get("error") is None for row in rows)


def test_play(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('s oak A 1\nnote_add {"line": "seven"}\na 7\n'))
    assert play.main([TASK, "--index", "0"]) == 0
    said = capsys.readouterr().out
    assert "bolts 7 , lamps 3" in said and "seven" in said and "Reward 1" in said


def test_play_with_tools_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    task = tmp_path / "bare.py"
    task.write_text(
        "from sorl_env import Example, Task\n"
        "TASK = Task(name='bare', prompt=lambda e: e.question, reward=lambda e, turns: {}, "
        "parse_row=lambda row: Example('0', '?'), embedded=lambda split: [Example('0', 'How many?', ('1',))])\n"
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("s oak A 1\nq\n"))
    assert play.main([str(task), "--tools", mcp_task.STOCK]) == 0
    said = capsys.readouterr().out
    assert "<shelf> name </shelf>: List what lies on a shelf, given its name." in said
    assert "bolts 7 , lamps 3" in said
