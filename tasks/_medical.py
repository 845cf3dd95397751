"""What the medical benchmarks share: multiple choice in the paper's prompt, in-domain and out-of-domain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sorl_env.task import Example, HubSource, Task
from sorl_tasks._qa import sample, search_tools
from sorl_tasks.alphamed19k import parse_row as parse_choice_row
from sorl_tasks.alphamed19k import prompt, reward, tool_call_prompt, wrong_answer


def choice_task(
    name: str,
    env_id: str,
    description: str,
    *,
    parse_published: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    hub: HubSource | None = None,
    corpus: str = "alphamed19k",
) -> Task:
    """A multiple-choice benchmark with the search tool, the paper's medical prompt and a reward for the letter.

    Args:
        parse_published: converts a row as the benchmark's authors publish it into one with ``options`` and
            ``answer_idx``. Rows with ``options`` and ``golden_answers`` (from ``sorl-data prepare``) need no
            conversion.
        corpus: name of the embedded sample of passages.
    """

    def parse_row(row: Mapping[str, Any]) -> Example:
        is_common = row.get("options") is not None and ("golden_answers" in row or "answer_idx" in row)
        return parse_choice_row(row if is_common or parse_published is None else parse_published(row))

    return Task(
        name=name,
        description=description,
        env_id=env_id,
        prompt=prompt,
        tool_call_prompt=tool_call_prompt,
        reward=reward,
        parse_row=parse_row,
        tools=search_tools(corpus),
        embedded=sample(name, parse_row),
        embedded_is_sample=True,
        hub=hub,
        wrong_answer=wrong_answer,
    )


def letter_at(index: Any, count: int, column: str) -> str:
    """The letter of a numbered option, counted from 0. Raises ``ValueError`` if it is not the number of one of
    ``count`` options; -1 marks an answer that is withheld.
    """
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < count:
        raise ValueError(f"column {column!r} must number one of {count} options from 0, not {index!r}")
    return chr(ord("A") + index)
