"""The card of a prepared data set: a README whose front matter the Hugging Face hub and ``datasets`` read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from sorl_env.data import TEST_SPLIT
from sorl_env.figures import markdown_table
from sorl_train.prepare.recipes import Recipe


def card(recipe: Recipe, manifest: Mapping[str, Any]) -> str:
    """The text of the card. It does not depend on when or where it is written."""
    files: Mapping[str, Mapping[str, Any]] = manifest["files"]
    front = {
        "pretty_name": f"{recipe.title}, prepared for sorl",
        "license": recipe.licence,
        "language": ["en"],
        "task_categories": ["question-answering"],
        # one configuration per split, because the splits of one configuration must have the same columns
        "configs": [
            {"config_name": entry["split"], "data_files": [{"split": entry["split"], "path": name}]}
            for name, entry in files.items()
        ],
    }
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---",
        f"# {recipe.title}",
        f"Prepared with `sorl-data prepare {recipe.name}`; the task `{recipe.name}` reads it: "
        f"`sorl-check-task {recipe.name} --data FOLDER --split SPLIT`.",
        _splits(files),
        _origin(recipe, files),
    ]
    if "overlap" in manifest:
        parts.append(_overlap(manifest["overlap"]))
    parts.append(_COLUMNS)
    return "\n\n".join(parts) + "\n"


def _splits(files: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for name, entry in files.items():
        use = "evaluation only: training on it is refused" if entry["split"] == TEST_SPLIT else "training"
        rows.append([name, entry["split"], f"{entry['rows']:,}", use, f"`{entry['sha256']}`"])
    return "## Splits\n\n" + markdown_table(["file", "split", "questions", "use", "SHA-256"], rows)


def _origin(recipe: Recipe, files: Mapping[str, Mapping[str, Any]]) -> str:
    licence = (
        recipe.licence if recipe.licence != "unknown" else "not stated by its publisher: ask before you share"
    )
    lines = ["## Origin", "", f"- {recipe.home}", f"- Licence: {licence}", f"- Filter: {recipe.filter}."]
    if recipe.note:
        lines.append(f"- {recipe.note}")
    for name, entry in files.items():
        of_split = f", split {entry['source_split']}" if entry["source_split"] else ""
        left_out = "; ".join(f"{count:,} {reason}" for reason, count in entry["dropped"].items()) or "none"
        lines.append(
            f"- {name}: from `{entry['source']}`{of_split} ({entry['source_rows']:,} rows, SHA-256 "
            f"`{entry['source_sha256']}`); left out: {left_out}; repeated word for word: {entry['repeated']:,}."
        )
    return "\n".join(lines)


def _overlap(overlap: Mapping[str, Any]) -> str:
    dropped = {
        "none": "All were left in train, as published.",
        "exact": "The exact ones were left out of train.",
        "near": "All of them were left out of train.",
    }[overlap["dropped"]]
    rows = [
        [name, f"{counts['exact_test']:,} test questions", f"{counts['near_test']:,} test questions"]
        for name, counts in overlap["with"].items()
    ]
    return (
        "## Train questions that are also in test\n\n"
        + markdown_table(["with", "word for word", "nearly"], rows)
        + "\n\nCounted before anything was left out. Nearly means similar wording; some of these questions are "
        f"about different things. Every pair is in `overlap.jsonl`. {dropped}"
    )


_COLUMNS = """## Columns

`id`, `data_source`, `split`, `question`, `golden_answers` (any of them is right; for multiple choice the one letter),
`options` (letter to text, only for multiple choice), and what the source says besides, such as `type` or `subject`."""
