"""Dialogues in flight together are those held one at a time, in rollouts and in ``sorl-eval``.

A cold-started policy searches with a tool whose replies take a random time, so that dialogues come, wait and go in any
order. Nothing of that may show in an answer, a token or a transcript.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.rollout import RolloutJob, RolloutSettings, collect, run_trajectory
from sorl_env.trajectory import Trajectory
from sorl_train.evaluate.arguments import find_source, make_envs, make_policy
from sorl_train.evaluate.ask import _parser as ask_parser
from sorl_train.evaluate.cli import main
from sorl_train.evaluate.runner import Policy

from ..evaluate.conftest import WORLD

TASK = f"""
import asyncio
import random
from dataclasses import replace

from sorl_tasks.minihop import minihop


class Late:
    '''A tool whose replies take a random time: some turns of the event loop, and now and then longer.'''

    inline = False

    def __init__(self, tool):
        self.name, self.description, self.schema = tool.name, tool.description, tool.schema
        self._tool = tool

    def __call__(self, query):
        return self._tool(query)

    async def acall(self, query):
        for _ in range(random.randrange(40)):
            await asyncio.sleep(0)
        if random.random() < 0.3:
            await asyncio.sleep(0.02 * random.random())
        return self._tool(query)


whole = minihop(**{WORLD!r})
TASK = replace(
    whole,
    tools=lambda settings: tuple(Late(tool) for tool in whole.tools(settings)),
    limits=replace(whole.limits, max_new_tokens=17, max_trajectory_tokens=130),  # some turns and dialogues are cut
)
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with MiniHop, whose search takes its time."""
    path = tmp_path_factory.mktemp("task") / "late.py"
    path.write_text(TASK)
    return path


def policy_of(run: Path, task: Path, concurrency: int) -> tuple[Policy, ToolUseEnv]:
    options = ["--model", str(run), "--task", str(task), "--sampler.max_concurrency", str(concurrency)]
    args: argparse.Namespace = ask_parser().parse_args(["x", *options, "--hardware.threads", "1"])
    source = find_source(args, args.model)
    (env,) = make_envs(args, [args.task], None).values()
    return make_policy(args, source, [env]), env


# --- rollouts -------------------------------------------------------------------------------------------------
async def staggered(
    env: ToolUseEnv, policy: Policy, jobs: Sequence[RolloutJob], settings: RolloutSettings
) -> list[Trajectory]:
    """As ``collect``, but each begins when it likes, and some are given up before they are held to the end."""
    rng, places = random.Random(0), asyncio.Semaphore(settings.max_concurrency)

    async def hold(job: RolloutJob) -> Trajectory:
        for _ in range(rng.randrange(60 * len(jobs))):
            await asyncio.sleep(0)
        async with places:
            while True:
                held = asyncio.ensure_future(
                    run_trajectory(env.spawn(), policy.tokenizer, policy.sampler, job, settings)
                )
                if rng.random() < 0.3:
                    for _ in range(rng.randrange(200)):
                        await asyncio.sleep(0)
                    held.cancel()
                await asyncio.wait([held])
                if not held.cancelled():
                    return held.result()

    return list(await asyncio.gather(*(hold(job) for job in jobs)))


def roll(
    run: Path, task: Path, jobs: Sequence[RolloutJob], temperature: float, at_once: int, stagger: bool
) -> list[Trajectory]:
    policy, env = policy_of(run, task, at_once)
    settings = RolloutSettings(temperature=temperature, max_concurrency=at_once)

    async def all_of_them() -> list[Trajectory]:
        if stagger:
            return await staggered(env, policy, jobs, settings)
        return await collect(env, policy.tokenizer, policy.sampler, jobs, settings)

    with policy.session():  # type: ignore[union-attr]  # a local sampler's
        return asyncio.run(all_of_them())


def assert_same_dialogue(one: Trajectory, other: Trajectory) -> None:
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert one.turn_ids.tolist() == other.turn_ids.tolist()
    np.testing.assert_allclose(one.rollout_log_probs, other.rollout_log_probs, rtol=0, atol=1e-4)
    told = [
        [(turn.text, turn.kind, turn.content, turn.observation, turn.reward_items) for turn in it.turns]
        for it in (one, other)
    ]
    assert told[0] == told[1]
    assert (one.reward, one.stop_reason, one.prompt) == (other.reward, other.stop_reason, other.prompt)


def test_rollouts(cold_started_run: Path, task: Path) -> None:
    """Of groups of two, which share a prompt."""
    jobs = [RolloutJob(f"g{i // 2}/{i % 2}", f"g{i // 2}", i // 2, 1000 * i) for i in range(12)]
    alone = roll(cold_started_run, task, jobs, 1.0, 1, stagger=False)
    assert len({trajectory.stop_reason for trajectory in alone}) > 1
    assert sum(len(turn.tool_calls) for t in alone for turn in t.turns) >= 6
    for arriving_late in (False, True):
        together = roll(cold_started_run, task, jobs, 1.0, 7, arriving_late)
        for one, other in zip(alone, together, strict=True):
            assert_same_dialogue(one, other)


# --- sorl-eval ------------------------------------------------------------------------------------------------
def evaluate(run: Path, task: Path, out: Path, at_once: int, *options: str) -> bytes:
    fixed = ["--task", str(task), "--sampler.max_concurrency", str(at_once), "--hardware.threads", "1"]
    assert main([str(run), *fixed, "--quiet", "--out", str(out), *options]) == 0
    return (out / "results.jsonl").read_bytes()


def test_an_evaluation(cold_started_run: Path, task: Path, tmp_path: Path) -> None:
    """The results are the same, byte for byte. A question of mode ``rag`` takes its row after its search, so that rows
    are free while others wait for tools."""
    options = ("--mode", "agent", "rag", "--limit", "10")
    rows = evaluate(cold_started_run, task, tmp_path / "alone", 1, *options)
    assert len({json.loads(row)["stop_reason"] for row in rows.splitlines()}) > 1
    assert evaluate(cold_started_run, task, tmp_path / "together", 5, *options) == rows
