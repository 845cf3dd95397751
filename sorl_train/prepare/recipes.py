"""The data sets that ``sorl-data prepare`` knows: where they are published, their licences, how a published row becomes
the columns that a task's ``parse_row`` reads, and which rows are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sorl_env.errors import UserError, did_you_mean
from sorl_tasks.medical import SUBJECTS

Row = Mapping[str, Any]


def lift_qa(row: Row) -> dict[str, Any]:
    """Make columns of FlashRAG's and Search-R1's ``metadata`` and of HotpotQA's ``_id``.

    >>> lift_qa({"id": "0", "question": "q", "golden_answers": ["a"], "metadata": {"type": "bridge"}})["type"]
    'bridge'
    """
    lifted = {**(row.get("metadata") or {}), **row}
    if lifted.get("id") is None and lifted.get("_id") is not None:
        lifted["id"] = lifted["_id"]
    facts = lifted.get("supporting_facts")
    if isinstance(facts, Mapping):  # on the hub two parallel lists, in the original pairs
        sentences = facts["sent_id"]
        lifted["supporting_facts"] = [list(pair) for pair in zip(facts["title"], sentences, strict=True)]
    return lifted


def _drop_qa(name: str, row: Row) -> str | None:
    """Search-R1 publishes NQ and HotpotQA in one file."""
    if row.get("data_source", name) != name:
        return "of another data set"
    return None if row.get("golden_answers", row.get("answer")) else "without an answer"


def _keep_only(column: str, values: Sequence[Any], reason: str) -> Callable[[Row], str | None]:
    return lambda row: None if row.get(column) in values else reason


@dataclass(frozen=True)
class Recipe:
    """How to prepare a published data set; the task of the same name reads its rows.

    Attributes:
        licence: an identifier of the hub; "unknown" where the publisher states none.
        hub: the default of ``--source``; None where the hub has no usable copy.
        configs: configurations of the hub data set to join.
        splits: from our names of splits to the publisher's.
        lift: converts a published row to the columns that the task reads.
        drop: takes such a row; returns why it is left out, or None to keep it.
        mixed: the published split mixes train and test questions; a row's ``split`` or ``--test_ids`` tells them apart.
        note: what else to know.
    """

    name: str
    licence: str
    hub: str | None = None
    configs: tuple[str | None, ...] = (None,)
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "test": "test"})
    lift: Callable[[Row], Row] = dict
    drop: Callable[[Row], str | None] = lambda row: None
    mixed: bool = False
    note: str = ""


_RECIPES = (
    Recipe(
        "nq",
        "cc-by-sa-3.0",
        hub="hf:RUC-NLPIR/FlashRAG_datasets",
        configs=("nq",),
        lift=lift_qa,
        drop=partial(_drop_qa, "nq"),
    ),
    Recipe(
        "hotpotqa",
        "cc-by-sa-4.0",
        hub="hf:RUC-NLPIR/FlashRAG_datasets",
        configs=("hotpotqa",),
        splits={"train": "train", "test": "dev"},
        lift=lift_qa,
        drop=partial(_drop_qa, "hotpotqa"),
        note="`test` is the published dev split: the answers of the test split were never published.",
    ),
    Recipe(
        "alphamed19k",
        "unknown",
        hub="hf:che111/AlphaMed19K",
        splits={"train": "train"},
        note="It has a train split only; the paper evaluates on the five medical benchmarks.",
    ),
    Recipe("medqa", "mit", hub="hf:GBaker/MedQA-USMLE-4-options"),
    Recipe(
        "medmcqa",
        "apache-2.0",
        hub="hf:openlifescienceai/medmcqa",
        splits={"train": "train", "test": "validation"},
        drop=lambda row: "answer withheld" if row.get("cop") == -1 else None,
        note="`test` is the published validation split: the answers of the test split were never published.",
    ),
    Recipe(
        "pubmedqa",
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
        "mit",
        hub="hf:cais/mmlu",
        configs=SUBJECTS,
        splits={"test": "test"},
        drop=_keep_only("subject", SUBJECTS, "another subject"),
    ),
    Recipe(
        "medxpertqa",
        "mit",
        hub="hf:TsinghuaC3I/MedXpertQA",
        configs=("Text",),
        splits={"test": "test"},
        note="The options that the published question repeats are cut off.",
    ),
    Recipe(
        "bioasq",
        "cc-by-2.5",
        splits={"test": "test"},
        drop=_keep_only("type", ("factoid", "yesno"), "neither factoid nor yes/no"),
        note="Releases want a registration: give the downloaded files as --source.",
    ),
)

RECIPES: Mapping[str, Recipe] = {recipe.name: recipe for recipe in _RECIPES}


def find_recipe(name: str) -> Recipe:
    """The recipe of a name. Raises ``UserError`` for an unknown one."""
    if name not in RECIPES:
        raise UserError(f"there is no recipe for the data set {name!r}. {did_you_mean(name, RECIPES)}")
    return RECIPES[name]
