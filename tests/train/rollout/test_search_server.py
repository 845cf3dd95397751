"""A whole run that searches through a real ``sorl-serve``, which is killed in mid-run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.task.registry import load_task
from sorl_env.trajectory import read_jsonl
from sorl_train.run.files import read_jsonl as read_metrics
from sorl_train.run.folder import RunDir
from sorl_train.train_rl import run

from ...tools.serve.conftest import ServerProcess
from ..conftest import WORLD, QuietDisplay, short_config

pytestmark = pytest.mark.slow

TASK = f"""
from dataclasses import replace
from pathlib import Path

from sorl_tasks.minihop import minihop
from sorl_tools.search.bm25_search import search_tool

CORPUS = Path(__file__).with_name("corpus.jsonl")
TASK = replace(minihop(**{WORLD!r}), tools=lambda settings: (search_tool(settings, CORPUS),))
"""


class Watching(QuietDisplay):
    """Calls ``on_finish`` when the first trajectory of step 2 has ended, and ``on_step`` after each step."""

    def __init__(self, on_finish: Callable[[], None], on_step: Callable[[int], None]) -> None:
        super().__init__()
        self._on_finish, self._on_step = on_finish, on_step
        self._rollouts = 0

    def step(self, step: int, metrics: Any) -> None:
        self._on_step(step)

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        self._rollouts += name == "rollout"
        due = [self._on_finish] if name == "rollout" and self._rollouts == 2 else []
        yield lambda done: due.pop()() if due else None


class Search:
    """MiniHop's passages behind a server that can be killed, and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        self.corpus, self.task, self.cache = folder / "corpus.jsonl", folder / "task.py", folder / "cache"
        tool: Any = ToolUseEnv(load_task("minihop", **WORLD)).toolbox.tools[0]
        rows = [{"id": p.id, "contents": f'"{p.title}"\n{p.text}'} for p in tool._passages]
        self.corpus.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        self.task.write_text(TASK, encoding="utf-8")
        self.server = ServerProcess(self.corpus, cache=self.cache)

    def kill(self) -> None:
        self.server.process.kill()
        self.server.process.wait()

    def start_again(self) -> None:
        self.server.__exit__()
        self.server = ServerProcess(self.corpus, cache=self.cache, port=self.server.port)


@pytest.fixture
def search(tmp_path: Path) -> Iterator[Search]:
    started = Search(tmp_path)
    yield started
    started.server.__exit__()


def test_an_outage_beyond_the_deadline_is_excluded_and_counted(search: Search, tmp_path: Path) -> None:
    def mend(step: int) -> None:
        if step == 2:
            search.start_again()
            time.sleep(5.0)  # the client leaves a server that was out alone for a few seconds

    display = Watching(search.kill, mend)
    config = short_config(
        task=str(search.task),
        task_args={},
        search__url=search.server.url,
        search__timeout_s=1.5,
        update__steps=3,
        rollout__save_every=1,
    )
    run_dir = RunDir.create(tmp_path / "run", config)
    assert run(config, run_dir, display, False)["steps"] == 3
    before, during, after = read_metrics(run_dir.metrics)[1:]
    assert before["rollout/excluded_rate"] == after["rollout/excluded_rate"] == 0.0
    trajectories = list(read_jsonl(run_dir.trajectories / "step_000002.jsonl"))
    lost = [t for t in trajectories if t.excluded]
    assert len(trajectories) == 16 and 0 < len(lost) < 16
    assert during["rollout/excluded_rate"] == during["rollout/stop_error"] == len(lost) / 16
    assert during["tool/error_rate"] > 0.0 == before["tool/error_rate"] == after["tool/error_rate"]
    assert all(t.error is not None and "tool search is unavailable after" in t.error for t in lost)
    assert during["loss/grad_norm"] > 0.0  # trained on the others
