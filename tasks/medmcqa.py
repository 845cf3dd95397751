"""MedMCQA: questions of Indian medical entrance examinations, four options. In-domain in the paper's Table 1.

The answers of its test split were never published, so everyone evaluates on its validation split, which is ``test``
here. A row has the published columns ``question``, ``opa`` to ``opd`` and ``cop`` (0 to 3), or ``options`` and
``answer_idx``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sorl_env.task import HubSource
from sorl_tasks._medical import choice_task, letter_at

_COLUMNS = {"A": "opa", "B": "opb", "C": "opc", "D": "opd"}


def _parse_published(row: Mapping[str, Any]) -> dict[str, Any]:
    """``opa`` to ``opd`` as options, ``cop`` as the letter."""
    options = {letter: row[column] for letter, column in _COLUMNS.items()}
    letter = letter_at(row["cop"], len(options), "cop")
    return {**row, "options": options, "answer_idx": letter, "subject": row.get("subject_name")}


TASK = choice_task(
    "medmcqa",
    "sorl/MedMCQA-v0",
    "MedMCQA (validation split): medical multiple choice, in-domain.",
    parse_published=_parse_published,
    hub=HubSource("openlifescienceai/medmcqa", None, {"test": "validation"}),
)
