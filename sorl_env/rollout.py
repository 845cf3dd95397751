"""Asynchronous rollout: many trajectories run at the same time, and each waits only for its own tools.

The environment handles text; this module handles the tokens. It turns an environment, a tokenizer and a sampler into
trajectories, and every engine uses it with a sampler of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from sorl_env.envs.prompts import TurnCodec, first_context, make_codec
from sorl_env.envs.step import TurnInfo
from sorl_env.envs.text_env import TextEnv
from sorl_env.outside import HungError
from sorl_env.text import quoted, valid_text
from sorl_env.tool.tool import ToolUnavailableError
from sorl_env.trajectory.trajectory import StopReason, Trajectory, Turn
from sorl_env.turns.tokens import Tokenizer

logger = logging.getLogger(__name__)

_MAX_ERROR_CHARS = 1000  # of an exception's text that a trajectory keeps


@dataclass(frozen=True)
class SamplingParams:
    """How one turn is sampled. Temperature 0 is greedy. Sampling stops at a ``stop`` string or a ``stop_ids`` token,
    which the turn keeps."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class SampledTurn:
    """The sampled token ids, and the log-probability of each after the temperature and ``top_p``."""

    token_ids: list[int]
    log_probs: list[float]
    finish: Literal["stop", "eos", "length"]
    policy_version: int = 0


class Sampler(Protocol):
    """Samples one turn of one trajectory. Calls run concurrently, and a sampler may batch them."""

    async def generate(self, session: str, token_ids: Sequence[int], params: SamplingParams) -> SampledTurn:
        """Continue ``token_ids``. Within one ``session`` they only grow: each call appends to those of the last one."""

    def release(self, session: str) -> None:
        """Drop what is cached for the session, whose trajectory has ended."""


@dataclass(frozen=True)
class RolloutJob:
    """One trajectory to collect: its example, and the seed of its random draws."""

    id: str
    group_id: str
    example_index: int
    seed: int


@dataclass(frozen=True)
class RolloutSettings:
    """Settings that all trajectories of a batch share."""

    temperature: float = 1.0
    top_p: float = 1.0
    use_chat_template: bool = True
    max_concurrency: int = 128


class TrajectoryBuilder:
    """Builds one trajectory: the prompt, then sampled turns and observations in alternation. Tokens are only ever
    appended.

    ``prompt`` is what the reset of ``env`` returned. ``known_prompts`` keeps the token ids of prompts for the other
    trajectories of a group.
    """

    def __init__(
        self,
        env: TextEnv,
        codec: TurnCodec,
        job: RolloutJob,
        prompt: str,
        known_prompts: dict[str, list[int]] | None = None,
    ) -> None:
        self.env = env
        self.job = job
        self.codec = codec
        self.prompt = prompt
        known = {} if known_prompts is None else known_prompts
        if self.prompt not in known:
            known[self.prompt] = first_context(env, self.codec, self.prompt)
        self.token_ids = list(known[self.prompt])
        self.turns: list[Turn] = []
        self._encoded: tuple[TurnInfo, list[int]] | None = None  # the newest reply, with its token ids
        self._turn_ids = [-1] * len(self.token_ids)
        self._log_probs = [0.0] * len(self.token_ids)

    def _append(self, ids: Sequence[int], turn_id: int, log_probs: Sequence[float]) -> None:
        self.token_ids.extend(ids)
        self._turn_ids.extend([turn_id] * len(ids))
        self._log_probs.extend(log_probs)

    def overflows(self, sampled: SampledTurn, result: TurnInfo) -> bool:
        """Whether no room would be left for another turn. If so, truncate the episode before calling ``append``."""
        if result.ended:
            return False
        size = len(self.token_ids) + len(sampled.token_ids) + len(self._reply_ids(sampled, result))
        return size >= self.env.limits.max_trajectory_tokens

    def _reply_ids(self, sampled: SampledTurn, result: TurnInfo) -> list[int]:
        if self._encoded is None or self._encoded[0] is not result:
            limit = self.env.limits.max_observation_tokens
            ids = self.codec.reply_ids(sampled.token_ids, result.parsed, result.observation, limit)
            self._encoded = (result, ids)
        return self._encoded[1]

    def append(
        self, sampled: SampledTurn, text: str, result: TurnInfo, generate_s: float = 0.0, tool_s: float = 0.0
    ) -> None:
        """Add a sampled turn and the environment's reply to it, for which ``overflows`` is false."""
        start = len(self.token_ids)
        self._append(sampled.token_ids, len(self.turns), sampled.log_probs)
        if not result.ended:
            observation = self._reply_ids(sampled, result)
            self._append(observation, -1, [0.0] * len(observation))
        parsed = result.parsed
        self.turns.append(
            Turn(
                index=len(self.turns),
                text=text,
                kind=parsed.kind if parsed else "invalid",
                content=parsed.content if parsed else "",
                format_error=result.format_error,
                observation=result.observation,
                reward_items=result.reward_items,
                tool_calls=tuple(result.tool_calls),
                start=start,
                end=start + len(sampled.token_ids),
                policy_version=sampled.policy_version,
                generate_s=round(generate_s, 6),
                tool_s=round(tool_s, 6),
            )
        )

    def build(self, reason: StopReason, error: str | None = None) -> Trajectory:
        """The finished trajectory, and why it ended."""
        turn_ids = np.asarray(self._turn_ids, dtype=np.int16)
        items: dict[str, float] = {}
        for turn in self.turns:
            for name, value in turn.reward_items.items():
                items[name] = items.get(name, 0.0) + value
        return Trajectory(
            id=self.job.id,
            group_id=self.job.group_id,
            task=self.env.task.name,
            source=self.env.examples.source,
            split=self.env.examples.split,
            example_id=self.env.example.id,
            prompt=self.prompt,
            token_ids=np.asarray(self.token_ids, dtype=np.int32),
            action_mask=turn_ids >= 0,
            turn_ids=turn_ids,
            rollout_log_probs=np.asarray(self._log_probs, dtype=np.float32),
            turns=tuple(self.turns),
            reward=float(sum(items.values())),
            reward_items=items,
            stop_reason=reason,
            seed=self.job.seed,
            error=error,
            metadata={} if self.codec.format.name == "tags" else {"format": self.codec.format.name},
        )


