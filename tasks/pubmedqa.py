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

_OPTIONS: Mapping[str, str] = {"A": "yes", "B": "no", "C": "maybe"}


def _parse_published(row: Mapping[str, Any]) -> dict[str, Any]:
    """``final_decision`` as one of three options."""
    decision = text_column(row, "final_decision").lower()
    letters = {text: letter for letter, text in _OPTIONS.items()}
    if decision not in letters:
        raise ValueError(f"column 'final_decision' must be yes, no or maybe, not {decision!r}")
    return {"id": row.get("pubid"), **row, "options": _OPTIONS, "answer_idx": letters[decision]}


TASK = choice_task(
    "pubmedqa",
    "sorl/PubMedQA-v0",
    "PubMedQA: yes, no or maybe after a search among abstracts, out-of-domain.",
    parse_published=_parse_published,
    corpus="literature",
)
