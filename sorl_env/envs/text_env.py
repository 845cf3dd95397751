"""What a rollout needs of an environment, whoever wrote it: text in, text and a reward out."""

from __future__ import annotations

from typing import Protocol

from sorl_env.envs.step import TurnInfo
from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.task.data import ExampleSet, load_examples
from sorl_env.task.task import Example, Limits, Task, ToolSettings
from sorl_env.trajectory.trajectory import StopReason
from sorl_env.turns.format import FormatName


class TextEnv(Protocol):
    """A text environment, as rollouts and evaluations use it. ``ToolUseEnv`` and ``SessionEnv`` are the two kinds.

    Its coroutines wait for tools or for a server while other episodes go on. An exception of ``astep`` or ``atruncate``
    ends its own trajectory only.

    Attributes:
        task: its name, its system prompt, and what else its author declares.
        limits: budgets of a trajectory. The environment enforces turns and seconds, the rollout enforces tokens.
        examples: what episodes can be about, and where that comes from.
        example: that of the running episode, or else of the last one.
        stop: strings that end a turn of the policy.
    """

    task: Task
    limits: Limits
    examples: ExampleSet
    example: Example

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end a turn of the policy."""

    def spawn(self) -> TextEnv:
        """Another environment with the same task and examples, and no episode; cheap."""

    async def areset(self, index: int, seed: int) -> str:
        """Start an episode on example ``index``; returns the prompt. Raises ``ToolUnavailableError`` if it cannot."""

    async def astep(self, action: str, cut: bool = False) -> TurnInfo:
        """One turn of the policy; ``cut`` if the token limit ended it, and not the policy."""

    async def atruncate(self, reason: StopReason, error: str | None = None) -> TurnInfo:
        """End the running episode from outside. The result replaces that of the last turn."""

    def end_episode(self) -> None:
        """Give up the running episode, if there is one, and free what it holds."""

    def close(self) -> None:
        """Free what all episodes share."""


def open_env(
    task: Task,
    *,
    data: str | None = None,
    split: str = "train",
    tool_settings: ToolSettings = ToolSettings(),
    limits: Limits | None = None,
    format: FormatName = "tags",
) -> TextEnv:
    """The environment of a task: the one that its author declares, or else ``ToolUseEnv``.

    Args:
        data, split: see ``load_examples``.
        format: how turns are written, see ``turns.format``.

    Raises:
        UserError: the examples do not exist, or a setting does not apply to this task.
    """
    if task.environment is None:
        return ToolUseEnv(
            task, data=data, split=split, tool_settings=tool_settings, limits=limits, format=format
        )
    if format != "tags":
        raise UserError(f"task {task.name} reads the policy's text itself: leave format={format} out")
    if data is not None:
        raise UserError(f"task {task.name} brings its own episodes: leave data={data} out")
    for name in ("corpus", "search_url", "tools"):
        if value := getattr(tool_settings, name):
            raise UserError(f"task {task.name} brings its own tools: leave {name}={value} out")
    made: TextEnv = task.environment(task, load_examples(task, None, split), limits or task.limits)
    return made


def require_tool_env(env: TextEnv, what: str) -> ToolUseEnv:
    """``env``, if it is the dialogue with tools that ``what`` needs; raises ``UserError`` for one of another kind."""
    if isinstance(env, ToolUseEnv):
        return env
    raise UserError(
        f"{what} needs a task with tools of its own, but {env.task.name} is an environment from elsewhere, which "
        "plays its episodes itself: choose another task"
    )


def format_of(env: TextEnv) -> str:
    """The name of the environment's turn format; those from elsewhere take plain text, as ``tags`` does."""
    return env.format.name if isinstance(env, ToolUseEnv) else "tags"
