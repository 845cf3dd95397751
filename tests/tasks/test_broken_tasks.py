"""Task files with a mistake: one message that names the file and says what to write, never a fault of our own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sorl_env.commands.check_task import main as check

WHOLE = '''\
from sorl_env import Example, Task
from sorl_env.rewards import exact_match


def sql(query: str) -> str:
    """Ask the shop's table."""
    return query.lower()


def reward(example, turns):
    return {"exact_match": exact_match(turns[-1].content, example.golden_answers)}


def parse_row(row):
    return Example(str(row["id"]), row["question"], (row["gold"],))


def embedded(split):
    return [Example(str(i), f"What is {i} ?", (f"number {i}",)) for i in range(4)]


def prompt(example):
    return f"Think in <think> , ask with <sql> , answer in <answer> . {example.question}"


TASK = Task(name="shop", prompt=prompt, reward=reward, parse_row=parse_row, tools=[sql], embedded=embedded)
'''


def run(tmp_path: Path, old: str, new: str, *options: str) -> tuple[int, Path]:
    assert old in WHOLE
    file = tmp_path / "shop.py"
    file.write_text(WHOLE.replace(old, new))
    return check([str(file), *options]), file


def test_the_whole_task_is_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "shop", "shop")[0] == 0, capsys.readouterr()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('    return {"exact', '    {"exact', "its reward (FILE:10) returned None; return {name: number}"),
        ('return {"exact_match"', 'return 1, {"exact_match"', "returned (1, {'exact_match': 1.0}) (tuple); return {na"),
        ('return {"exact_match"', 'return 1.0 #', "returned 1.0 (float); return {name: number}"),
        ("query: str", "query", "task shop: tool sql: parameter 'query' needs a type hint, such as `: str`"),
        ("[sql]", "sql", "failed; return a list of tools; if sql is a tool itself, write tools=[sql]"),
        ("[sql]", "lambda settings, size=3: 4", "called with the settings, returned 4"),
        ("[sql]", "'sql'", "FILE: task 'shop': tools='sql'; give a list, as [search]"),
        ("[sql]", "[3]", "task shop: 3 is not a tool: give a function"),
        ("[sql]", "lambda settings: sql", "(FILE:26), called with the settings, returned <function sql"),
        ("[sql]", "lambda s: s.lower()", "failed; return a list of tools; if <lambda> is a tool itself"),
        ('(f"number {i}",)', 'f"number {i}"', "golden_answers is 'number 0'; give a tuple of texts, as ('Paris',)"),
        ('(f"number {i}",)', "(i,)", "(FILE:18): example '0': golden_answers holds 0 (int); give a text"),
        ("Example(str(i)", "Example(i", "(FILE:18): example 0: id holds 0 (int); give a text, as str(..)"),
        ("[Example(str(i)", "[(str(i)", "embedded examples (FILE:18): there is ('0', 'What is 0 ?', ('number 0',))"),
        ("    return f", "    f", "its prompt (FILE:22) returned None; return a text"),
        ("prompt=prompt", "prompt=''", "FILE: task 'shop': prompt=''; give a function"),
        ("prompt=prompt", "prompt=prompt, limits={}", "FILE: task 'shop': limits={}; give Limits(..)"),
        ('(row["gold"],))', 'row["gold"])', "rows.jsonl:1: not a row of task shop: example '1'"),
        ('Example(str(row["id"]), row["question"], (row["gold"],))', "None", "parse_row (FILE:14) returned None"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_message(
    old: str, new: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"id": 1, "question": "Who?", "gold": "x"}))
    status, file = run(tmp_path, old, new, *(["--data", str(rows)] if "row[" in old else []))
    out, error = capsys.readouterr()
    assert status == 1 and said.replace("FILE", str(file)) in error, (out, error)
    assert error.startswith("sorl-check-task: ") and "fault of sorl" not in error
