"""PubMedQA: research questions answered yes, no or maybe by an abstract. Out-of-domain in the paper's Table 1.

The abstract is not in the prompt: the policy has to find it in a corpus of abstracts (the paper searches Wikipedia). A
row has the published columns ``question``, ``final_decision`` and ``pubid``, or ``options`` and ``answer_idx``. There
is no ``data="hf:"``, because on the hub the official test questions are in a split called train, and ``sorl-data
prepare pubmedqa`` has to separate them first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sorl_tasks._medical import choice_task
from sorl_tasks._qa import text_column

OPTIONS: Mapping[str, str] = {"A": "yes", "B": "no", "C": "maybe"}


def parse_published(row: Mapping[str, Any]) -> dict[str, Any]:
    """``final_decision`` as one of three options.

    Raises:
        KeyError: a column is missing.
        ValueError: the decision is not yes, no or maybe.
    """
    decision = text_column(row, "final_decision").lower()
    letters = [letter for letter, text in OPTIONS.items() if text == decision]
    if not letters:
        raise ValueError(f"column 'final_decision' must be yes, no or maybe, not {decision!r}")
    return {"id": row.get("pubid"), **row, "options": OPTIONS, "answer_idx": letters[0]}


TASK = choice_task(
    "pubmedqa",
    "sorl/PubMedQA-v0",
    "PubMedQA: yes, no or maybe after a search among abstracts, out-of-domain.",
    parse_published=parse_published,
    corpus="literature",
)
