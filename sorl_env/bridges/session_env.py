"""Environments from elsewhere: a Gymnasium environment or a server plays the episodes, the policy writes text.

A *session* plays the episodes; this module turns the policy's turns into its actions and its replies into observations.
There are two formats:

- ``action``: the policy thinks if it likes and writes ``<action>..</action>``; the text between the tags is the action.
  A turn of another form is not passed on: its observation says what is wrong. Replies come in ``<information>`` blocks.
- ``raw``: the whole turn is the action, and replies are appended as they are. The environment has a format of its own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from gymnasium.error import ResetNeeded

from sorl_env.envs.step import EpisodeClock, TurnInfo
from sorl_env.errors import Bounds, UserError, did_you_mean
from sorl_env.task.data import ExampleSet
from sorl_env.task.task import Example, Limits, Task
from sorl_env.text import valid_text
from sorl_env.tool.tool import ToolCall, ToolInputError, ToolUnavailableError
from sorl_env.trajectory.trajectory import StopReason
from sorl_env.turns.tags import FormatError, ParsedTurn, neutralise, parse_turn

Format = Literal["action", "raw"]
ACTION = "action"
SEEDS_OF_A_SPLIT = 10_000_000
REWARD = "environment"  # the name of an environment's reward among the reward items
INSTRUCTION = (
    "You act in an environment over several turns. In each turn you may think first, and then write exactly one action "
    "between <action> and </action>. The environment replies between <information> and </information>.\n\n"
)
_INVALID = (
    "\n\n<information>\nInvalid turn: write one action between <action> and </action>, and nothing after it.\n"
    "</information>\n\n"
)


@dataclass(frozen=True)
class Reply:
    """What a session replies to an action.

    Attributes:
        parsed, reward_items, tool_calls, stop_reason, error: set only by sorl's own server.
    """

    text: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    parsed: ParsedTurn | None = None
    reward_items: Mapping[str, float] | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    stop_reason: StopReason | None = None
    error: str | None = None


class Session(Protocol):
    """Plays the episodes of one environment, one at a time.

    ``reset`` and ``step`` raise ``ToolUnavailableError`` where the environment is unavailable or broken, and ``step``
    raises ``ToolInputError`` for an action that it cannot take, whose message the policy then reads.
    """

    async def reset(self, example: Example, seed: int) -> tuple[str, Example]:
        """Start an episode; returns its first text, and the example with what the environment knows of it."""

    async def step(self, action: str) -> Reply:
        """What the environment replies to an action."""

    async def truncate(self, reason: StopReason) -> Reply | None:
        """The last reply of an episode that ends here; None where the environment gives none."""

    def close(self) -> None:
        """Free it, also before its episode has ended. Must not wait."""


class SessionEnv:
    """A ``TextEnv`` whose episodes are played by sessions, each by one of its own.

    Args:
        open_session: called once for each episode.
        format, stop: see the module; with ``action``, ``</action>`` ends a turn as well.
        instruction: comes before the first text of an episode.
    """

    def __init__(
        self,
        task: Task,
        examples: ExampleSet,
        limits: Limits,
        open_session: Callable[[], Session],
        *,
        format: Format = "action",
        stop: tuple[str, ...] = (),
        instruction: str = "",
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.task = task
        self.examples = examples
        self.limits = limits
        self.example: Example = examples.examples[0]
        self.stop = (f"</{ACTION}>", *stop) if format == "action" else stop
        self.format: Format = format
        self._instruction = instruction
        self._open_session = open_session
        self._on_close = on_close
        self._session: Session | None = None
        self._turns: list[ParsedTurn] = []
        self._reply = Reply("")
        self._items: dict[str, float] = {}
        self._clock = EpisodeClock()

    def spawn(self) -> SessionEnv:
        """Another environment with the same task, examples and sessions, and no episode."""
        env = copy.copy(self)
        env._session, env._on_close = None, lambda: None
        return env

    async def areset(self, index: int, seed: int) -> str:
        """Start an episode on example ``index``; returns the prompt. Raises ``ToolUnavailableError`` if it cannot."""
        self.end_episode()
        self.example = self.examples.examples[index]
        self._turns, self._items, self._reply = [], {}, Reply("")
        self._session = self._open_session()
        text, self.example = await self._session.reset(self.example, seed)
        self._clock = EpisodeClock()
        return self._instruction + valid_text(text)

    async def astep(self, action: str, cut: bool = False) -> TurnInfo:
        """One turn of the policy. One that the token limit ``cut`` is read like any other."""
        if self._session is None:
            raise ResetNeeded("call areset() first")
        action = valid_text(action)
        parsed = self._parse(action)
        self._turns.append(parsed)
        self._reply, self._items = Reply(""), {}
        observation = _INVALID
        if parsed.error is None:
            self._clock.ask()
            try:
                self._reply = await self._session.step(parsed.content if self.format == "action" else action)
                observation = self._shown(self._reply.text)
            except ToolInputError as error:
                observation = self._shown(str(error))
            except ToolUnavailableError as error:
                return self._end(StopReason.ERROR, str(error))
            self._clock.answered()
        return self._judge(observation)

    def _parse(self, action: str) -> ParsedTurn:
        if self.format == "raw":
            return ParsedTurn("tool", "", None, action)
        parsed = parse_turn(action, (ACTION,), require_think=False)
        if parsed.kind == "answer":
            return ParsedTurn("invalid", "", None, "", FormatError.MISSING_ACTION, "an answer, not an action")
        return parsed

    def _shown(self, text: str) -> str:
        """The observation for a reply, cut as a tool's reply is."""
        text = valid_text(text)[: self.limits.reply_chars]
        return text if self.format == "raw" else f"\n\n<information>\n{neutralise(text)}\n</information>\n\n"

    def _judge(self, observation: str) -> TurnInfo:
        """The result of a turn that the session has replied to, or that was malformed."""
        reply = self._reply
        if reply.parsed is not None:
            self._turns[-1] = reply.parsed
        if reply.stop_reason is StopReason.ERROR:
            return self._end(StopReason.ERROR, reply.error)
        if not math.isfinite(reply.reward):
            return self._end(StopReason.ERROR, f"the environment gave a reward of {reply.reward}")
        given = {REWARD: reply.reward} if reply.reward else {}
        self._items = given if reply.reward_items is None else dict(reply.reward_items)
        if reply.terminated or reply.truncated:
            usual = StopReason.ANSWER if reply.terminated else StopReason.MAX_TURNS
            return self._end(reply.stop_reason or usual, reply.error)
        if ending := self._clock.ending(self._turns, self.limits):
            return self._end(*ending)
        return TurnInfo(observation, self._turns[-1], len(self._turns) - 1, self._items, reply.tool_calls)

    async def atruncate(self, reason: StopReason, error: str | None = None) -> TurnInfo:
        """End the running episode. A session that rewards what was reached until here replaces the last reward."""
        if self._session is not None and not reason.excluded:
            try:
                last = await self._session.truncate(reason)
            except ToolUnavailableError as outage:
                return self._end(StopReason.ERROR, str(outage))
            if last is not None:
                self._items = dict(last.reward_items or {})
        return self._end(reason, error)

    def _end(self, reason: StopReason, error: str | None = None) -> TurnInfo:
        self.end_episode()
        items = {} if reason.excluded else self._items
        parsed = self._turns[-1] if self._turns else None
        return TurnInfo("", parsed, len(self._turns) - 1, items, self._reply.tool_calls, reason, error)

    def end_episode(self) -> None:
        """Give up the running episode, if there is one."""
        if self._session is not None:
            session, self._session = self._session, None
            session.close()

    def close(self) -> None:
        """Close what all episodes share."""
        self.end_episode()
        self._on_close()


