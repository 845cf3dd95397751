"""Step many episodes together: the tool requests of one step go out as one batched call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from sorl_env.env import ToolUseEnv, read_index_option
from sorl_env.episode_tools import call_each, draw_tool_seeds
from sorl_env.errors import UserError
from sorl_env.step import EPISODE_INFO, TURN_INFO, TurnRow
from sorl_env.task import Limits, Task, ToolSettings
from sorl_env.tool import ToolLike
from sorl_env.turn_format import FormatName

_VectorStep = tuple[tuple[str, ...], NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]
_DTYPES: Mapping[str, Any] = {"index": np.int64, "turn": np.int64, "is_sample": np.bool_}  # others: object
_NO_ROWS: Sequence[Sequence[Any]] = ((),) * (4 + len(TURN_INFO))


class ToolUseVectorEnv(VectorEnv[tuple[str, ...], Sequence[str], NDArray[Any]]):
    """``num_envs`` episodes of one task, stepped together; they share examples and tools.

    Observations are a tuple of strings, actions a sequence of strings. ``info`` holds arrays of shape (num_envs,) with
    masks, as in Gymnasium's own vector environments. One random generator draws the examples of all environments.

    Args:
        autoreset_mode: ``NEXT_STEP``, Gymnasium's default: the step after an episode's end ignores the action and
            resets. ``SAME_STEP``: an episode's end resets at once; its last observation and info are in
            ``info["final_obs"]`` and ``info["final_info"]``.

    Other arguments: see ``ToolUseEnv``.
    """

    envs: tuple[ToolUseEnv, ...] = ()  # for Gymnasium, which calls close() even if the constructor raises

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
        format: FormatName = "tags",
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
            format=format,
        )
        self.envs = (first, *(first.spawn() for _ in range(num_envs - 1)))
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
        self._toolbox = first.toolbox
        self._everyone = list(range(num_envs))
        self._ended = [False] * num_envs  # NEXT_STEP: these are reset by the coming step

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Start an episode in every environment, on uniformly drawn examples or on ``options={"index": i}``.

        The index is one number for all environments, or a sequence with one for each.
        """
        super().reset(seed=seed)
        examples = self._read_indices(options) if options else self._draw(self.num_envs)
        observations = [""] * self.num_envs
        infos: dict[str, Any] = {}
        self._ended = [False] * self.num_envs
        self._begin(self._everyone, examples, observations, infos)
        return tuple(observations), infos

    def step(self, actions: Sequence[str]) -> _VectorStep:
        """One turn of every episode; all tool requests go out together."""
        size = self.num_envs
        if len(actions) != size:
            raise UserError(f"{len(actions)} actions for {size} environments")
        begun = [index for index, over in enumerate(self._ended) if over]
        running = [index for index, over in enumerate(self._ended) if not over] if begun else self._everyone
        rows = self._take_turns(running, actions)
        replies, rewards, terminated, truncated, *columns = zip(*rows, strict=True) if rows else _NO_ROWS
        observations = [""] * size
        _place(replies, running, observations)
        ends = [_array(flags, np.bool_, running, size) for flags in (terminated, truncated)]
        self._ended = (ends[0] | ends[1]).tolist()
        infos: dict[str, Any] = {}
        if self.autoreset_mode is AutoresetMode.SAME_STEP and any(self._ended):
            begun = self._set_final(rows, observations, infos)
        else:
            _stack(infos, TURN_INFO, columns, running, size)
        if begun:
            self._begin(begun, self._draw(len(begun)), observations, infos)
        return tuple(observations), _array(rewards, np.float64, running, size), ends[0], ends[1], infos

    def _take_turns(self, running: Sequence[int], actions: Sequence[str]) -> list[TurnRow]:
        """Play one turn of the running episodes; returns their rows."""
        envs = [self.envs[index] for index in running]
        requests = [env.begin_turn(actions[index]) for env, index in zip(envs, running, strict=True)]
        if self._toolbox.stateful:
            pairs = [
                (env.toolbox, request) for env, each in zip(envs, requests, strict=True) for request in each
            ]
            calls = iter(call_each(pairs))
        else:
            calls = iter(self._toolbox.call_batch([request for each in requests for request in each]))
        return [
            env.finish_turn_row((next(calls),) if each else ())
            for env, each in zip(envs, requests, strict=True)
        ]

    def _set_final(
        self, rows: Sequence[TurnRow], observations: Sequence[str], infos: dict[str, Any]
    ) -> list[int]:
        """SAME_STEP: make the last observations and infos of ended episodes ``final_*``; returns their indices."""
        size = self.num_envs
        ended = [index for index, over in enumerate(self._ended) if over]
        running = [index for index, over in enumerate(self._ended) if not over]
        infos["final_obs"] = _array([observations[index] for index in ended], object, ended, size)
        infos["final_info"] = {}
        infos["_final_obs"] = infos["_final_info"] = _mask(ended, size)
        for stacked, indices in ((infos["final_info"], ended), (infos, running)):
            columns = list(zip(*(rows[index] for index in indices), strict=True)) if indices else _NO_ROWS
            _stack(stacked, TURN_INFO, columns[4:], indices, size)
        self._ended = [False] * size
        return ended

    def _begin(
        self, which: Sequence[int], examples: Sequence[int], observations: list[str], infos: dict[str, Any]
    ) -> None:
        """Begin episodes in the environments ``which``, on the examples of these numbers."""
        seeds = draw_tool_seeds(self._toolbox, self.np_random, len(which))
        begun = zip(which, examples, seeds, strict=True)
        rows = [self.envs[i].begin_episode_row(example, seed) for i, example, seed in begun]
        prompts, *columns = zip(*rows, strict=True)
        _place(prompts, which, observations)
        _stack(infos, EPISODE_INFO, columns, which, self.num_envs)

    def _draw(self, count: int) -> list[int]:
        """Uniformly drawn examples for ``count`` new episodes."""
        return (self.np_random.random(count) * len(self.envs[0].examples)).astype(int).tolist()

    def _read_indices(self, options: Mapping[str, Any]) -> list[int]:
        given = options.get("index")
        each = list(given) if isinstance(given, Sequence) else [given] * self.num_envs
        if len(each) != self.num_envs:
            raise UserError(f"reset: {len(each)} indices for {self.num_envs} environments")
        size = len(self.envs[0].examples)
        return [read_index_option({**options, "index": index}, size) for index in each]

    def render(self) -> tuple[str | None, ...] | None:  # type: ignore[override]
        """The dialogues, one string per environment."""
        return None if self.render_mode is None else tuple(env.render() for env in self.envs)

    def close_extras(self) -> None:
        """Close the tools that were built for these environments."""
        for env in self.envs:
            env.close()


