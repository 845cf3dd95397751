"""The environment: one ``step`` is one turn of the policy, as text."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded

from sorl_env.envs.equip import equip
from sorl_env.envs.step import EpisodeClock, StepResult, TurnInfo, UnicodeText
from sorl_env.errors import UserError
from sorl_env.outside import ask_for_items, ask_for_prompt
from sorl_env.task.data import ExampleSet, load_examples
from sorl_env.task.registry import load_task
from sorl_env.task.task import Example, Limits, Task, ToolSettings
from sorl_env.text import valid_text
from sorl_env.tool.tool import ToolCall, ToolLike, ToolOutcome, ToolRequest, ToolUnavailableError
from sorl_env.tool.toolbox import Toolbox
from sorl_env.trajectory.trajectory import StopReason
from sorl_env.turns.format import FormatName, TurnFormat, find_format
from sorl_env.turns.tags import FormatError, ParsedTurn

logger = logging.getLogger(__name__)

# An episode's phase is the call that must come next. Plain strings: comparing enum members costs a tenth of a step.
_RESET = "reset()"
_BEGIN_TURN = "step() or begin_turn()"
_FINISH_TURN = "finish_turn()"


class ToolUseEnv(gymnasium.Env[str, str]):
    """A language-model agent answers a question and may use tools before it does.

    The observation of ``reset`` is the prompt. That of ``step`` is the environment's reply, to be appended to the
    dialogue: an ``<information>`` block (in format ``tool_calls`` a message's text) with the tool's reply, or with a
    fixed correction after a malformed turn. It is empty after the last turn. ``terminated``: the policy answered.
    ``truncated``: a budget ran out, or a tool failed.

    ``info`` of a step: see ``StepResult``. ``info`` of reset: ``example_id``, ``index``, ``question``, ``tools``,
    ``source``, ``split``, ``is_sample``.

    Args:
        task: a task, or a reference that ``load_task`` takes.
        data, split: where the examples come from, see ``load_examples``.
        tools: replace the tools of the task.
        tool_settings: what the task builds its tools from, such as ``ToolSettings(corpus="passages.jsonl.gz")``.
        limits: replace the limits of the task.
        knobs: keyword arguments for a task that is built by a function.
        format: how turns are written, see ``turns.format``.

    ``step`` is ``begin_turn``, then the tool calls, then ``finish_turn``. Asynchronous rollouts use the two halves, and
    wait for the tools of many episodes at the same time in between.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  as Gymnasium declares it

    def __init__(
        self,
        task: Task | str,
        *,
        data: str | None = None,
        split: str = "train",
        tools: Sequence[ToolLike] | None = None,
        tool_settings: ToolSettings = ToolSettings(),
        limits: Limits | None = None,
        knobs: Mapping[str, Any] | None = None,
        format: FormatName = "tags",
    ) -> None:
        self.task = load_task(task, **(knobs or {})) if isinstance(task, str) else task
        if self.task.environment is not None:
            raise UserError(f"{self.task.name} has an environment of its own: open it with sorl_env.open_env")
        self.limits = limits or self.task.limits
        self.format: TurnFormat = find_format(format)
        self.examples: ExampleSet = load_examples(self.task, data, split)
        equipped = equip(self.task, tools, tool_settings, self.limits.reply_chars)
        self.task, self._shared_tools, self._owned_tools = equipped
        searched = any(getattr(tool, "is_sample", False) for tool in self._shared_tools.tools)
        if searched and not self.examples.is_sample:
            logger.warning(
                "task %s asks questions of %s, but searches only its embedded sample of passages: give the corpus or "
                "search_url of tool_settings",
                self.task.name,
                self.examples.source,
            )
        self.action_space = UnicodeText()
        self.observation_space = UnicodeText()
        self._start(self.examples.examples[0])

    def _start(self, example: Example) -> None:
        """State before the first turn on an example."""
        self._phase = _RESET
        self._toolbox = self._shared_tools
        self.example = example  # of the running episode, or else of the last one
        self._clock = EpisodeClock()
        self._turns: list[ParsedTurn] = []
        self._calls: list[ToolCall] = []
        self._items: dict[str, float] = {}

    @property
    def toolbox(self) -> Toolbox:
        """The tools of the running episode; between episodes, those that all environments of the task share."""
        return self._toolbox

    @toolbox.setter
    def toolbox(self, shared: Toolbox) -> None:
        """End the episode, and call these tools from now on."""
        self.end_episode()
        self._toolbox = self._shared_tools = shared

    def spawn(self) -> ToolUseEnv:
        """Make another environment with the same task, examples, tools and spaces, and no episode. It is cheap."""
        env = copy.copy(self)
        env._np_random = env._np_random_seed = None
        env._owned_tools = frozenset()
        env._start(self.examples.examples[0])
        return env

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode on a uniformly drawn example, or on ``options={"index": i}``."""
        super().reset(seed=seed)
        size = len(self.examples.examples)
        index = _read_index(options, size) if options else int(self.np_random.random() * size)
        tool_seed = int(self.np_random.integers(2**31)) if self._shared_tools.stateful else 0
        return self.begin_episode(index, tool_seed)

    def begin_episode(self, index: int, tool_seed: int = 0) -> tuple[str, dict[str, Any]]:
        """Start an episode on example ``index``. Nothing is drawn at random; ``tool_seed`` seeds stateful tools."""
        self.end_episode()
        examples = self.examples
        example = examples.examples[index]
        self._start(example)
        if self._shared_tools.stateful:
            self._toolbox = self._shared_tools.for_episode(example, tool_seed)
        self._phase = _BEGIN_TURN
        info = {
            "example_id": example.id,
            "index": index,
            "question": example.question,
            "tools": self._toolbox.names,
            "source": examples.source,
            "split": examples.split,
            "is_sample": examples.is_sample,
        }
        return self.prompt(example), info

    def prompt(self, example: Example) -> str:
        """The text of the first user message; in format ``tool_calls`` the task's ``tool_call_prompt`` if it has one.

        Raises:
            UserError: the format is ``tool_calls``, and the task has only a prompt that asks for tags.
        """
        task, is_calls = self.task, self.format.name == "tool_calls"
        if is_calls and task.tool_call_prompt is not None:
            return ask_for_prompt(task.name, task.tool_call_prompt, example)
        text = ask_for_prompt(task.name, task.prompt, example)
        if is_calls and "<answer>" in text.replace(example.question, ""):
            raise UserError(
                f"the prompt of task {task.name} asks for <answer> tags, which format tool_calls does not read: give "
                "the task a tool_call_prompt, or use format tags"
            )
        return text

    def _ask(self, reward: Callable[..., Any]) -> dict[str, float]:
        return ask_for_items(self.task.name, reward, self.example, self._turns)

    def step(self, action: str) -> StepResult:
        """One turn of the policy: parse it, call its tool, reply."""
        calls = [self._toolbox.call(request) for request in self.begin_turn(action)]
        return self.finish_turn(calls).for_gymnasium(self.example.id)

    def play_turn(self, action: str) -> TurnInfo:
        """As ``step``, with a typed result."""
        return self.finish_turn([self._toolbox.call(request) for request in self.begin_turn(action)])

    def begin_turn(self, action: str, cut: bool = False) -> list[ToolRequest]:
        """Take the policy's turn; returns the tool requests (one or none) to serve before ``finish_turn``. If the token
        limit ``cut`` it, a message without a call is not the answer, but malformed.

        Raises:
            ResetNeeded: no episode is running, or the last turn is not finished.
        """
        if self._phase != _BEGIN_TURN:
            raise ResetNeeded(f"call {self._phase} first")
        action = valid_text(action)
        parsed = self.format.parse(action, self._toolbox, self.task.require_think)
        if cut and parsed.kind == "answer" and self.format.name == "tool_calls":
            parsed = ParsedTurn("invalid", "", None, "", FormatError.UNCLOSED, "the message was cut")
        self._turns.append(parsed)
        self._phase = _FINISH_TURN
        if parsed.tool is None or len(self._turns) >= self.limits.max_turns:
            return []
        self._clock.ask()
        return [ToolRequest(parsed.tool, parsed.content)]

    def finish_turn(self, calls: Sequence[ToolOutcome]) -> TurnInfo:
        """Reply to the turn, given the outcomes of its requests in their order."""
        if self._phase != _FINISH_TURN:
            raise ResetNeeded(f"call {self._phase} first")
        if calls:
            self._clock.answered()
        self._calls = []
        self._items = {}
        observation = self.format.invalid_observation
        for outcome in calls:
            if isinstance(outcome, ToolUnavailableError):
                self._calls = [] if outcome.call is None else [outcome.call]
                return self._end(StopReason.ERROR, error=str(outcome))
            self._calls = [outcome]
            observation = self.format.observation(outcome.reply)
        if self.task.turn_reward is not None:
            self._items = self._ask(self.task.turn_reward)
        if self._turns[-1].kind == "answer":
            return self._end(StopReason.ANSWER)
        if ending := self._clock.ending(self._turns, self.limits):
            return self._end(*ending)
        self._phase = _BEGIN_TURN
        return TurnInfo(observation, self._turns[-1], len(self._turns) - 1, self._items, self._calls)

    def truncate(self, reason: StopReason | str, error: str | None = None) -> TurnInfo:
        """End the running episode from outside: a token budget ran out, or the rollout was aborted.

        The result replaces that of the last turn, and repeats the reward items of that turn.
        """
        if self._phase == _RESET:
            raise ResetNeeded(f"call {self._phase} first")
        if self._phase == _FINISH_TURN:
            self._calls = []
            self._items = {}
        return self._end(StopReason(reason), error)

    def _end(self, reason: StopReason, error: str | None = None) -> TurnInfo:
        items: dict[str, float] = {}
        if not reason.excluded:
            items = self._ask(self.task.reward)
            if self._items:  # reward items of the last turn
                names = {**self._items, **items}
                items = {name: items.get(name, 0.0) + self._items.get(name, 0.0) for name in names}
        self._phase = _RESET
        self.end_episode()
        parsed = self._turns[-1] if self._turns else None
        return TurnInfo("", parsed, len(self._turns) - 1, items, self._calls, reason, error)

    # -- the protocol ``TextEnv``, which rollouts use --------------------------------------------------------------

    @property
    def stop(self) -> tuple[str, ...]:
        """The closing tags that end a turn of the policy."""
        return tuple(f"</{tag}>" for tag in (*self._toolbox.names, "answer"))

    async def areset(self, index: int, seed: int) -> str:
        """As ``reset(seed=seed, options={"index": index})``; returns the prompt."""
        return self.reset(seed=seed, options={"index": index})[0]

    async def astep(self, action: str, cut: bool = False) -> TurnInfo:
        """As ``play_turn``, but waits for tools without blocking the event loop. For ``cut`` see ``begin_turn``."""
        calls = await asyncio.gather(
            *(self._toolbox.acall(request) for request in self.begin_turn(action, cut))
        )
        return self.finish_turn(calls)

    async def atruncate(self, reason: StopReason, error: str | None = None) -> TurnInfo:
        """As ``truncate``."""
        return self.truncate(reason, error)

    def end_episode(self) -> None:
        """Close the tools that belong to the running episode alone; call it when the episode is given up."""
        if self._toolbox is not self._shared_tools:
            ended, self._toolbox = self._toolbox, self._shared_tools
            ended.close(only=ended.stateful)

    def close(self) -> None:
        """Close the tools that this environment built; tools that were passed in may have other users."""
        self.end_episode()
        if self._owned_tools:
            self._toolbox.close(only=self._owned_tools)


def _read_index(options: Mapping[str, Any], size: int) -> int:
    """The number of the example that ``reset(options={"index": i})`` asks for."""
    if other := [name for name in options if name != "index"]:
        raise UserError(f"reset has no option {other[0]!r}; its only option is 'index'")
    index = options["index"]
    if not isinstance(index, (int, np.integer)) or not 0 <= index < size:
        raise UserError(f"reset: index {index!r} is outside the {size} examples, 0 to {size - 1}")
    return int(index)
