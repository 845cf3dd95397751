"""The data sets that ``sorl-data prepare`` knows: where they are published, their licences, how a published row becomes
the columns that a task's ``parse_row`` reads, and which rows are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sorl_env.errors import UserError, did_you_mean
from sorl_tasks.mmlu_medical import SUBJECTS

Row = Mapping[str, Any]

NQ_MAX_WORDS = 5  # NQ-open's rule (Lee et al., 2019): short answers of at most five tokens


def lift_qa(row: Row) -> dict[str, Any]:
    """Make columns of FlashRAG's and Search-R1's ``metadata``, of HotpotQA's ``_id`` and of NQ's annotations.

    >>> lift_qa({"id": "0", "question": "q", "golden_answers": ["a"], "metadata": {"type": "bridge"}})["type"]
    'bridge'
    """
    if "annotations" in row and "question_text" in row:
        return _lift_nq(row)
    lifted = {**(row.get("metadata") or {}), **row}
    if lifted.get("id") is None and lifted.get("_id") is not None:
        lifted["id"] = lifted["_id"]
    facts = lifted.get("supporting_facts")
    if isinstance(facts, Mapping):  # on the hub two parallel lists, in the original pairs
        sentences = facts["sent_id"]
        lifted["supporting_facts"] = [list(pair) for pair in zip(facts["title"], sentences, strict=True)]
    return lifted


def _lift_nq(row: Row) -> dict[str, Any]:
    """Convert a row of the simplified Natural Questions, whose short answers are spans of the document's words."""
    if not isinstance(row["document_text"], str):
        raise ValueError(f"column 'document_text' must be a text, not {row['document_text']!r}")
    words = row["document_text"].split(" ")
    spans = [span for annotation in row["annotations"] for span in annotation["short_answers"]]
    texts = [" ".join(words[span["start_token"] : span["end_token"]]) for span in spans]
    short = [text for text in texts if 0 < len(text.split()) <= NQ_MAX_WORDS]
    return {
        "id": row["example_id"],
        "question": row["question_text"],
        "golden_answers": list(dict.fromkeys(short)),
    }


def drop_nq(row: Row) -> str | None:
    """Why a row of NQ is left out; None if it is kept."""
    if row.get("data_source", "nq") != "nq":
        return "of another data set"
    return None if _answers(row) else f"no short answer of at most {NQ_MAX_WORDS} tokens"


def drop_hotpotqa(row: Row) -> str | None:
    """Why a row of HotpotQA is left out; Search-R1 publishes it together with NQ."""
    if row.get("data_source", "hotpotqa") != "hotpotqa":
        return "of another data set"
    return None if _answers(row) else "answer withheld"


def drop_medmcqa(row: Row) -> str | None:
    """Why a row of MedMCQA is left out."""
    return "answer withheld" if row.get("cop") == -1 else None


def drop_mmlu(row: Row) -> str | None:
    """Why a row of MMLU is left out."""
    return None if row.get("subject") in SUBJECTS else "another subject"


def drop_bioasq(row: Row) -> str | None:
    """Why a row of BioASQ is left out."""
    return None if row.get("type") in ("factoid", "yesno") else "neither factoid nor yes/no"


def _answers(row: Row) -> Sequence[Any]:
    found = row.get("golden_answers", row.get("answer"))
    return (found,) if isinstance(found, str) else found or ()


def _nothing(row: Mapping[str, Any]) -> str | None:
    return None


@dataclass(frozen=True)
class Recipe:
    """How to prepare a published data set; the task of the same name reads its rows.

    Attributes:
        home: its web page.
        licence: an identifier of the hub; "unknown" where the publisher states none.
        hub: the default of ``--source``; None where the hub has no usable copy.
        configs: configurations of the hub data set to join.
        splits: from our names of splits to the publisher's.
        lift: converts a published row to the columns that the task reads.
        drop: takes such a row; returns why it is left out, or None to keep it.
        mixed: the published split mixes train and test questions; a row's ``split`` or ``--test_ids`` tells them apart.
        filter: what ``drop`` does, in words.
        note: what else to know.
    """

    name: str
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
        "https://ai.google.com/research/NaturalQuestions",
        "cc-by-sa-3.0",
        hub="hf:RUC-NLPIR/FlashRAG_datasets",
        configs=("nq",),
        lift=lift_qa,
        drop=drop_nq,
        filter="rows of other data sets in Search-R1's joint file; from the original form, questions without a short "
        f"answer of at most {NQ_MAX_WORDS} tokens, which is how NQ-open was made",
    ),
    Recipe(
        "hotpotqa",
        "https://hotpotqa.github.io",
        "cc-by-sa-4.0",
        hub="hf:RUC-NLPIR/FlashRAG_datasets",
        configs=("hotpotqa",),
        splits={"train": "train", "test": "dev"},
        lift=lift_qa,
        drop=drop_hotpotqa,
        filter="rows of other data sets in Search-R1's joint file; questions without an answer",
        note="`test` is the published dev split: the answers of the test split were never published.",
    ),
    Recipe(
        "alphamed19k",
        "https://huggingface.co/datasets/che111/AlphaMed19K",
        "unknown",
        hub="hf:che111/AlphaMed19K",
        splits={"train": "train"},
        note="It has a train split only; the paper evaluates on the five medical benchmarks.",
    ),
    Recipe(
        "medqa",
        "https://github.com/jind11/MedQA",
        "mit",
        hub="hf:GBaker/MedQA-USMLE-4-options",
    ),
    Recipe(
        "medmcqa",
        "https://medmcqa.github.io",
        "apache-2.0",
        hub="hf:openlifescienceai/medmcqa",
        splits={"train": "train", "test": "validation"},
        drop=drop_medmcqa,
        filter="questions whose answer is withheld",
        note="`test` is the published validation split: the answers of the test split were never published.",
    ),
    Recipe(
        "pubmedqa",
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
        "https://github.com/hendrycks/test",
        "mit",
        hub="hf:cais/mmlu",
        configs=SUBJECTS,
        splits={"test": "test"},
        drop=drop_mmlu,
        filter=f"subjects other than {', '.join(SUBJECTS)}",
    ),
    Recipe(
        "medxpertqa",
        "https://github.com/TsinghuaC3I/MedXpertQA",
        "mit",
        hub="hf:TsinghuaC3I/MedXpertQA",
        configs=("Text",),
        splits={"test": "test"},
        note="The options that the published question repeats are cut off.",
    ),
    Recipe(
        "bioasq",
        "http://bioasq.org",
        "cc-by-2.5",
        splits={"test": "test"},
        drop=drop_bioasq,
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
