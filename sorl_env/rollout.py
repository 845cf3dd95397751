"""Asynchronous rollout: many trajectories in flight, tools awaited off the critical path.

The environment is text; this module owns the tokens. It turns an environment, a tokenizer and a sampler into
trajectories, and it is the same code for every engine: only the sampler differs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from sorl_env.env import StepResult, ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.task import Limits
from sorl_env.tokens import Tokenizer, encode_observation, encode_prompt
from sorl_env.trajectory import StopReason, Trajectory, Turn

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SamplingParams:
    """How one turn is drawn; temperature 0 is greedy. ``stop`` strings end the turn and belong to it."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class SampledTurn:
    """What the sampler drew: ids and their log-probabilities, one each."""

    token_ids: list[int]
    log_probs: list[float]
    finish: Literal["stop", "eos", "length"]
    policy_version: int = 0


class Sampler(Protocol):
    """Draws one turn of one trajectory. Calls run concurrently; a sampler batches them as it likes."""

    async def generate(self, session: str, token_ids: Sequence[int], params: SamplingParams) -> SampledTurn:
        """Continue ``token_ids``. Calls of one ``session`` only ever append to its earlier tokens."""
        ...

    def release(self, session: str) -> None:
        """The session's trajectory is over; whatever is cached for it can go."""
        ...


@dataclass(frozen=True)
class RolloutJob:
    """One trajectory to collect: which example, and the seed of its draws."""

    id: str
    group_id: str
    example_index: int
    seed: int


@dataclass(frozen=True)
class RolloutSettings:
    """What all trajectories of a batch share."""

    temperature: float = 1.0
    top_p: float = 1.0
    use_chat_template: bool = True
    max_concurrency: int = 128


@dataclass
class _Tokens:
    """The four aligned columns of a trajectory while it grows."""

    ids: list[int]
    turn_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.turn_ids = [-1] * len(self.ids)
        self.log_probs = [0.0] * len(self.ids)

    def append(self, ids: Sequence[int], turn_id: int = -1, log_probs: Sequence[float] | None = None) -> None:
        self.ids.extend(ids)
        self.turn_ids.extend([turn_id] * len(ids))
        self.log_probs.extend(log_probs if log_probs is not None else [0.0] * len(ids))


