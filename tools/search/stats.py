"""What a run's searches say about its searching: pure functions of the records of its calls."""

from __future__ import annotations

from collections.abc import Sequence

from sorl_env.rewards import normalize_answer
from sorl_env.task import Example
from sorl_env.tool import ToolCall

_ANYWHERE = {"yes", "no", "maybe"}


def search_metrics(trajectories: Sequence[tuple[Sequence[ToolCall], Sequence[str]]]) -> dict[str, float]:
    """``tool/`` metrics of a step's searches; empty when there were none.

    - ``tool/duplicate_query_rate``: share of calls whose query had been asked before, in this step by any trajectory;
      case and white space aside.
    - ``tool/answer_in_top_k``: share of the trajectories with golden answers and a search that found one of them.

    Args:
        trajectories: the calls of one search tool and what answers the question (``findable_answers``), of each
            trajectory.

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
    """The golden answers as texts to look for in passages: in multiple choice the options that the letters stand for.

    Yes, no and maybe are left out: they stand in many a text that answers nothing.
    """
    options = example.options or {}
    texts = (options.get(answer, answer) for answer in example.golden_answers)
    return tuple(text for text in texts if normalize_answer(text) not in _ANYWHERE)


def holds_answer(calls: Sequence[ToolCall], golden_answers: Sequence[str]) -> bool:
    """Whether a golden answer stands in what was retrieved, both normalized as for exact match, as whole words."""
    answers = [f" {normalize_answer(answer)} " for answer in golden_answers]
    texts = [f" {normalize_answer(call.reply)} " for call in calls if call.ok]
    return any(answer.strip() and answer in text for answer in answers for text in texts)
