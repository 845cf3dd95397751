"""``gym:ID``: any Gymnasium environment whose observations and actions are text, as a task."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.spaces import Text

from sorl_env.bridges.session_env import Format, Reply, check_settings, seeded_examples, session_task
from sorl_env.envs.step import UnicodeText
from sorl_env.errors import UserError, did_you_mean
from sorl_env.outside import Threads
from sorl_env.task.import_file import import_code
from sorl_env.task.task import Example, Limits, Task
from sorl_env.tool.tool import ToolInputError, ToolUnavailableError
from sorl_env.trajectory.trajectory import StopReason

logger = logging.getLogger(__name__)

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
    pool = _Pool(f"gym:{env_id}", lambda: _make(env_id, wrap, dict(kwargs or {})), timeout_s)
    return session_task(
        pool.name,
        f"the Gymnasium environment {env_id}",
        Limits(max_turns=max_turns),
        lambda: _GymSession(pool),
        lambda split: seeded_examples(pool.name, split, examples),
        format=format,
        stop=stop,
        instruction=instruction,
        on_close=pool.close,
    )


def _find_wrapper(reference: str) -> Callable[[Any], Any]:
    wanted_by = f"task_args.wrapper={reference}"
    location, _, name = reference.rpartition(":")
    if not location or not name:
        raise UserError(f"{wanted_by}: write file.py:Name or package.module:Name")
    module = import_code(location, wanted_by)
    found = getattr(module, name, None)
    if not callable(found):
        names = [known for known, value in vars(module).items() if callable(value)]
        raise UserError(f"{wanted_by}: no {name} there. {did_you_mean(name, names)}")
    wrap: Callable[[Any], Any] = found
    return wrap


def _make(env_id: str, wrap: Callable[[Any], Any] | None, kwargs: dict[str, Any]) -> TextGym:
    try:
        env = gymnasium.make(env_id, **kwargs)
    except Exception as error:  # whatever the constructor raises for a wrong argument
        raise UserError(
            f"gym:{env_id}: {type(error).__name__}: {error}. Give a registered id (gym:package.module:ID imports the "
            f"module that registers it), install its package, or correct task_args.kwargs={kwargs}"
        ) from error
    made: Any = env if wrap is None else wrap(env)
    if not isinstance(made, gymnasium.Env):
        raise UserError(f"gym:{env_id}: the wrapper returned a {type(made).__name__}, not a gymnasium.Env")
    spaces = {"observation": made.observation_space, "action": made.action_space}
    wrong = [f"its {what} space is {one}" for what, one in spaces.items() if not isinstance(one, Text)]
    if wrong:
        made.close()
        raise UserError(
            f"gym:{env_id}: {' and '.join(wrong)}; a policy reads and writes text, so both must be "
            "gymnasium.spaces.Text (or sorl_env.UnicodeText): give a wrapper that makes them so, as "
            "--task_args.wrapper file.py:Name, see docs/interop.md"
        )
    return made


class _Pool:
    """Environments that no episode uses now: making one may take long, and a reset is enough to use it again."""

    def __init__(self, name: str, make: Callable[[], TextGym], timeout_s: float) -> None:
        self.name = name
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

        def begin(seed: int) -> str:
            self._env = env = self._pool.idle.pop() if self._pool.idle else self._pool.make()
            return _text(env.reset(seed=seed)[0])

        return await self._call("reset", begin, int(example.metadata["seed"])), example

    async def step(self, action: str) -> Reply:
        assert self._env is not None
        env, space = self._env, self._env.action_space
        # UnicodeText takes every text; others say which characters and how many of them they take
        if not isinstance(space, UnicodeText) and action not in space:
            raise ToolInputError(f"This action is not possible here: it must be in {space}"[:300])

        def act(action: str) -> Reply:
            text, reward, terminated, truncated, _ = env.step(action)
            return Reply(_text(text), float(reward), bool(terminated), bool(truncated))

        reply: Reply = await self._call("step", act, action)
        return reply

    async def _call(self, what: str, function: Callable[[Any], Any], argument: Any) -> Any:
        timeout_s = self._pool.timeout_s
        try:
            return await self._pool.threads.acall(function, argument, timeout_s)
        except TimeoutError:
            self._pool.threads.check("the Gymnasium environment", timeout_s)
            why = f"took more than {timeout_s:g} s (task_args.timeout_s)"
        except Exception as error:
            logger.exception("the environment raised in %s", what)
            why = f"raised {type(error).__name__}: {error}"
        self._env = None  # never used again; closing it might hang as well
        raise ToolUnavailableError(f"the Gymnasium environment is unavailable: {what} {why}"[:1000])

    async def truncate(self, reason: StopReason) -> None:
        """A Gymnasium environment gives no reward for an episode that is cut off."""

    def close(self) -> None:
        """Give the environment back; its next reset ends an episode that was given up."""
        if self._env is not None:
            self._pool.idle.append(self._env)
            self._env = None


def _text(observation: Any) -> str:
    if not isinstance(observation, str):
        raise TypeError(f"an observation of type {type(observation).__name__}, although its space is Text")
    return observation
