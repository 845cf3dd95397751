"""The medical subset of MMLU: six subjects, four options. Out-of-domain in the paper's Table 1 (MMLU-M).

The paper does not list the subjects; these six are what the field means by it. A row has the published columns
``question``, ``choices`` (a list), ``answer`` (0 to 3) and ``subject``, or ``options`` and ``answer_idx``. On the hub
each subject is a configuration of its own: ``data="hf:cais/mmlu:anatomy"`` loads one of them, and ``sorl-data prepare
mmlu_medical`` joins all six.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sorl_tasks._medical import choice_task, letter_at

SUBJECTS = (
    "anatomy",
    "clinical_knowledge",
    "college_biology",
    "college_medicine",
    "medical_genetics",
    "professional_medicine",
)


def _parse_published(row: Mapping[str, Any]) -> dict[str, Any]:
    """``choices`` as options, ``answer`` as the letter."""
    choices = row["choices"]
    if not isinstance(choices, (list, tuple)) or not all(isinstance(choice, str) for choice in choices):
        raise ValueError(f"column 'choices' must be a list of texts, not {choices!r}")
    options = {chr(ord("A") + i): choice for i, choice in enumerate(choices)}
    return {**row, "options": options, "answer_idx": letter_at(row["answer"], len(options), "answer")}


TASK = choice_task(
    "mmlu_medical",
    "sorl/MMLUMedical-v0",
    "MMLU, six medical subjects: multiple choice, out-of-domain.",
    parse_published=_parse_published,
)