async def collect(
    env: ToolUseEnv,
    tokenizer: Tokenizer,
    sampler: Sampler,
    jobs: Sequence[RolloutJob],
    settings: RolloutSettings = RolloutSettings(),
    on_finish: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """Collect one trajectory a job, in the order of ``jobs``, ``max_concurrency`` of them in flight.

    A tool outage or an exception of the task ends its own trajectory with ``StopReason.ERROR`` and no other.

    Raises:
        UserError: a prompt is longer than ``max_prompt_tokens``.
    """
    slots = asyncio.Semaphore(settings.max_concurrency)

    async def run(job: RolloutJob) -> Trajectory:
        async with slots:
            trajectory = await run_trajectory(env.spawn(), tokenizer, sampler, job, settings)
        if on_finish is not None:
            on_finish(trajectory)
        return trajectory

    tasks = [asyncio.ensure_future(run(job)) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:  # after a failure or Ctrl-C nothing may go on sampling in the background
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_trajectory(
    env: ToolUseEnv, tokenizer: Tokenizer, sampler: Sampler, job: RolloutJob, settings: RolloutSettings
) -> Trajectory:
    """One trajectory: sample a turn, let the environment reply, append, until it ends."""
    prompt, _ = env.reset(seed=job.seed, options={"index": job.example_index})
    tokens = _Tokens(_prompt_ids(env, tokenizer, prompt, settings))
    turns: list[Turn] = []
    deadline = None if env.limits.max_seconds is None else time.monotonic() + env.limits.max_seconds
    try:
        while True:
            params = _sampling_params(env, len(tokens.ids), job, len(turns), settings)
            started = time.monotonic()
            sampled = await sampler.generate(job.id, tokens.ids, params)
            sampled_at = time.monotonic()
            start = len(tokens.ids)
            tokens.append(sampled.token_ids, len(turns), sampled.log_probs)
            text = _turn_text(tokenizer, sampled.token_ids, params.stop)
            result = await _reply(env, text)
            if not (result.terminated or result.truncated):
                observation_ids = _observation_ids(tokenizer, result.observation, env.limits)
                # the next turn needs room for one token at least
                if start + len(sampled.token_ids) + len(observation_ids) >= env.limits.max_trajectory_tokens:
                    result = env.truncate(StopReason.MAX_TOKENS)
                elif deadline is not None and time.monotonic() >= deadline:
                    result = env.truncate(StopReason.MAX_SECONDS)
                else:
                    tokens.append(observation_ids)
            times = (sampled_at - started, time.monotonic() - sampled_at)
            turns.append(_turn(len(turns), text, result, start, sampled, times))
            if result.terminated or result.truncated:
                return _trajectory(env, job, prompt, tokens, turns, result)
    finally:
        sampler.release(job.id)


def _sampling_params(
    env: ToolUseEnv, length: int, job: RolloutJob, turn: int, settings: RolloutSettings
) -> SamplingParams:
    limits = env.limits
    return SamplingParams(
        max_new_tokens=min(limits.max_new_tokens, limits.max_trajectory_tokens - length),
        temperature=settings.temperature,
        top_p=settings.top_p,
        stop=tuple(f"</{tag}>" for tag in (*env.toolbox.names, "answer")),
        seed=job.seed + turn,
    )


async def _reply(env: ToolUseEnv, text: str) -> StepResult:
    """The environment's answer to one turn; an exception of the task is contained and ends the trajectory."""
    try:
        requests = env.begin_turn(text)
        calls = await asyncio.gather(*(env.toolbox.acall(request) for request in requests))
        return env.finish_turn(calls)
    except Exception as error:  # a task's reward or prompt is user code: one bad row must not end a run of days
        logger.exception("task %s raised on example %s", env.task.name, env.example.id)
        return env.truncate(StopReason.ERROR, error=f"{type(error).__name__}: {error}")


def _prompt_ids(env: ToolUseEnv, tokenizer: Tokenizer, prompt: str, settings: RolloutSettings) -> list[int]:
    ids = encode_prompt(
        tokenizer, prompt, env.task.system_prompt, use_chat_template=settings.use_chat_template
    )
    limit = min(env.limits.max_prompt_tokens, env.limits.max_trajectory_tokens - 1)
    if len(ids) > limit:
        raise UserError(
            f"the prompt of example {env.example.id!r} has {len(ids)} tokens, the limit is {limit}: raise "
            "limits.max_prompt_tokens (and limits.max_trajectory_tokens), or drop the example from the data"
        )
    return ids


def _turn_text(tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str]) -> str:
    """The turn as text, cut after its first stop string: the sampler chose where to cut, not the policy.

    A token that completes a stop string can carry more characters (``>\\n``, ``>.``); they are not held against it.
    """
    text = tokenizer.decode(ids, skip_special_tokens=True)
    ends = [text.find(word) + len(word) for word in stop if word in text]
    return text[: min(ends)] if ends else text


def _observation_ids(tokenizer: Tokenizer, text: str, limits: Limits) -> list[int]:
    """Token ids of a reply within ``max_observation_tokens``; a long one loses its middle, never its closing tag."""
    ids = encode_observation(tokenizer, text)
    if len(ids) <= limits.max_observation_tokens:
        return ids
    body, tag, rest = text.rpartition("\n</information>")
    tail = encode_observation(tokenizer, tag + rest) if tag else []
    return encode_observation(tokenizer, body, max(0, limits.max_observation_tokens - len(tail))) + tail


def _turn(
    index: int, text: str, result: StepResult, start: int, sampled: SampledTurn, times: tuple[float, float]
) -> Turn:
    info = result.info
    parsed = info.get("parsed")
    return Turn(
        index=index,
        text=text,
        kind=parsed.kind if parsed else "invalid",
        content=parsed.content if parsed else "",
        format_error=info.get("format_error"),
        observation=result.observation,
        reward_items=dict(info.get("reward_items", {})),
        tool_calls=tuple(info.get("tool_calls", ())),
        start=start,
        end=start + len(sampled.token_ids),
        policy_version=sampled.policy_version,
        generate_s=round(times[0], 6),
        tool_s=round(times[1], 6),
    )


def _trajectory(
    env: ToolUseEnv, job: RolloutJob, prompt: str, tokens: _Tokens, turns: list[Turn], result: StepResult
) -> Trajectory:
    turn_ids = np.asarray(tokens.turn_ids, dtype=np.int16)
    items: dict[str, float] = {}
    for turn in turns:
        for name, value in turn.reward_items.items():
            items[name] = items.get(name, 0.0) + value
    return Trajectory(
        id=job.id,
        group_id=job.group_id,
        task=env.task.name,
        source=env.examples.source,
        split=env.examples.split,
        example_id=env.example.id,
        prompt=prompt,
        token_ids=np.asarray(tokens.ids, dtype=np.int32),
        action_mask=turn_ids >= 0,
        turn_ids=turn_ids,
        rollout_log_probs=np.asarray(tokens.log_probs, dtype=np.float32),
        turns=tuple(turns),
        reward=float(sum(items.values())),
        reward_items=items,
        stop_reason=StopReason(result.info["stop_reason"]),
        seed=job.seed,
        error=result.info.get("error"),
    )
