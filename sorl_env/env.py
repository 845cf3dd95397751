"""The environment: one ``step`` is one turn of the policy, in text."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import gymnasium
from gymnasium.error import ResetNeeded
from gymnasium.utils import seeding

from sorl_env.data import ExampleSet, load_examples
from sorl_env.errors import UserError
from sorl_env.parser import ParsedTurn, neutralise, parse_turn
from sorl_env.registry import load_task
from sorl_env.render import render_dialogue
from sorl_env.replay import ReplayTool
from sorl_env.rewards import check_reward_items
from sorl_env.spaces import UnicodeText
from sorl_env.task import Example, Limits, Task, ToolSettings
from sorl_env.tool import ToolCall, ToolLike, ToolRequest, ToolUnavailableError, as_tool
from sorl_env.toolbox import Toolbox, ToolOutcome
from sorl_env.trajectory import StopReason

INVALID_TURN_OBSERVATION = (
    "\n\n<information>\nInvalid turn: write one think block, then exactly one tool or answer block, and nothing else.\n"
    "</information>\n\n"
)


class StepResult(NamedTuple):
    """What ``step`` returns: Gymnasium's five, in its order."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class _Phase(Enum):
    ENDED = "call reset() first: no episode is running"
    POLICY = "call begin_turn() first: it is the policy's turn"
    TOOLS = "call finish_turn() first: a turn waits for its tools"


@dataclass(frozen=True)
class EnvState:
    """An episode, to be restored by ``set_state`` in any environment of the same task and data. Picklable."""

    example_id: str
    index: int
    phase: str
    turns: tuple[ParsedTurn, ...]
    dialogue: tuple[tuple[str, str], ...]
    calls: tuple[ToolCall, ...]
    items: Mapping[str, float]
    elapsed_s: float
    rng_state: Mapping[str, Any] | None


