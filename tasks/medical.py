"""The paper's medical benchmarks beside AlphaMed19K: multiple choice in its prompt, in-domain and out-of-domain.

Each task reads rows as its authors publish them, or rows with ``options`` ({"A": ..}) and the letter in ``answer_idx``
or ``golden_answers`` (as ``sorl-data prepare`` writes them).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sorl_env.task import HubSource
from sorl_tasks._qa import text_column
from sorl_tasks.alphamed19k import choice_task

# The subjects of MMLU-M. The paper does not list them; these six are what the field means by it.
SUBJECTS = (
    "anatomy",
    "clinical_knowledge",
    "college_biology",
    "college_medicine",
    "medical_genetics",
    "professional_medicine",
)
_CHOICES = re.compile(r"\s*\n\s*Answer Choices:\s*\(A\).*\Z", re.DOTALL)
_DECISIONS: Mapping[str, str] = {"A": "yes", "B": "no", "C": "maybe"}


def _letter_at(index: Any, count: int, column: str) -> str:
    """The letter of a numbered option, counted from 0. Raises ``ValueError`` if it is not the number of one of
    ``count`` options; -1 marks an answer that is withheld."""
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < count:
        raise ValueError(f"column {column!r} must number one of {count} options from 0, not {index!r}")
    return chr(ord("A") + index)


def _medmcqa_row(row: Mapping[str, Any]) -> dict[str, Any]:
    options = {letter: row[f"op{letter.lower()}"] for letter in "ABCD"}
    letter = _letter_at(row["cop"], len(options), "cop")
    return {**row, "options": options, "answer_idx": letter, "subject": row.get("subject_name")}


def _medxpertqa_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The published question repeats its options, which are a mapping (hub) or pairs of ``letter`` and ``content``
    (repository)."""
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


def _mmlu_row(row: Mapping[str, Any]) -> dict[str, Any]:
    choices = row["choices"]
    if not isinstance(choices, (list, tuple)) or not all(isinstance(choice, str) for choice in choices):
        raise ValueError(f"column 'choices' must be a list of texts, not {choices!r}")
    options = {chr(ord("A") + i): choice for i, choice in enumerate(choices)}
    return {**row, "options": options, "answer_idx": _letter_at(row["answer"], len(options), "answer")}


def _pubmedqa_row(row: Mapping[str, Any]) -> dict[str, Any]:
    decision = text_column(row, "final_decision").lower()
    letters = {text: letter for letter, text in _DECISIONS.items()}
    if decision not in letters:
        raise ValueError(f"column 'final_decision' must be yes, no or maybe, not {decision!r}")
    return {"id": row.get("pubid"), **row, "options": _DECISIONS, "answer_idx": letters[decision]}


MEDQA = choice_task(
    "medqa",
    "sorl/MedQA-v0",
    "MedQA (US, four options): medical multiple choice, in-domain.",
    hub=HubSource("GBaker/MedQA-USMLE-4-options"),
)
# Columns opa to opd and cop (0 to 3). The answers of the test split were never published, so everyone evaluates on the
# validation split, which is ``test`` here.
MEDMCQA = choice_task(
    "medmcqa",
    "sorl/MedMCQA-v0",
    "MedMCQA (validation split): medical multiple choice, in-domain.",
    _medmcqa_row,
    hub=HubSource("openlifescienceai/medmcqa", None, {"test": "validation"}),
)
MEDXPERTQA = choice_task(
    "medxpertqa",
    "sorl/MedXpertQA-v0",
    "MedXpertQA Text: multiple choice with ten options, out-of-domain.",
    _medxpertqa_row,
    hub=HubSource("TsinghuaC3I/MedXpertQA", "Text"),
)
# Columns choices (a list), answer (0 to 3) and subject. On the hub each subject is a configuration of its own:
# data="hf:cais/mmlu:anatomy" loads one of them, and ``sorl-data prepare mmlu_medical`` joins all six.
MMLU_MEDICAL = choice_task(
    "mmlu_medical",
    "sorl/MMLUMedical-v0",
    "MMLU, six medical subjects: multiple choice, out-of-domain.",
    _mmlu_row,
)
# Columns final_decision and pubid. The abstract is not in the prompt: the policy has to find it in a corpus of
# abstracts (the paper searches Wikipedia). There is no hub source, because there the official test questions are in a
# split called train, and ``sorl-data prepare pubmedqa`` has to separate them first.
PUBMEDQA = choice_task(
    "pubmedqa",
    "sorl/PubMedQA-v0",
    "PubMedQA: yes, no or maybe after a search among abstracts, out-of-domain.",
    _pubmedqa_row,
    corpus="literature",
)