async def collect(
    env: TextEnv,
    tokenizer: Tokenizer,
    sampler: Sampler,
    jobs: Sequence[RolloutJob],
    settings: RolloutSettings = RolloutSettings(),
    on_finish: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """Collect one trajectory per job, in the order of ``jobs``, at most ``max_concurrency`` at a time.

    A tool outage or an exception of the task ends only its own trajectory, with ``StopReason.ERROR``.

    Raises:
        UserError: a prompt is longer than ``max_prompt_tokens``, or too many calls of a tool never return.
    """
    slots = asyncio.Semaphore(settings.max_concurrency)
    prompts: dict[str, list[int]] = {}

    async def run(job: RolloutJob) -> Trajectory:
        async with slots:
            trajectory = await run_trajectory(env.spawn(), tokenizer, sampler, job, settings, prompts)
        if on_finish is not None:
            on_finish(trajectory)
        return trajectory

    tasks = [asyncio.ensure_future(run(job)) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:  # after an error or Ctrl-C nothing may go on sampling in the background
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_trajectory(
    env: TextEnv,
    tokenizer: Tokenizer,
    sampler: Sampler,
    job: RolloutJob,
    settings: RolloutSettings,
    known_prompts: dict[str, list[int]] | None = None,
    on_turn: Callable[[Turn], None] | None = None,
) -> Trajectory:
    """One trajectory: sample a turn, let the environment reply, append both, until the episode ends.

    Where no episode could begin because the environment is unavailable, the trajectory has no turns. ``on_turn`` gets
    each turn once the environment has replied to it.
    """
    codec = make_codec(env, tokenizer, use_chat_template=settings.use_chat_template)
    try:
        unavailable = ""
        try:
            prompt = await env.areset(job.example_index, job.seed)
        except ToolUnavailableError as error:
            prompt, unavailable = "", str(error)
        growing = TrajectoryBuilder(env, codec, job, prompt, known_prompts)
        if unavailable:
            return growing.build(StopReason.ERROR, unavailable)
        while True:
            params = SamplingParams(
                max_new_tokens=min(
                    env.limits.max_new_tokens, env.limits.max_trajectory_tokens - len(growing.token_ids)
                ),
                temperature=settings.temperature,
                top_p=settings.top_p,
                stop=codec.stop,
                seed=job.seed + len(growing.turns),
                stop_ids=codec.stop_ids,
            )
            started = time.monotonic()
            sampled = await sampler.generate(job.id, growing.token_ids, params)
            sampled_at = time.monotonic()
            text = codec.turn_text(sampled.token_ids)
            result = await _contained(env, env.astep(text, cut=sampled.finish == "length"))
            tool_s = time.monotonic() - sampled_at
            if growing.overflows(sampled, result):
                result = await _contained(env, env.atruncate(StopReason.MAX_TOKENS))
            growing.append(sampled, text, result, sampled_at - started, tool_s)
            if on_turn is not None:
                on_turn(growing.turns[-1])
            if result.stop_reason is not None:
                return growing.build(result.stop_reason, result.error)
    finally:
        sampler.release(job.id)
        env.end_episode()  # for a trajectory that was given up; an episode that ended has closed them already


async def _contained(env: TextEnv, reply: Awaitable[TurnInfo]) -> TurnInfo:
    """The environment's reply. An exception of the task, whose traceback is logged, ends this trajectory only."""
    try:
        return await reply
    except HungError:
        raise
    except Exception as error:
        logger.exception("task %s raised on example %s", env.task.name, quoted(env.example.id))
        said = str(error)[:_MAX_ERROR_CHARS]
        return await env.atruncate(StopReason.ERROR, valid_text(f"{type(error).__name__}: {said}"))
