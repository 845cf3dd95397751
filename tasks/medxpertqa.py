"""MedXpertQA (Text): expert-level questions with ten options. Out-of-domain in the paper's Table 1.

A row has the published columns ``question``, ``options`` and ``label`` (a letter), or ``options`` and ``answer_idx``.
The published question repeats its options after "Answer Choices:", which is removed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sorl_env.task import HubSource
from sorl_tasks._medical import choice_task
from sorl_tasks._qa import text_column

_CHOICES = re.compile(r"\s*\n\s*Answer Choices:\s*\(A\).*\Z", re.DOTALL)


def _parse_published(row: Mapping[str, Any]) -> dict[str, Any]:
    """The question without its options: a mapping (hub), or pairs of ``letter`` and ``content`` (repository)."""
    question = _CHOICES.sub("", text_column(row, "question"))
    options = row["options"]
    if isinstance(options, (list, tuple)):
        options = {option["letter"]: option["content"] for option in options}
    label = row["label"]
    if isinstance(label, (list, tuple)):
        if len(label) != 1:
            raise ValueError(f"column 'label' must hold one letter, not {label!r}")
        label = label[0]
    return {**row, "question": question, "options": options, "answer_idx": label}


TASK = choice_task(
    "medxpertqa",
    "sorl/MedXpertQA-v0",
    "MedXpertQA Text: multiple choice with ten options, out-of-domain.",
    parse_published=_parse_published,
    hub=HubSource("TsinghuaC3I/MedXpertQA", "Text"),
)