def seeded_examples(task: str, split: str, count: int) -> tuple[Example, ...]:
    """The first examples of a split, each of which is a seed; no two splits share one. Raises ``UserError`` for an
    unknown split."""
    splits = ("train", "validation", "test")
    if split not in splits:
        raise UserError(f"{task} has no split {split!r}. {did_you_mean(split, splits)}")
    first = splits.index(split) * SEEDS_OF_A_SPLIT
    seeds = range(first, first + count)
    return tuple(Example(id=f"seed-{seed}", question="", metadata={"seed": seed}) for seed in seeds)


def check_settings(format: str, examples: int, **seconds: float) -> None:
    """Raise ``UserError`` for a setting of such an environment that is out of range."""
    if format not in ("action", "raw"):
        raise UserError(f"format must be action or raw, not {format!r}")
    problems = {"examples": Bounds(1, SEEDS_OF_A_SPLIT).problem(examples)}
    problems |= {name: Bounds(above=0, high=86400).problem(value) for name, value in seconds.items()}
    for name, problem in problems.items():
        if problem:
            raise UserError(f"{name} {problem}")


def session_task(
    name: str,
    description: str,
    limits: Limits,
    open_session: Callable[[], Session],
    embedded: Callable[[str], tuple[Example, ...]],
    *,
    format: Format,
    stop: Sequence[str],
    instruction: str | None,
    system_prompt: str | None = None,
    on_close: Callable[[], None] = lambda: None,
) -> Task:
    """A task whose episodes are played by sessions, see ``SessionEnv``; ``instruction=None`` explains ``action``."""
    if instruction is None:
        instruction = INSTRUCTION if format == "action" else ""
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    form: dict[str, Any] = {"format": format, "stop": stops, "instruction": instruction}
    return Task(
        name=name,
        prompt=lambda example: "",
        reward=lambda example, turns: {},
        parse_row=_no_rows,
        embedded=embedded,
        limits=limits,
        system_prompt=system_prompt,
        description=description,
        environment=lambda task, examples, own: SessionEnv(
            task, examples, own, open_session, **form, on_close=on_close
        ),
    )


def _no_rows(row: Mapping[str, Any]) -> Example:
    raise ValueError("an environment from elsewhere brings its own episodes")
