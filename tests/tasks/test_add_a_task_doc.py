"""The task in docs/add_a_task.md: extracted, checked, played, trained by path."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sorl_env import ToolUseEnv
from sorl_env.commands.check_task import main as check
from sorl_env.commands.play import main as play

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "add_a_task.md"


@pytest.fixture
def path(tmp_path: Path) -> str:
    source = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)[0]
    assert len(source.splitlines()) <= 60
    file = tmp_path / "stockroom.py"
    file.write_text(source, encoding="utf-8")
    return str(file)


def test_keeps_the_contract(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    for split, count in (("train", 200), ("test", 200)):
        assert check([path, "--split", split]) == 0
        out = capsys.readouterr().out
        assert f"expert        solves {count} of {count}" in out
    assert out.endswith("all 9 checks passed\n")


def test_the_expert_can_be_watched(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert play([path, "--auto", "expert", "--seed", "0"]) == 0
    assert "Reward 1 (exact_match 1); ended by answer after 2 turns." in capsys.readouterr().out


def test_rewards_of_turns(path: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    Path(path).write_text(
        "\n".join(
            [*blocks[:2], "import dataclasses", "TASK = dataclasses.replace(TASK, turn_reward=turn_reward)"]
        )
    )
    env = ToolUseEnv(path)
    env.reset(options={"index": 0})
    turns = ("<shelf> elm A 1 </shelf>", "<shelf> elm A 1 </shelf>", "<answer> 37 </answer>")
    assert [env.step(f"<think> x </think> {turn}").reward for turn in turns] == [0.3, 0.0, 1.0]
    assert check([path]) == 0
