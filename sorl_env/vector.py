"""Many episodes at once: the searches of one step go out as one batched call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from sorl_env.env import StepResult, ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.task import Limits, Task, ToolSettings
from sorl_env.tool import ToolLike, ToolRequest
from sorl_env.toolbox import ToolOutcome

_INFO_TYPES = {int: np.int64, float: np.float64, bool: np.bool_}


class ToolUseVectorEnv(VectorEnv[tuple[str, ...], Sequence[str], NDArray[Any]]):
    """``num_envs`` episodes of one task, stepped together; they share examples and tools.

    Observations are a tuple of strings, actions a sequence of strings; ``info`` holds arrays of shape (num_envs,) with
    masks, as Gymnasium's own vector environments do.

    Args:
        autoreset_mode: ``NEXT_STEP``, Gymnasium's default: the step after an episode's end ignores the action and
            resets. ``SAME_STEP``: an episode's end resets at once; its last observation and info are in
            ``info["final_obs"]`` and ``info["final_info"]``.

    Other arguments: see ``ToolUseEnv``.
    """

    def __init__(
        self,
        num_envs: int,
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
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    ) -> None:
        if num_envs < 1:
            raise UserError(f"num_envs must be at least 1, not {num_envs}")
        first = ToolUseEnv(
            task,
            data=data,
            split=split,
            tools=tools,
            tool_settings=tool_settings,
            corpus=corpus,
            search_url=search_url,
            limits=limits,
            knobs=knobs,
            render_mode=render_mode,
        )
        self.envs: tuple[ToolUseEnv, ...] = (first, *(first.spawn() for _ in range(num_envs - 1)))
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        if self.autoreset_mode is AutoresetMode.DISABLED:
            raise UserError("autoreset_mode must be NEXT_STEP or SAME_STEP")
        self.metadata = {**first.metadata, "autoreset_mode": self.autoreset_mode}
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.single_action_space = first.action_space
        self.single_observation_space = first.observation_space
        self.action_space = batch_space(first.action_space, num_envs)
        self.observation_space = batch_space(first.observation_space, num_envs)
        self._ended = [False] * num_envs  # NEXT_STEP: these reset in the coming step

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Reset all episodes; with an int seed, environment i gets ``seed + i``."""
        if seed is None or isinstance(seed, int):
            super().reset(seed=seed)
            seeds: Sequence[int | None] = [None if seed is None else seed + i for i in range(self.num_envs)]
        else:
            seeds = seed
        if len(seeds) != self.num_envs:
            raise UserError(f"{len(seeds)} seeds for {self.num_envs} environments")
        results = [env.reset(seed=one, options=options) for env, one in zip(self.envs, seeds)]
        self._ended = [False] * self.num_envs
        return tuple(obs for obs, _ in results), stack_infos([info for _, info in results])

    def step(
        self, actions: Sequence[str]
    ) -> tuple[tuple[str, ...], NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """One turn of every episode; all of its tool requests go out together."""
        if len(actions) != self.num_envs:
            raise UserError(f"{len(actions)} actions for {self.num_envs} environments")
        ended = self._ended
        requests: list[ToolRequest] = []
        owners: list[int] = []
        for index, env in enumerate(self.envs):
            if not ended[index]:
                for request in env.begin_turn(actions[index]):
                    requests.append(request)
                    owners.append(index)
        calls: list[Sequence[ToolOutcome]] = [()] * self.num_envs
        if requests:
            for owner, outcome in zip(owners, self.envs[0].toolbox.call_batch(requests)):
                calls[owner] = (outcome,)
        results = [
            StepResult(*_as_step(env.reset())) if over else env.finish_turn(outcomes)
            for env, over, outcomes in zip(self.envs, ended, calls)
        ]
        return self._collect(results)

    def _collect(
        self, results: Sequence[StepResult]
    ) -> tuple[tuple[str, ...], NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        observations, rewards, terminated, truncated, infos = zip(*results)
        self._ended = [a or b for a, b in zip(terminated, truncated)]
        stacked: dict[str, Any] = {}
        if self.autoreset_mode is AutoresetMode.SAME_STEP and any(self._ended):
            ended, self._ended = self._ended, [False] * self.num_envs
            final_obs = [obs if over else None for obs, over in zip(observations, ended)]
            final_infos = [info if over else None for info, over in zip(infos, ended)]
            fresh = [env.reset() if over else None for env, over in zip(self.envs, ended)]
            observations = tuple(new[0] if new else obs for new, obs in zip(fresh, observations))
            infos = tuple(new[1] if new else info for new, info in zip(fresh, infos))
            mask = np.fromiter(ended, np.bool_, self.num_envs)
            stacked = {"final_obs": np.fromiter(final_obs, object, self.num_envs), "_final_obs": mask}
            stacked.update({"final_info": stack_infos(final_infos), "_final_info": mask.copy()})
        stacked.update(stack_infos(infos))
        return (
            observations,
            np.array(rewards, dtype=np.float64),
            np.array(terminated, dtype=np.bool_),
            np.array(truncated, dtype=np.bool_),
            stacked,
        )

    def render(self) -> tuple[str | None, ...] | None:  # type: ignore[override]
        """The dialogues, one string an environment."""
        return None if self.render_mode is None else tuple(env.render() for env in self.envs)

    def close_extras(self) -> None:
        self.envs[0].close()


def _as_step(fresh: tuple[str, dict[str, Any]]) -> tuple[str, float, bool, bool, dict[str, Any]]:
    return fresh[0], 0.0, False, False, fresh[1]


def stack_infos(infos: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Infos of single environments as one of arrays: ``{key: (N,) array, _key: (N,) mask}``, nested for mappings.

    What ``VectorEnv._add_info`` builds, but a column at a time, which costs a fraction.
    """
    size = len(infos)
    keys = dict.fromkeys(key for info in infos if info is not None for key in info)
    stacked: dict[str, Any] = {}
    for key in keys:
        column = [None if info is None else info.get(key) for info in infos]
        present = [info is not None and key in info for info in infos]
        values = [value for value, here in zip(column, present) if here]
        kind = type(values[0])
        if kind is dict:
            stacked[key] = stack_infos(column)
        elif kind in _INFO_TYPES and all(type(value) is kind for value in values):
            stacked[key] = np.array([value if here else 0 for value, here in zip(column, present)], _INFO_TYPES[kind])
        else:
            stacked[key] = np.fromiter(column, object, size)
        stacked[f"_{key}"] = np.array(present, dtype=np.bool_)
    return stacked
