"""The task in docs/add_a_task.md: extracted, checked, played."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sorl_env import ToolUseEnv, ToolUseVectorEnv, load_task
from sorl_env.check_task import main as check
from sorl_env.play import main as play

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
    assert out.endswith("all 8 checks passed\n")


def test_the_expert_can_be_watched(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert play([path, "--auto", "expert", "--seed", "0"]) == 0
    assert "Reward 1 (exact_match 1); ended by answer after 2 turns." in capsys.readouterr().out


def test_an_episode(path: str) -> None:
    env = ToolUseEnv(path)
    prompt, info = env.reset(options={"index": 0})
    assert prompt.endswith("How many bolts lie on shelf elm A 1 ?")
    assert info["tools"] == ("shelf",)
    wrong = env.step("<think> x </think> <shelf> elm Z 1 </shelf>")
    assert "There is no shelf 'elm Z 1'" in wrong.observation
    assert wrong.info["tool_calls"][0].ok is False
    right = env.step("<think> x </think> <shelf> elm A 1 </shelf>")
    assert "bolts 37 , " in right.observation
    last = env.step("<think> x </think> <answer> 37 </answer>")
    assert (last.reward, last.terminated) == (1.0, True)


def test_vector_episodes(path: str) -> None:
    task = load_task(path)
    assert task.expert is not None
    env = ToolUseVectorEnv(4, task)
    env.reset(seed=0)
    examples = [single.example for single in env.envs]
    seen, *_ = env.step([task.expert(example, []) for example in examples])
    _, rewards, terminated, *_ = env.step(
        [task.expert(example, [text]) for example, text in zip(examples, seen, strict=True)]
    )
    assert rewards.tolist() == [1.0] * 4
    assert terminated.all()
    env.close()
