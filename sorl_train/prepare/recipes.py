"""The data sets that ``sorl-data prepare`` knows: where they are published, their licences, and which rows are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sorl_env.errors import UserError, did_you_mean
from sorl_tasks.mmlu_medical import SUBJECTS
from sorl_train.prepare import formats


def _nothing(row: Mapping[str, Any]) -> str | None:
    return None


@dataclass(frozen=True)
class Recipe:
    """How to prepare a published data set; the task of the same name reads its rows.

    Attributes:
        title, home: name and web page, for the card.
        licence: an identifier of the hub.
        hub: the default of ``--source``; None where the hub has no usable copy.
        configs: configurations of the hub data set to join.
        splits: from our names of splits to the publisher's.
        lift: converts a published row to the columns that the task reads.
        drop: takes such a row; returns why it is left out, or None to keep it.
        mixed: the published split mixes train and test questions; a row's ``split`` or ``--test_ids`` tells them apart.
        filter: what ``drop`` does, in words, for the card.
        note: more text for the card.
    """

    name: str
    title: str
    home: str
    licence: str
    hub: str | None = None
    configs: tuple[str | None, ...] = (None,)
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "test": "test"})
    lift: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    drop: Callable[[Mapping[str, Any]], str | None] = _nothing
    mixed: bool = False
    filter: str = "none"
    note: str = ""


_RECIPES = (
    Recipe(
        "nq",
        "Natural Questions (open domain)",
        "https://ai.google.com/research/NaturalQuestions",
        "cc-by-sa-3.0",
        hub="hf:RUC-NLPIR/FlashRAG_datasets",
        configs=("nq",),
        lift=formats.lift_qa,
        drop=formats.drop_nq,
        filter="rows of other data sets in Search-R1's joint file; from the original form, questions without a short "
        f"answer of at most {formats.NQ_MAX_WORDS} tokens, which is how NQ-open was made",
    ),
    Recipe(
        "hotpotqa",
        "HotpotQA",
        "https://hotpotqa.github.io",
        "cc-by-sa-4.0",
        hub="hf:RUC-NLPIR/FlashRAG_datasets",
        configs=("hotpotqa",),
        splits={"train": "train", "test": "dev"},
        lift=formats.lift_qa,
        drop=formats.drop_hotpotqa,
        filter="rows of other data sets in Search-R1's joint file; questions without an answer",
        note="`test` is the published dev split: the answers of the test split were never published.",
    ),
    Recipe(
        "alphamed19k",
        "AlphaMed19K",
        "https://huggingface.co/datasets/che111/AlphaMed19K",
        "unknown",
        hub="hf:che111/AlphaMed19K",
        splits={"train": "train"},
        note="It has a train split only; the paper evaluates on the five medical benchmarks.",
    ),
    Recipe(
        "medqa",
        "MedQA (US, four options)",
        "https://github.com/jind11/MedQA",
        "mit",
        hub="hf:GBaker/MedQA-USMLE-4-options",
    ),
    Recipe(
        "medmcqa",
        "MedMCQA",
        "https://medmcqa.github.io",
        "apache-2.0",
        hub="hf:openlifescienceai/medmcqa",
        splits={"train": "train", "test": "validation"},
        drop=formats.drop_medmcqa,
        filter="questions whose answer is withheld",
        note="`test` is the published validation split: the answers of the test split were never published.",
    ),
    Recipe(
        "pubmedqa",
        "PubMedQA (expert-labelled)",
        "https://pubmedqa.github.io",
        "mit",
        hub="hf:qiaojin/PubMedQA",
        configs=("pqa_labeled",),
        splits={"train": "train", "test": "train"},
        mixed=True,
        note="On the hub all 1,000 labelled questions lie in one split; `test` are the 500 of the authors' "
        "test_ground_truth.json. Abstracts are not part of the prompt: they belong into the corpus.",
    ),
    Recipe(
        "mmlu_medical",
        "MMLU, six medical subjects",
        "https://github.com/hendrycks/test",
        "mit",
        hub="hf:cais/mmlu",
        configs=SUBJECTS,
        splits={"test": "test"},
        drop=formats.drop_mmlu,
        filter=f"subjects other than {', '.join(SUBJECTS)}",
    ),
    Recipe(
        "medxpertqa",
        "MedXpertQA, Text",
        "https://github.com/TsinghuaC3I/MedXpertQA",
        "mit",
        hub="hf:TsinghuaC3I/MedXpertQA",
        configs=("Text",),
        splits={"test": "test"},
        note="The options that the published question repeats are cut off.",
    ),
    Recipe(
        "bioasq",
        "BioASQ Task B, factoid and yes/no",
        "http://bioasq.org",
        "cc-by-2.5",
        splits={"test": "test"},
        drop=formats.drop_bioasq,
        filter="list and summary questions",
        note="Releases want a registration: give the downloaded files as --source.",
    ),
)

RECIPES: Mapping[str, Recipe] = {recipe.name: recipe for recipe in _RECIPES}


def find_recipe(name: str) -> Recipe:
    """The recipe of a name. Raises ``UserError`` for an unknown one."""
    if name not in RECIPES:
        raise UserError(f"there is no recipe for the data set {name!r}. {did_you_mean(name, RECIPES)}")
    return RECIPES[name]
