"""From published rows to a folder: ``{split}.jsonl`` in one schema, a manifest, a card, and the pairs in both splits.

A row is an ``Example`` laid flat; the tasks and ``sorl_env.data`` read it as any other data file::

    {"id": "..", "data_source": "nq", "split": "test", "question": "..", "golden_answers": [".."], "gold_ids": [".."]}
    {"id": "..", .., "question": "..", "options": {"A": "..", "B": ".."}, "golden_answers": ["B"], "subject": ".."}

``split`` stands in every row, so that a copy under another name is still known as test data. The same input gives the
same bytes: nothing here knows the time, the machine, or a path.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sorl_env.data import TEST_SPLIT
from sorl_env.errors import UserError, did_you_mean
from sorl_env.folders import new_folder
from sorl_env.registry import load_task
from sorl_env.task import Example
from sorl_train.prepare.card import card
from sorl_train.prepare.manifest import CARD, MANIFEST, PAIRS, Manifest, jsonl, read_manifest
from sorl_train.prepare.overlap import Pair, count_pairs, count_repeated, find_pairs
from sorl_train.prepare.questions import read_questions
from sorl_train.prepare.recipes import Recipe
from sorl_train.prepare.sources import Source, is_file, read_source
from sorl_train.run.files import atomic_write

DROP = ("none", "exact", "near")


@dataclasses.dataclass(frozen=True)
class Options:
    """How to prepare.

    Attributes:
        drop: which train questions that stand in test, too, are left out; ``near`` takes the exact ones as well.
        skip_unreadable: leave out rows that the task cannot read, and count them, instead of refusing.
        test_ids: ids of the test questions, where the published split mixes them with others.
        against: more test questions that train is checked against, of other data sets.
    """

    drop: str = "none"
    skip_unreadable: bool = False
    test_ids: frozenset[str] | None = None
    revision: str | None = None
    against: tuple[Path, ...] = ()


def prepare(recipe: Recipe, sources: Mapping[str, str], out: Path, options: Options = Options()) -> Manifest:
    """Read the sources, write the folder, and return its manifest.

    Args:
        sources: split -> where its rows are (see ``read_source``).

    Raises:
        UserError: a source cannot be read, a row is none of this data set, nothing is left, or ``out`` holds other
            files.
    """
    _check_out(out)
    examples: dict[str, list[Example]] = {}
    entries: dict[str, dict[str, Any]] = {}
    for split, reference in sources.items():
        source = read_source(reference, recipe.splits.get(split, split), recipe.configs, options.revision)
        examples[split], dropped = _read(recipe, source, split, options)
        entries[split] = _entry(source, dropped, examples[split])
    pairs = _find_overlap(examples, options.against)
    kinds = {"none": (), "exact": ("exact",), "near": ("exact", "near")}[options.drop]
    in_test = {pair.train_id for found in pairs.values() for pair in found if pair.kind in kinds}
    if in_test:
        kept = [example for example in examples["train"] if example.id not in in_test]
        entries["train"]["dropped"]["also for testing"] = len(examples["train"]) - len(kept)
        examples["train"] = kept
    return _write(recipe, examples, entries, pairs, out, options)


def _find_overlap(
    examples: Mapping[str, Sequence[Example]], against: Sequence[Path]
) -> dict[str, list[Pair]]:
    """Test file -> the pairs of train with it; empty where there is no train split, or nothing to check it against."""
    if "train" not in examples:
        if against:
            raise UserError("--against checks a train split, and none is prepared")
        return {}
    tests = {f"{TEST_SPLIT}.jsonl": examples[TEST_SPLIT]} if TEST_SPLIT in examples else {}
    for path in against:
        name = f"{path.resolve().parent.name}/{path.name}"
        if name in tests:
            raise UserError(f"--against {path}: another file is called {name}, too; rename a folder")
        tests[name] = read_questions(path)
    return {name: find_pairs(examples["train"], test) for name, test in tests.items()}


def choose_sources(recipe: Recipe, given: Sequence[str]) -> dict[str, str]:
    """Split -> reference, from ``--source`` options: ``SPLIT=REFERENCE``, or one folder or hub name for all splits.

    Raises:
        UserError: a file without its split, an unknown or repeated split, or nothing given and nothing published.
    """
    if not given and recipe.hub is None:
        raise UserError(f"{recipe.name} is on no hub: give --source. {recipe.note}")
    chosen: dict[str, str] = {}
    for text in given or [recipe.hub or ""]:
        split, equals, reference = text.partition("=")
        if not equals and is_file(text) and Path(text).expanduser().exists():
            known = " or ".join(f"--source {name}={text}" for name in recipe.splits)
            raise UserError(f"{text}: a file holds one split, say which: {known}")
        if equals and not {"/", ".", ":"} & set(split):
            named = {split: reference}
        else:
            named = dict.fromkeys(recipe.splits, text)
        for name, where in named.items():
            if name not in ("train", TEST_SPLIT):
                raise UserError(f"--source {text}: {did_you_mean(name, ('train', TEST_SPLIT))}")
            if name in chosen:
                raise UserError(f"--source gives split {name!r} twice: {chosen[name]} and {where}")
            chosen[name] = where
    return chosen


def to_row(example: Example, data_source: str, split: str) -> dict[str, Any]:
    """An example as a row; ``parse_row`` of its task gives it back."""
    row: dict[str, Any] = {
        "id": example.id,
        "data_source": data_source,
        "split": split,
        "question": example.question,
    }
    if example.options is not None:
        row["options"] = dict(example.options)
    return {**row, "golden_answers": list(example.golden_answers), **example.metadata}


def _read(recipe: Recipe, source: Source, split: str, options: Options) -> tuple[list[Example], Counter[str]]:
    """The examples of a split, and how many rows were left out for which reason."""
    task = load_task(recipe.name)
    examples, dropped = [], Counter[str]()
    for where, published in source.rows:
        row = recipe.lift(published)
        reason = recipe.drop(row)
        if reason is not None:
            dropped[reason] += 1
            continue
        try:
            example = task.parse_row(row)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            if not options.skip_unreadable:
                problem = f"no column {error}" if isinstance(error, KeyError) else str(error)
                raise UserError(
                    f"{where}: not a row of {recipe.name}: {problem}. --skip_unreadable leaves such rows out"
                ) from error
            dropped["unreadable"] += 1
            continue
        found = _split_of(recipe, row, example.id, where, options.test_ids)
        if found in (None, split):
            examples.append(example)
        else:
            dropped[f"of the {found} split"] += 1
    if not examples:
        raise UserError(
            f"{source.name}: no rows of {recipe.name} for split {split!r} (left out: {dict(dropped)})"
        )
    return examples, dropped


def _split_of(
    recipe: Recipe, row: Mapping[str, Any], example_id: str, where: str, test_ids: frozenset[str] | None
) -> str | None:
    """The split that a row says it belongs to, or that the list of test ids says; None if nothing does."""
    if test_ids is not None:
        return TEST_SPLIT if example_id in test_ids else "train"
    split = row.get("split")
    if split in ("train", TEST_SPLIT):
        return str(split)
    if recipe.mixed:
        raise UserError(
            f"{where}: nothing says whether this question is for training or for testing: give --test_ids, a JSON list "
            f"or object of the test questions' ids. {recipe.note}"
        )
    return None


def _entry(source: Source, dropped: Counter[str], examples: Sequence[Example]) -> dict[str, Any]:
    return {
        "source": source.name,
        "source_split": source.split,
        "source_sha256": source.sha256,
        "source_rows": len(source.rows),
        "dropped": dict(sorted(dropped.items())),
        "repeated": count_repeated(examples),
    }


def _write(
    recipe: Recipe,
    examples: Mapping[str, Sequence[Example]],
    entries: Mapping[str, Mapping[str, Any]],
    pairs: Mapping[str, Sequence[Pair]],
    out: Path,
    options: Options,
) -> Manifest:
    with new_folder(out):
        return _write_files(recipe, examples, entries, pairs, out, options)


def _write_files(
    recipe: Recipe,
    examples: Mapping[str, Sequence[Example]],
    entries: Mapping[str, Mapping[str, Any]],
    pairs: Mapping[str, Sequence[Pair]],
    out: Path,
    options: Options,
) -> Manifest:
    files = {}
    for split, found in examples.items():
        text = jsonl(to_row(example, recipe.name, split) for example in found)
        atomic_write(out / f"{split}.jsonl", text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        files[f"{split}.jsonl"] = {"split": split, "rows": len(found), "sha256": digest, **entries[split]}
    manifest: Manifest = {"version": 1, "name": recipe.name, "licence": recipe.licence, "files": files}
    if pairs:
        counts = {name: count_pairs(found) for name, found in pairs.items()}
        manifest["overlap"] = {"dropped": options.drop, "with": counts}
        rows = [{"with": name, **dataclasses.asdict(pair)} for name, found in pairs.items() for pair in found]
        atomic_write(out / PAIRS, jsonl(rows))
    else:
        (out / PAIRS).unlink(missing_ok=True)  # of an earlier call that made both splits
    for name in ("train.jsonl", f"{TEST_SPLIT}.jsonl"):
        if name not in files:
            (out / name).unlink(missing_ok=True)
    atomic_write(out / CARD, card(recipe, manifest))
    atomic_write(out / MANIFEST, json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
    return manifest


def _check_out(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; give a folder")
    if out.is_dir() and any(out.iterdir()) and read_manifest(out) is None:
        raise UserError(f"--out {out} holds files that sorl-data did not write; give a new folder")
