"""Prepares a published data set as a folder: ``{split}.jsonl`` in one schema, a manifest, and the questions that are in
both splits: the same words in the same order, after normalization.

A row is an ``Example`` as one flat object, which the tasks and ``sorl_env.task.data`` read as any other data file::

    {"id": "..", "data_source": "nq", "split": "test", "question": "..", "golden_answers": [".."], "gold_ids": [".."]}
    {"id": "..", .., "question": "..", "options": {"A": "..", "B": ".."}, "golden_answers": ["B"], "subject": ".."}

Every row names its ``split``, so that test data are still recognized in a copy under another name. The same input gives
the same bytes: nothing that is written depends on the time, the machine, or a path.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError, did_you_mean
from sorl_env.folders import new_folder
from sorl_env.task import Example
from sorl_env.task.data import TEST_SPLIT
from sorl_env.task.registry import load_task
from sorl_train.prepare.recipes import Recipe
from sorl_train.prepare.sources import Source, is_file, read_example, read_questions, read_source
from sorl_train.run.files import atomic_write

_WORD = re.compile(r"\w+")
_ARTICLES = frozenset(("a", "an", "the"))
Words = tuple[str, ...]
Key = tuple[Words, ...]  # the question's words, then those of each option


@dataclass(frozen=True)
class Pair:
    """A train question and a test question that are the same, and whether they share an answer."""

    train_id: str
    test_id: str
    same_answer: bool
    train_question: str
    test_question: str


def find_pairs(train: Sequence[Example], test: Sequence[Example]) -> list[Pair]:
    """All pairs of the same question, in the order of the test split.

    The options of a multiple-choice question belong to its text, in any order: with other options it is another
    question.
    """
    by_key: dict[Key, list[Example]] = defaultdict(list)
    for example in train:
        by_key[_key(example)].append(example)
    return [
        Pair(one.id, other.id, bool(_answers(one) & _answers(other)), one.question, other.question)
        for other in test
        for one in by_key.get(_key(other), ())
    ]


def count_pairs(pairs: Sequence[Pair]) -> dict[str, int]:
    """The number of pairs, and of train and test questions in them."""
    return {
        "pairs": len(pairs),
        "train": len({pair.train_id for pair in pairs}),
        "test": len({pair.test_id for pair in pairs}),
    }


def _key(example: Example) -> Key:
    """The words of a question and its options; options are sorted, because their order does not matter."""
    options: Mapping[str, str] = example.options or {}
    return (_words(example.question), *sorted(_words(text) for text in options.values()))


def _words(text: str) -> Words:
    words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    return tuple(word for word in words if word not in _ARTICLES) or tuple(words)


def _answers(example: Example) -> set[Words]:
    options = example.options or {}
    return {_words(options.get(answer, answer)) for answer in example.golden_answers}


MANIFEST = "sorl_data.json"  # where each data file of the folder comes from, its licence, counts and hashes
PAIRS = "overlap.jsonl"
Manifest = dict[str, Any]


def prepare(
    recipe: Recipe,
    sources: Mapping[str, str],
    out: Path,
    *,
    drop: str = "none",
    skip_unreadable: bool = False,
    test_ids: frozenset[str] | None = None,
    revision: str | None = None,
    against: Sequence[Path] = (),
) -> Manifest:
    """Read the sources (for each split, see ``read_source``), write the folder, and return its manifest.

    ``drop="exact"`` leaves out the train questions that are in test as well, or in the test files ``against``.
    ``skip_unreadable`` leaves out and counts rows that the task cannot read, instead of refusing the data. ``test_ids``
    are those of the test questions, where the published split mixes them with others. Raises ``UserError`` if a source
    cannot be read, a row is not of this data set, no row is left, or ``out`` has a split that is not prepared now, or
    files that sorl-data did not write.
    """
    _check_out(out, sources)
    examples: dict[str, list[Example]] = {}
    entries: dict[str, dict[str, Any]] = {}
    for split, reference in sources.items():
        source = read_source(reference, recipe.splits.get(split, split), recipe.configs, revision)
        examples[split], entries[split] = _read(recipe, source, split, skip_unreadable, test_ids)
    pairs = _find_overlap(examples, against)
    in_test = {pair.train_id for found in pairs.values() for pair in found}
    if in_test and drop == "exact":
        kept = [example for example in examples["train"] if example.id not in in_test]
        entries["train"]["dropped"]["also for testing"] = len(examples["train"]) - len(kept)
        examples["train"] = kept
        if not kept:
            raise UserError(
                "--drop exact: all train questions are for testing, too: give others, or leave it out"
            )
    texts, files = {}, {}
    for split, found in examples.items():
        name = f"{split}.jsonl"
        texts[name] = text = jsonl(to_row(example, recipe.name, split) for example in found)
        digest = hashlib.sha256(text.encode()).hexdigest()
        files[name] = {"split": split, "rows": len(found), "sha256": digest, **entries[split]}
    about = {"version": 3, "name": recipe.name, "licence": recipe.licence, "note": recipe.note}
    manifest: Manifest = {**about, "files": files}
    if pairs:
        counts = {name: count_pairs(found) for name, found in pairs.items()}
        manifest["overlap"] = {"dropped": drop, "with": counts}
        texts[PAIRS] = jsonl(
            {"with": name, **dataclasses.asdict(pair)} for name, found in pairs.items() for pair in found
        )
    texts[MANIFEST] = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"  # the last one
    with new_folder(out):
        # first without files, so that a call which is cut short leaves no hashes of other data
        atomic_write(out / MANIFEST, json.dumps({**about, "files": {}}) + "\n")
        (out / PAIRS).unlink(missing_ok=True)
        for name, text in texts.items():
            atomic_write(out / name, text)
    return manifest


def _find_overlap(
    examples: Mapping[str, Sequence[Example]], against: Sequence[Path]
) -> dict[str, list[Pair]]:
    """For each test file, the pairs of its questions with train; empty where there is nothing to compare."""
    if "train" not in examples:
        if against:
            raise UserError("--against needs a train split to check, and none is prepared: leave it out")
        return {}
    tests = {f"{TEST_SPLIT}.jsonl": examples[TEST_SPLIT]} if TEST_SPLIT in examples else {}
    for path in against:
        name = f"{path.resolve().parent.name}/{path.name}"
        if name in tests:
            raise UserError(f"--against {path}: another file has the same name {name}; rename its folder")
        tests[name] = read_questions(path)
    return {name: find_pairs(examples["train"], test) for name, test in tests.items()}


def choose_sources(recipe: Recipe, given: Sequence[str]) -> dict[str, str]:
    """The source of each split, from ``--source`` options: ``SPLIT=WHERE``, or one folder or hub name for all splits.
    Raises ``UserError`` for a file without its split, an unknown or repeated split, and if there is no source for a
    data set that is not on the hub."""
    if not given and recipe.hub is None:
        raise UserError(f"{recipe.name} is not on the hub: give --source. {recipe.note}")
    chosen: dict[str, str] = {}
    for text in given or [recipe.hub or ""]:
        split, equals, reference = text.partition("=")
        if not equals and is_file(text) and Path(text).expanduser().exists():
            known = " or ".join(f"--source {name}={text}" for name in recipe.splits)
            raise UserError(f"{text}: a file has one split; say which: {known}")
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
    """An example as a row, the inverse of its task's ``parse_row``."""
    row: dict[str, Any] = {
        "id": example.id,
        "data_source": data_source,
        "split": split,
        "question": example.question,
    }
    if example.options is not None:
        row["options"] = dict(example.options)
    return {**row, "golden_answers": list(example.golden_answers), **example.metadata}


