"""Converts published forms of rows to the columns that a task's ``parse_row`` reads, and filters rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