class ToolUseEnv(gymnasium.Env[str, str]):
    """A language-model agent answers a question and may use tools first.

    The observation of ``reset`` is the prompt; those of ``step`` are the environment's replies, to be appended to the
    dialogue: ``<information>`` blocks, or a fixed correction after a malformed turn; empty after the last turn.
    ``terminated``: the policy answered. ``truncated``: a budget ran out, or a tool was out.

    ``info`` of a step: ``parsed`` (ParsedTurn), ``format_error``, ``reward_items``, ``tool_calls``, ``turn`` (0-based),
    ``stop_reason``, ``example_id``; and ``error`` when a tool was out. ``info`` of reset: ``example_id``, ``index``,
    ``question``, ``tools``, ``source``, ``split``, ``is_sample``.

    Args:
        task: a task, or what ``load_task`` takes.
        data, split: where examples come from, see ``load_examples``.
        tools: used in place of the task's own.
        tool_settings: what the task's tools are built from; ``corpus`` and ``search_url`` are short for its fields.
        limits: used in place of the task's own.
        knobs: keyword arguments for a task that is built.

    ``step`` is ``begin_turn``, the tool calls, then ``finish_turn``: vector environments and asynchronous rollouts call
    the tools of many episodes in their own way in between.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}

    def __init__(
        self,
        task: Task | str,
        *,
        data: str | None = None,
        split: str = "train",
        tools: Sequence[ToolLike] | None = None,
        tool_settings: ToolSettings = ToolSettings(),
        corpus: str | None = None,
        search_url: str | None = None,
        limits: Limits | None = None,
        knobs: Mapping[str, Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise UserError(f"there is no render mode {render_mode!r}; use 'ansi' or None")
        self.task = load_task(task, **(knobs or {})) if isinstance(task, str) else task
        self.limits = limits or self.task.limits
        self.render_mode = render_mode
        self.examples: ExampleSet = load_examples(self.task, data, split)
        if corpus is not None:
            tool_settings = replace(tool_settings, corpus=corpus)
        if search_url is not None:
            tool_settings = replace(tool_settings, search_url=search_url)
        self.toolbox = _make_toolbox(self.task, tools, tool_settings)
        self._start()

    def _start(self) -> None:
        """State of a fresh environment with no episode."""
        self.action_space = UnicodeText()
        self.observation_space = UnicodeText()
        self._phase = _Phase.ENDED
        self._index = 0
        self._started = 0.0
        self._turns: list[ParsedTurn] = []
        self._dialogue: list[tuple[str, str]] = []
        self._action = ""
        self._calls: list[ToolCall] = []
        self._items: Mapping[str, float] = {}

    def spawn(self) -> ToolUseEnv:
        """Another environment of the same task, examples and tools, with no episode; cheap."""
        env = copy.copy(self)
        env._np_random = env._np_random_seed = None
        env._start()
        return env

    @property
    def example(self) -> Example:
        """The example of the running episode, or of the last one."""
        return self.examples.examples[self._index]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode on a uniformly drawn example, or on ``options={"index": i}``."""
        super().reset(seed=seed)
        index = _read_index(options, len(self.examples.examples)) if options else None
        self._index = int(self.np_random.integers(len(self.examples.examples))) if index is None else index
        self._phase = _Phase.POLICY
        self._turns = []
        self._dialogue = []
        self._calls = []
        self._items = {}
        self._started = time.monotonic()
        example = self.example
        info = {
            "example_id": example.id,
            "index": self._index,
            "question": example.question,
            "tools": self.toolbox.names,
            "source": self.examples.source,
            "split": self.examples.split,
            "is_sample": self.examples.is_sample,
        }
        return self.task.prompt(example), info

    def step(self, action: str) -> StepResult:
        """One turn of the policy: parse it, call its tool, reply."""
        return self.finish_turn([self.toolbox.call(request) for request in self.begin_turn(action)])

    def begin_turn(self, action: str) -> list[ToolRequest]:
        """Take the policy's turn; returns the tool requests to serve before ``finish_turn`` (none, or one).

        Raises:
            ResetNeeded: no episode is running, or a turn is under way.
        """
        if self._phase is not _Phase.POLICY:
            raise ResetNeeded(self._phase.value)
        parsed = parse_turn(action, self.toolbox.names, self.task.require_think)
        self._turns.append(parsed)
        self._action = action
        self._phase = _Phase.TOOLS
        if parsed.tool is None or len(self._turns) >= self.limits.max_turns:
            return []
        return [ToolRequest(parsed.tool, parsed.content)]

    def finish_turn(self, calls: Sequence[ToolOutcome]) -> StepResult:
        """Reply to the turn, given the outcomes of its requests in their order."""
        if self._phase is not _Phase.TOOLS:
            raise ResetNeeded(self._phase.value)
        parsed = self._turns[-1]
        self._calls = []
        self._items = {}
        observation = INVALID_TURN_OBSERVATION
        for outcome in calls:
            if isinstance(outcome, ToolUnavailableError):
                self._calls = [] if outcome.call is None else [outcome.call]
                return self._end(StopReason.ERROR, error=str(outcome))
            self._calls = [outcome]
            observation = f"\n\n<information>\n{neutralise(outcome.reply)}\n</information>\n\n"
        if self.task.turn_reward is not None:
            self._items = check_reward_items(self.task.turn_reward(self.example, self._turns), self.task.name)
        if parsed.kind == "answer":
            return self._end(StopReason.ANSWER)
        if len(self._turns) >= self.limits.max_turns:
            return self._end(StopReason.INVALID if parsed.kind == "invalid" else StopReason.MAX_TURNS)
        if self.limits.max_seconds is not None and time.monotonic() - self._started >= self.limits.max_seconds:
            return self._end(StopReason.MAX_SECONDS)
        self._dialogue.append((self._action, observation))
        self._phase = _Phase.POLICY
        reward = sum(self._items.values()) if self._items else 0.0
        return StepResult(observation, reward, False, False, self._info(self._items, None))

    def truncate(self, reason: StopReason | str, error: str | None = None) -> StepResult:
        """End the running episode from outside, for a token budget or an abort.

        The result stands in place of the last turn's, and repeats that turn's own reward items.
        """
        if self._phase is _Phase.ENDED:
            raise ResetNeeded(self._phase.value)
        if self._phase is _Phase.TOOLS:
            self._calls = []
            self._items = {}
        elif self._dialogue:
            self._action, _ = self._dialogue.pop()
        return self._end(StopReason(reason), error)

    def _end(self, reason: StopReason, error: str | None = None) -> StepResult:
        items = dict(self._items)
        if not reason.excluded:
            final = check_reward_items(self.task.reward(self.example, self._turns), self.task.name)
            for name, value in final.items():
                items[name] = items.get(name, 0.0) + value
        if self._turns:
            self._dialogue.append((self._action, ""))
        self._phase = _Phase.ENDED
        info = self._info(items, reason.value)
        if error is not None:
            info["error"] = error
        answered = reason is StopReason.ANSWER
        reward = 0.0 if reason.excluded else float(sum(items.values()))
        return StepResult("", reward, answered, not answered, info)

    def _info(self, items: Mapping[str, float], stop_reason: str | None) -> dict[str, Any]:
        parsed = self._turns[-1] if self._turns else None
        error = parsed.error if parsed else None
        return {
            "parsed": parsed,
            "format_error": error.value if error else None,
            "reward_items": dict(items),
            "tool_calls": list(self._calls),
            "turn": len(self._turns) - 1,
            "stop_reason": stop_reason,
            "example_id": self.example.id,
        }

    def get_state(self) -> EnvState:
        """The episode as it stands, between two turns.

        Raises:
            RuntimeError: a turn waits for its tools.
        """
        if self._phase is _Phase.TOOLS:
            raise RuntimeError(self._phase.value)
        return EnvState(
            example_id=self.example.id,
            index=self._index,
            phase=self._phase.name,
            turns=tuple(self._turns),
            dialogue=tuple(self._dialogue),
            calls=tuple(self._calls),
            items=dict(self._items),
            elapsed_s=time.monotonic() - self._started,
            rng_state=None if self._np_random is None else copy.deepcopy(self._np_random.bit_generator.state),
        )

    def set_state(self, state: EnvState) -> None:
        """Go on from a state, random draws of later resets included.

        Raises:
            ValueError: the state belongs to other data.
        """
        examples = self.examples.examples
        if state.index >= len(examples) or examples[state.index].id != state.example_id:
            raise ValueError(f"the state is of example {state.example_id!r}, which is not number {state.index} here")
        self._phase = _Phase[state.phase]
        self._index = state.index
        self._turns = list(state.turns)
        self._dialogue = list(state.dialogue)
        self._calls = list(state.calls)
        self._items = dict(state.items)
        self._started = time.monotonic() - state.elapsed_s
        if state.rng_state is None:
            self._np_random = self._np_random_seed = None
        else:
            self._np_random, self._np_random_seed = seeding.np_random(0)
            self._np_random.bit_generator.state = copy.deepcopy(dict(state.rng_state))

    def render(self) -> str | None:  # type: ignore[override]
        """The dialogue so far as the paper's Table 2 shows it, with colours, in mode ``ansi``; else None."""
        if self.render_mode is None:
            return None
        return render_dialogue(self.example, self._dialogue, self.toolbox.names)

    def close(self) -> None:
        """Close the tools; those of spawned environments are the same."""
        self.toolbox.close()


def _make_toolbox(task: Task, tools: Sequence[ToolLike] | None, settings: ToolSettings) -> Toolbox:
    if tools is None:
        tools = task.tools(settings) if callable(task.tools) else task.tools
    if settings.record is not None or settings.replay is not None:
        tools = [ReplayTool(as_tool(tool), record=settings.record, replay=settings.replay) for tool in tools]
    return Toolbox(tools, timeout_s=settings.timeout_s, retries=settings.retries)


def _read_index(options: Mapping[str, Any], size: int) -> int | None:
    unknown = set(options) - {"index"}
    if unknown:
        raise UserError(f"reset has no option {sorted(unknown)[0]!r}; there is 'index'")
    index = int(options["index"])
    if not 0 <= index < size:
        raise UserError(f"reset: index {index} is outside the {size} examples")
    return index
