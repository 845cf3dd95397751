"""BioASQ, factoid and yes/no: biomedical questions that PubMed abstracts answer. Not in the paper.

Unlike multiple choice, these questions can hardly be guessed and their passages are known, so a policy that searches
well scores well. A row has the columns of BioASQ's releases, ``body`` (or ``question``), ``type`` and ``exact_answer``,
or ``question`` and ``golden_answers``. The releases require a registration, so there is no ``data="hf:"``.

An answer must match any synonym exactly. After SQuAD's normalization this is BioASQ's strict accuracy for factoids, and
its accuracy for yes/no questions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sorl_env.task import Example, Task
from sorl_tasks._qa import parse_qa_row, qa_prompt, qa_reward, qa_tool_call_prompt, sample, search_tools

TYPES = ("factoid", "yesno")


def prompt(example: Example) -> str:
    """The question-answering instruction, which says so where the answer is yes or no."""
    hint = "Answer yes or no.\n" if example.metadata.get("type") == "yesno" else ""
    return qa_prompt(example) + hint


def tool_call_prompt(example: Example) -> str:
    """As ``prompt``, for tool calls."""
    hint = "\nAnswer yes or no." if example.metadata.get("type") == "yesno" else ""
    return qa_tool_call_prompt(example) + hint


def parse_row(row: Mapping[str, Any]) -> Example:
    """An example from a row of a release, or from one with ``question`` and ``golden_answers``."""
    if row.get("type", "factoid") not in TYPES:
        raise ValueError(f"column 'type' must be one of {', '.join(TYPES)}, not {row['type']!r}")
    if "golden_answers" in row:
        return parse_qa_row(row)
    question = row["body"] if "question" not in row and "body" in row else row["question"]
    golds = _flatten(row["exact_answer"])
    if row.get("type") == "yesno":
        golds = [gold.lower() for gold in golds]
        if golds not in (["yes"], ["no"]):
            raise ValueError(f"column 'exact_answer' must be yes or no, not {row['exact_answer']!r}")
    return parse_qa_row({**row, "question": question, "golden_answers": golds})


def _flatten(answer: Any) -> list[str]:
    """All synonyms of an answer, which releases write as a text, a list of texts, or a list of lists."""
    if isinstance(answer, (list, tuple)):
        return list(dict.fromkeys(text for part in answer for text in _flatten(part)))
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError(f"column 'exact_answer' must hold texts, not {answer!r}")
    return [answer.strip()]


TASK = Task(
    name="bioasq",
    description="BioASQ factoid and yes/no over PubMed abstracts, scored by exact match.",
    env_id="sorl/BioASQ-v0",
    prompt=prompt,
    tool_call_prompt=tool_call_prompt,
    reward=qa_reward,
    parse_row=parse_row,
    tools=search_tools("literature"),
    embedded=sample("bioasq", parse_row),
    embedded_is_sample=True,
)
