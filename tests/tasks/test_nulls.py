"""Rows of every task with null, or another type, in every place: an error that names the row, never the text "None"."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sorl_tasks
from sorl_env import UserError, load_examples, load_task
from sorl_env.task.registry import _ENV_IDS

SAMPLES = Path(sorl_tasks.__path__[0]) / "samples"
OTHERS: list[Any] = [None, 17, 0.5, True, [], [None], {}, {"A": None}, ""]
FORMS: dict[str, list[dict[str, Any]]] = {
    "medqa": [{"question": "Which?", "options": {"A": "x", "B": "y", "C": "z"}, "answer_idx": "B"}],
    "medmcqa": [{"id": "7", "question": "Which?", "opa": "w", "opb": "x", "opc": "y", "opd": "z", "cop": 2}],
    "medxpertqa": [
        {"id": "7", "question": "Which?", "options": [{"letter": "A", "content": "x"}, {"letter": "B", "content": "y"}],
         "label": ["A"]},
    ],
    "minihop": [{"id": "7", "question": "Who?", "names": ["Ann", "Bob"], "relations": ["friend"]}],
    "bioasq": [{"id": "7", "body": "Which?", "type": "factoid", "exact_answer": [["x", "y"]]}],
    "nq": [{"id": "7", "question": "Who?", "answer": "x"}],
}  # fmt: skip


def rows_of(task: str) -> list[dict[str, Any]]:
    file = SAMPLES / f"{task}_questions.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()[:2] if file.is_file() else []
    return [json.loads(line) for line in lines] + FORMS.get(task, [])


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def replaced(row: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(row)
    inside: Any = changed
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return changed


@pytest.mark.parametrize("name", sorted(_ENV_IDS.values()))
def test_what_is_no_text_never_becomes_one(name: str, tmp_path: Path) -> None:
    task, refused, count = load_task(name), 0, 0
    path = tmp_path / "rows.jsonl"
    for row in rows_of(name):
        for place in places(row):
            for value in OTHERS:
                count += 1
                path.write_text(json.dumps(row) + "\n" + json.dumps(replaced(row, place, value)) + "\n")
                try:
                    example = load_examples(task, path).examples[1]
                except UserError as error:
                    assert f"{path}:2: " in str(error), (place, value)
                    refused += 1
                    continue
                texts = [example.id, example.question, *example.golden_answers, task.prompt(example)]
                texts += [*(example.options or {}), *(example.options or {}).values()]
                for text in texts:
                    assert isinstance(text, str), (place, value)
                    # whatever is shown or compared stood in the row as a text or as a number
                    assert not any(word in text for word in ("None", "True", "[", "{")), (place, value, text)
    assert refused > count / 4


def test_an_option_that_is_null_before_others_is_refused(tmp_path: Path) -> None:
    """Columnar formats fill up rows with fewer options, at the end; elsewhere an option is missing."""
    path = tmp_path / "rows.jsonl"
    row = {"question": "Which?", "options": {"A": "x", "B": None, "C": "z"}, "answer_idx": "C"}
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=r"rows.jsonl:1: .*column 'options': B must be a text, not None"):
        load_examples(load_task("medqa"), path)
    row["options"] = {"C": None, "A": "x", "B": "y"}
    path.write_text(json.dumps(row | {"answer_idx": "B"}) + "\n")
    assert load_examples(load_task("medqa"), path).examples[0].options == {"A": "x", "B": "y"}
