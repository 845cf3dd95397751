"""Metrics of a run's searches: pure functions of the records of its tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from sorl_env.rewards import normalize_answer
from sorl_env.task import Example
from sorl_env.tool import ToolCall

_ANYWHERE = {"yes", "no", "maybe"}


def search_metrics(trajectories: Sequence[tuple[Sequence[ToolCall], Sequence[str]]]) -> dict[str, float]:
    """The ``tool/`` metrics of a step's searches; empty if there were none.

    - ``tool/duplicate_query_rate``: share of calls whose query was asked before in this step, by any trajectory; case
      and white space do not count.
    - ``tool/answer_in_top_k``: of the trajectories that have golden answers and searched, the share that found one.

    Args:
        trajectories: for each trajectory, the calls of one search tool and the answers to look for
            (``findable_answers``).

    >>> found = ToolCall("search", "who composed Carmen?", "Doc 1 (Carmen): by Georges Bizet.")
    >>> search_metrics([([found], ["Bizet"]), ([found], ["Verdi"])])["tool/answer_in_top_k"]
    0.5
    """
    calls = [call for calls, _ in trajectories for call in calls]
    if not calls:
        return {}
    different = {" ".join(call.argument.split()).lower() for call in calls}
    metrics = {"tool/duplicate_query_rate": 1.0 - len(different) / len(calls)}
    found = [holds_answer(calls, golden) for calls, golden in trajectories if calls and golden]
    if found:
        metrics["tool/answer_in_top_k"] = sum(found) / len(found)
    return metrics


def findable_answers(example: Example) -> tuple[str, ...]:
    """The golden answers as texts to look for in passages; for multiple choice, the texts of the right options.

    Yes, no and maybe are left out, because they occur in many texts that do not answer the question.
    """
    options = example.options or {}
    texts = (options.get(answer, answer) for answer in example.golden_answers)
    return tuple(text for text in texts if normalize_answer(text) not in _ANYWHERE)


def holds_answer(calls: Sequence[ToolCall], golden_answers: Sequence[str]) -> bool:
    """Whether retrieved text contains a golden answer as whole words, both normalized as for exact match."""
    answers = [f" {normalize_answer(answer)} " for answer in golden_answers]
    texts = [f" {normalize_answer(call.reply)} " for call in calls if call.ok]
    return any(answer.strip() and answer in text for answer in answers for text in texts)
