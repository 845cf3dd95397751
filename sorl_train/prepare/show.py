"""Describes a data file: counts, lengths, a few rows, and whether it was changed since it was prepared."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sorl_env.data import read_rows
from sorl_env.registry import load_task
from sorl_env.task import Example, Task
from sorl_env.tokens import Tokenizer, encode_prompt
from sorl_train.prepare.build import read_manifest
from sorl_train.prepare.questions import read_questions

_GROUPS = ("data_source", "split", "type", "level", "subset_name", "subject")
_SHOWN_CHARACTERS = 300


def describe(
    path: Path, *, rows: int = 3, task: str | None = None, tokenizer: Tokenizer | None = None
) -> Iterator[str]:
    """Lines of text about a file: counts of its rows and answers, lengths, and its first rows."""
    manifest = read_manifest(path.parent)
    entry = (manifest or {"files": {}})["files"].get(path.name)
    name = task or (manifest["name"] if manifest is not None and entry is not None else None)
    examples = read_questions(path, name)
    published = [row for _, row in read_rows(path)]
    yield f"{path}: {len(examples):,} questions"
    yield from _provenance(path, manifest, entry)
    for column in _GROUPS:
        counts = Counter(row[column] for row in published if isinstance(row.get(column), str))
        if counts:
            shown = ", ".join(f"{value} {count:,}" for value, count in counts.most_common(12))
            yield f"  {column}: {shown}" + (f", {len(counts) - 12} more" if len(counts) > 12 else "")
    yield from _answers(examples)
    yield f"  words of a question: {_spread([len(example.question.split()) for example in examples])}"
    if tokenizer is not None:
        yield from _tokens(examples, load_task(name) if name else None, tokenizer)
    for row in published[:rows]:
        text = json.dumps(row, ensure_ascii=False)
        yield "  " + (text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} ..")


def _provenance(
    path: Path, manifest: Mapping[str, Any] | None, entry: Mapping[str, Any] | None
) -> Iterator[str]:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    yield f"  SHA-256 {digest}"
    if manifest is None or entry is None:
        return
    state = "as prepared" if digest == entry["sha256"] else "CHANGED since it was prepared"
    yield f"  {state}, from {entry['source']}; {manifest['name']}, licence {manifest['licence']}"


def _answers(examples: Sequence[Example]) -> Iterator[str]:
    if all(example.options for example in examples):
        letters = Counter(example.golden_answers[0] for example in examples)
        sizes = Counter(len(example.options or ()) for example in examples)
        yield "  right option: " + ", ".join(f"{letter} {letters[letter]:,}" for letter in sorted(letters))
        yield "  options: " + ", ".join(f"{sizes[size]:,} with {size}" for size in sorted(sizes))
    else:
        yield f"  golden answers of a question: {_spread([len(e.golden_answers) for e in examples])}"


def _tokens(examples: Sequence[Example], task: Task | None, tokenizer: Tokenizer) -> Iterator[str]:
    if task is None:
        lengths = [len(encode_prompt(tokenizer, example.question, None)) for example in examples]
        yield f"  tokens of a question: {_spread(lengths)}; --task NAME counts whole prompts"
        return
    lengths = [len(encode_prompt(tokenizer, task.prompt(e), task.system_prompt)) for e in examples]
    limit = task.limits.max_prompt_tokens
    over = sum(length > limit for length in lengths)
    yield f"  tokens of a prompt: {_spread(lengths)}; {over:,} over the limit of {limit:,}"


def _spread(values: Sequence[int]) -> str:
    ordered = sorted(values)
    middle, high = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)]
    return f"median {middle:,}, 95% up to {high:,}, longest {ordered[-1]:,}"
