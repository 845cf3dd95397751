"""``reasoning_gym:NAME``: the generated, verifiable tasks of the package reasoning-gym, each of one turn."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sorl_env.errors import MOST, Bounds, UserError, did_you_mean, install_command
from sorl_env.task import Example, Limits, Task
from sorl_env.turns.tags import ParsedTurn

_PREFIX = "reasoning_gym:"
_PROMPT = (
    "Answer the given question. Reason first inside <think> and </think>, then provide your answer inside <answer> and "
    "</answer>, for example <answer> 42 </answer>.\n\nQuestion: {question}\n"
)
_SPLITS = ("train", "validation", "test")
_LARGEST = 10_000_000  # questions of a split


def reasoning_gym_task(
    name: str, *, examples: int = 1000, seed: int = 0, settings: Mapping[str, Any] | None = None
) -> Task:
    """The task of a data set of reasoning-gym. The reward of an answer is the data set's own score, often 0 or 1 and
    sometimes a part of it. ``name`` is that of the data set, such as ``chain_sum``; each split has ``examples``
    questions and seeds of its own; ``settings`` is the data set's own configuration, such as ``{"min_terms": 2}``.
    Raises ``UserError`` if reasoning-gym is not installed, or has no such data set or setting."""
    for what, value, bounds in (("examples", examples, Bounds(1, _LARGEST)), ("seed", seed, Bounds(0, MOST))):
        if problem := bounds.problem(value):
            raise UserError(f"{what} {problem}")
    create = _factory(name, dict(settings or {}))
    create(size=1, seed=seed)  # a wrong setting is refused here

    @functools.lru_cache(maxsize=len(_SPLITS))
    def dataset(split: str) -> Any:
        if split not in _SPLITS:
            raise UserError(f"{_PREFIX}{name} has no split {split!r}. {did_you_mean(split, _SPLITS)}")
        return create(size=examples, seed=seed + 2**31 * (1 + _SPLITS.index(split)))

    def questions(split: str) -> Sequence[Example]:
        return tuple(_example(split, index, entry) for index, entry in enumerate(dataset(split)))

    def reward(example: Example, turns: Sequence[ParsedTurn]) -> Mapping[str, float]:
        if not turns or turns[-1].kind != "answer":
            return {"score": 0.0}
        data = dataset(example.metadata["split"])
        score = float(data.score_answer(turns[-1].content, data[example.metadata["index"]]))
        if not math.isfinite(score):
            raise ValueError(f"reasoning-gym scored {score} for example {example.id}")
        return {"score": score}

    return Task(
        name=f"{_PREFIX}{name}",
        prompt=lambda example: _PROMPT.format(question=example.question),
        reward=reward,
        parse_row=_no_rows,
        embedded=questions,
        limits=Limits(max_turns=1),
        description=f"{name} of reasoning-gym",
    )


def _factory(name: str, settings: dict[str, Any]) -> Callable[..., Any]:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ModuleNotFoundError as error:
        raise UserError(
            f"{_PREFIX}{name} needs the package reasoning-gym ({error}): {install_command('reasoning-gym')}"
        ) from error
    if name not in DATASETS:
        raise UserError(f"reasoning-gym has no data set {name!r}. {did_you_mean(name, DATASETS)}")

    def create(**given: int) -> Any:
        try:
            return create_dataset(name, **{**settings, **given})
        except (TypeError, ValueError, AssertionError) as error:
            raise UserError(f"{_PREFIX}{name}: settings {settings}: {error}") from error

    return create


def _example(split: str, index: int, entry: Mapping[str, Any]) -> Example:
    golds = () if entry["answer"] is None else (str(entry["answer"]),)
    return Example(f"{split}-{index}", entry["question"], golds, metadata={"split": split, "index": index})


def _no_rows(row: Mapping[str, Any]) -> Example:
    raise ValueError("reasoning-gym makes its questions itself: leave --data out")