def _place(values: Sequence[str], indices: Sequence[int], into: list[str]) -> None:
    if len(values) == len(into):
        into[:] = values
    else:
        for index, value in zip(indices, values, strict=True):
            into[index] = value


def _stack(
    stacked: dict[str, Any], keys: Sequence[str], columns: Sequence[Any], indices: Sequence[int], size: int
) -> None:
    """Add columns of some environments as ``{key: (size,) array, _key: (size,) mask}``, as Gymnasium's infos are."""
    if not indices:
        return
    mask = _mask(indices, size)
    for key, column in zip(keys, columns, strict=True):
        if key == "reward_items":
            stacked[key] = _stack_items(column, indices, size)
        elif key in stacked:
            stacked[key][indices] = np.fromiter(column, stacked[key].dtype, len(column))
        else:
            stacked[key] = _array(column, _DTYPES.get(key, object), indices, size)
        stacked[f"_{key}"] = stacked[f"_{key}"] | mask if f"_{key}" in stacked else mask


def _stack_items(column: Sequence[Mapping[str, float]], indices: Sequence[int], size: int) -> dict[str, Any]:
    stacked: dict[str, Any] = {}
    for name in dict.fromkeys(name for items in column for name in items):
        stacked[name] = _array([items.get(name, 0.0) for items in column], np.float64, indices, size)
        having = [index for index, items in zip(indices, column, strict=True) if name in items]
        stacked[f"_{name}"] = _mask(having, size)
    return stacked


def _array(values: Sequence[Any], dtype: Any, indices: Sequence[int], size: int) -> NDArray[Any]:
    """An array of ``size`` with the values at their indices; elsewhere 0, or None among objects."""
    array = np.fromiter(values, dtype, len(values))  # np.array would make arrays of lists among the objects
    if len(values) == size:
        return array
    whole = np.full(size, None if dtype is object else 0, dtype)
    whole[indices] = array
    return whole


def _mask(indices: Sequence[int], size: int) -> NDArray[np.bool_]:
    if len(indices) == size:
        return np.ones(size, dtype=np.bool_)
    mask = np.zeros(size, dtype=np.bool_)
    mask[indices] = True
    return mask
