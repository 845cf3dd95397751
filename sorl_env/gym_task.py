"""``gym:ID``: any Gymnasium environment whose observations and actions are text, as a task."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.spaces import Text

from sorl_env.data import ExampleSet
from sorl_env.errors import UserError, did_you_mean
from sorl_env.outside import Threads
from sorl_env.session_env import (
    INSTRUCTION,
    Format,
    Reply,
    SessionEnv,
    check_settings,
    seeded_examples,
    session_task,
)
from sorl_env.spaces import UnicodeText
from sorl_env.task import Example, Limits, Task
from sorl_env.task_file import import_file, import_module, mark_user_module
from sorl_env.tool import ToolInputError, ToolUnavailableError
from sorl_env.trajectory import StopReason

logger = logging.getLogger(__name__)

PREFIX = "gym:"
_HELP = "see docs/interop.md"

TextGym = gymnasium.Env[str, str]


def gym_task(
    env_id: str,
    *,
    wrapper: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    format: Format = "action",
    stop: Sequence[str] = (),
    instruction: str | None = None,
    examples: int = 1000,
    max_turns: int = 8,
    timeout_s: float = 60.0,
) -> Task:
    """The task that a Gymnasium environment is.

    Args:
        env_id: a registered id; ``package.module:ID`` imports the module first.
        wrapper: ``file.py:Name`` or ``package.module:Name`` of a function, or a subclass of ``gymnasium.Wrapper``, that
            takes the environment and returns one whose two spaces are ``Text``: it says how a text becomes an action,
            and what of an observation the policy reads.
        kwargs: keyword arguments for ``gymnasium.make``.
        format, stop, instruction: see ``SessionEnv``; the default of ``instruction`` explains the format ``action``.
        examples: number of episodes in each split. An episode is a seed, and no two splits share one.
        timeout_s: seconds for one reset or step; then the environment counts as unavailable.

    Raises:
        UserError: there is no such environment or wrapper, or its spaces are not text.
    """
    check_settings(format, examples, timeout_s=timeout_s)
    wrap = None if wrapper is None else _find_wrapper(wrapper)
    pool = _Pool(_maker(env_id, wrap, dict(kwargs or {})), timeout_s)
    if instruction is None:
        instruction = INSTRUCTION if format == "action" else ""

    def environment(task: Task, given: ExampleSet, limits: Limits) -> SessionEnv:
        return SessionEnv(
            task,
            given,
            limits,
            lambda: _GymSession(pool),
            format=format,
            stop=tuple(stop),
            instruction=instruction,
            on_close=pool.close,
        )

    about = f"the Gymnasium environment {env_id}"
    return session_task(
        f"{PREFIX}{env_id}",
        Limits(max_turns=max_turns),
        about,
        environment=environment,
        embedded=lambda split: seeded_examples(f"{PREFIX}{env_id}", split, examples),
    )


def _maker(env_id: str, wrap: Callable[[Any], Any] | None, kwargs: dict[str, Any]) -> Callable[[], TextGym]:
    def make() -> TextGym:
        try:
            env = gymnasium.make(env_id, **kwargs)
        except (gymnasium.error.Error, ModuleNotFoundError, TypeError) as error:
            raise UserError(
                f"{PREFIX}{env_id}: {error}. Give a registered id ({PREFIX}package.module:ID imports the module that "
                f"registers it), install the package that it comes from, or correct task_args.kwargs={kwargs}"
            ) from error
        return _check_spaces(env_id, env if wrap is None else wrap(env), wrapped=wrap is not None)

    return make


def _check_spaces(env_id: str, env: Any, *, wrapped: bool) -> TextGym:
    if not isinstance(env, gymnasium.Env):
        raise UserError(f"{PREFIX}{env_id}: the wrapper returned a {type(env).__name__}, not a gymnasium.Env")
    wrong = [
        f"its {what} space is {space}"
        for what, space in (("observation", env.observation_space), ("action", env.action_space))
        if not isinstance(space, Text)
    ]
    if wrong:
        env.close()
        advice = "correct the wrapper" if wrapped else "give a wrapper with --task_args.wrapper file.py:Name"
        raise UserError(
            f"{PREFIX}{env_id}: {' and '.join(wrong)}; a policy reads and writes text, so both must be "
            f"gymnasium.spaces.Text (or sorl_env.UnicodeText): {advice}, {_HELP}"
        )
    checked: TextGym = env
    return checked


def _find_wrapper(reference: str) -> Callable[[Any], Any]:
    location, _, name = reference.rpartition(":")
    if not location or not name:
        raise UserError(f"task_args.wrapper={reference}: write file.py:Name or package.module:Name")
    if location.endswith(".py"):
        module = import_file(Path(location).expanduser())
    else:
        module = import_module(location, f"task_args.wrapper={reference}")
    mark_user_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        names = [known for known, value in vars(module).items() if callable(value)]
        raise UserError(f"task_args.wrapper={reference}: no {name} there. {did_you_mean(name, names)}")
    wrap: Callable[[Any], Any] = found
    return wrap


class _Pool:
    """Environments that no episode uses now: making one may take long, and a reset is enough to use it again."""

    def __init__(self, make: Callable[[], TextGym], timeout_s: float) -> None:
        self.make = make
        self.timeout_s = timeout_s
        self.threads = Threads()
        self.idle = [make()]  # a wrong id or wrong spaces are refused here

    def close(self) -> None:
        while self.idle:
            self.idle.pop().close()


class _GymSession:
    """One environment, for one episode. Its calls run in threads, which are abandoned at the deadline."""

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool
        self._env: TextGym | None = None

    async def reset(self, example: Example, seed: int) -> tuple[str, Example]:
        """The seed of the example starts the episode, so that the rollouts of a group start alike."""

        def begin(seed: int) -> Any:
            self._env = env = self._pool.idle.pop() if self._pool.idle else self._pool.make()
            return env.reset(seed=seed)

        text, _ = await self._call("reset", begin, int(example.metadata["seed"]))
        return self._text(text, "reset"), example

    async def step(self, action: str) -> Reply:
        assert self._env is not None
        space = self._env.action_space
        # UnicodeText takes every text; others say which characters and how many of them they take
        if not isinstance(space, UnicodeText) and action not in space:
            raise ToolInputError(f"This action is not possible here: it must be in {space}"[:300])
        text, reward, terminated, truncated, _ = await self._call("step", self._env.step, action)
        try:
            value = float(reward)
        except (TypeError, ValueError) as error:
            raise self._broken(f"step gave the reward {reward!r}") from error
        return Reply(self._text(text, "step"), value, bool(terminated), bool(truncated))

    async def _call(self, what: str, function: Callable[[Any], Any], argument: Any) -> Any:
        timeout_s = self._pool.timeout_s
        try:
            return await self._pool.threads.acall(function, argument, timeout_s)
        except TimeoutError as error:
            self._pool.threads.check("the Gymnasium environment", timeout_s)
            raise self._broken(f"{what} took more than {timeout_s:g} s (task_args.timeout_s)") from error
        except Exception as error:
            logger.exception("the environment raised in %s", what)
            raise self._broken(f"{what} raised {type(error).__name__}: {error}"[:1000]) from error

    def _text(self, value: Any, what: str) -> str:
        if not isinstance(value, str):
            kind = type(value).__name__
            raise self._broken(f"{what} gave an observation of type {kind}, although its space is Text")
        return value

    def _broken(self, why: str) -> ToolUnavailableError:
        self._env = None  # never used again; closing it might hang as well
        return ToolUnavailableError(f"the Gymnasium environment is unavailable: {why}")

    async def truncate(self, reason: StopReason) -> None:
        """A Gymnasium environment gives no reward for an episode that is cut off."""

    def close(self, *, ended: bool) -> None:
        """Give the environment back; its next reset ends an episode that was given up."""
        if self._env is not None:
            self._pool.idle.append(self._env)
            self._env = None
