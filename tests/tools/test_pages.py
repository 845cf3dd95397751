"""The code of the pages about tasks and tools, extracted and run."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sorl_env import ToolUseEnv, load_task
from sorl_env.commands.check_task import check_task
from sorl_env.commands.check_task import main as check
from sorl_env.commands.play import main as play
from sorl_env.tool import ToolCall, ToolRequest, ToolUnavailableError
from sorl_env.tool.toolbox import Toolbox

from ..docs.blocks import python_blocks
from .loopback import LoopbackServer

PRICES = {"lamp": "12.50"}
TUTORIAL = "docs/tutorials/task_and_tool.md"


def module(source: str) -> ModuleType:
    made = ModuleType("of_a_page")
    exec(compile(source, "a page", "exec"), made.__dict__)
    return made


# --- a task ---
@pytest.fixture
def path(tmp_path: Path) -> str:
    source = python_blocks(TUTORIAL)[0]
    assert len(source.splitlines()) <= 60
    (tmp_path / "stockroom.py").write_text(source, encoding="utf-8")
    return str(tmp_path / "stockroom.py")


def test_keeps_the_contract(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    for split, count in (("train", 200), ("test", 200)):
        assert check([path, "--split", split]) == 0
        out = capsys.readouterr().out
        assert f"expert        solves {count} of {count}" in out
    assert out.endswith("all 10 checks passed\n")


def test_the_expert_can_be_watched(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert play([path, "--auto", "expert", "--seed", "0"]) == 0
    assert "Reward 1 (exact_match 1); ended by answer after 2 turns." in capsys.readouterr().out


def test_rewards_of_turns(path: str) -> None:
    own = "import dataclasses\nTASK = dataclasses.replace(TASK, turn_reward=turn_reward)"
    (turn_reward,) = (block for block in python_blocks("docs/add_a_task.md") if "def turn_reward" in block)
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(f"\n{turn_reward}\n{own}\n")
    env = ToolUseEnv(path)
    env.reset(options={"index": 0})
    turns = ("<shelf> elm A 1 </shelf>", "<shelf> elm A 1 </shelf>", "<answer> 37 </answer>")
    assert [env.step(f"<think> x </think> {turn}").reward for turn in turns] == [0.3, 0.0, 1.0]
    assert check([path]) == 0


# --- a tool ---


@pytest.fixture
def shop() -> ModuleType:
    source = python_blocks("docs/add_a_tool.md")[0]
    assert len(source.splitlines()) <= 60
    return module(source)


@pytest.fixture
def url() -> Iterator[str]:
    def respond(request: dict[str, Any]) -> tuple[int, bytes]:
        prices = [PRICES.get(item) for item in request["items"]]
        return 503 if "fire" in request["items"] else 200, json.dumps({"prices": prices}).encode()

    server = LoopbackServer(respond)
    yield f"{server.address}/prices"
    server.close()


def test_a_task_of_two_files_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task of the tutorial, and its second tool in a file of its own."""
    # folders of earlier tests may hold another stockroom.py
    monkeypatch.setattr(
        sys, "path", [folder for folder in sys.path if not Path(folder, "stockroom.py").exists()]
    )
    for name, source in zip(("stockroom", "with_total"), python_blocks(TUTORIAL), strict=True):
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    assert check([str(tmp_path / "with_total.py")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("task stockroom_with_total") and "ok    tool total" in out


def test_a_function_with_typed_parameters(shop: ModuleType) -> None:
    box = Toolbox([shop.convert])

    def call(body: str) -> ToolCall:
        outcome = box.call(ToolRequest("convert", body))
        assert isinstance(outcome, ToolCall)
        return outcome

    assert call('{"value": 3, "unit": "foot", "to": "cm"}').reply == "91.44 cm"
    assert call('{"value": -3, "unit": "foot", "to": "cm"}').reply == "A length is not negative."
    for body in (
        "3 foot",
        '{"value": "3", "unit": "foot", "to": "cm"}',
        '{"value": 3, "unit": "mile", "to": "cm"}',
    ):
        assert not call(body).ok


def test_a_service_with_batches_and_outages(shop: ModuleType, url: str) -> None:
    box = Toolbox([shop.convert, shop.PriceService(url)], retries=1, backoff_s=0.01)
    found, missing = box.call(ToolRequest("price", "lamp")), box.call(ToolRequest("price", "moon"))
    assert isinstance(found, ToolCall)
    assert isinstance(missing, ToolCall)
    assert (found.reply, found.hits) == ("lamp costs 12.50", 1)
    assert (missing.reply, missing.hits) == ("No price for moon.", 0)
    assert isinstance(box.call(ToolRequest("price", "fire")), ToolUnavailableError)
    box.close()


def test_the_notebook_keeps_the_contract() -> None:
    """The page's second file: a tool with a state of its own in each episode."""
    (text,) = [block for block in python_blocks("docs/add_a_tool.md") if "class Notebook" in block]
    task = load_task("nq")
    noting = dataclasses.replace(task, prompt=lambda example: f"Use <note> and <answer>. {example.question}")
    env = ToolUseEnv(noting, tools=[module(text).Notebook()])
    checks = {check.name: check for check in check_task(env, limit=3)}
    assert all(check.passed for check in checks.values()), checks
    assert "note keeps a state of its own" in checks["episodes"].detail
    envs = [env.spawn(), env.spawn()]
    for number, one in enumerate(envs):
        one.reset(seed=number)
    for line in "ab":
        results = [
            one.step(f"<think>x</think><note>{line}{number}</note>") for number, one in enumerate(envs)
        ]
    for number, (observation, *_) in enumerate(results):
        assert re.search(rf"a{number} \(thrown: \d\)\nb{number} \(thrown: \d\)\n", observation)
        assert f"a{1 - number}" not in observation