def _read(
    recipe: Recipe, source: Source, split: str, skip_unreadable: bool, test_ids: frozenset[str] | None
) -> tuple[list[Example], dict[str, Any]]:
    """The examples of a split, and what the manifest says of their source and of the rows that were left out."""
    task = load_task(recipe.name)
    examples, dropped = [], Counter[str]()
    for where, published in source.rows:
        row = recipe.lift(published)
        reason = recipe.drop(row)
        if reason is not None:
            dropped[reason] += 1
            continue
        try:
            example = read_example(task.parse_row, row)
        except ValueError as error:
            if not skip_unreadable:
                raise UserError(
                    f"{where}: not a row of {recipe.name}: {error}. --skip_unreadable leaves such rows out"
                ) from error
            dropped["unreadable"] += 1
            continue
        found = _split_of(recipe, row, example.id, where, test_ids)
        if found in (None, split):
            examples.append(example)
        else:
            dropped[f"of the {found} split"] += 1
    if not examples:
        raise UserError(
            f"{source.name}: no rows of {recipe.name} for split {split!r} (left out: {dict(dropped)})"
        )
    return examples, {
        "source": source.name,
        "source_split": source.split,
        "source_sha256": source.sha256,
        "source_rows": len(source.rows),
        "dropped": dict(sorted(dropped.items())),
    }


def _split_of(
    recipe: Recipe, row: Mapping[str, Any], example_id: str, where: str, test_ids: frozenset[str] | None
) -> str | None:
    """The split of a row, by the list of test ids or by the row itself; None if neither says."""
    if test_ids is not None:
        return TEST_SPLIT if example_id in test_ids else "train"
    split = row.get("split")
    if split in ("train", TEST_SPLIT):
        return str(split)
    if recipe.mixed:
        raise UserError(
            f"{where}: it is not known whether this is a train or a test question: give --test_ids, a JSON list "
            f"or object of the test questions' ids. {recipe.note}"
        )
    return None


def _check_out(out: Path, splits: Collection[str]) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; give a folder")
    names = {path.name for path in out.iterdir() if path.suffix != ".unfinished"} if out.is_dir() else ()
    if names and MANIFEST not in names:
        raise UserError(f"--out {out} contains files that sorl-data did not write; give a new folder")
    for split in ("train", TEST_SPLIT):
        if f"{split}.jsonl" in names and split not in splits:
            what = f"the {split} split of an earlier call and this one has no source of it"
            raise UserError(f"--out {out} holds {what}: prepare both in one call, or give a new folder")


def jsonl(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
