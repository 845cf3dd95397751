"""What reads a policy's text or a server's does so in linear time.

The readers run on texts so long that quadratic time would be ten times the limit. Python's engine for patterns heeds no
other limit than that of the process, so they run in one of their own. A function with a new pattern that meets such
text belongs into ``READERS``.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from sorl_env.errors import did_you_mean
from sorl_env.rewards import multiple_choice, normalize_answer, substring_match
from sorl_env.text import read_json
from sorl_env.tool import as_tool
from sorl_env.trajectory.token_classes import classify_text, token_spans
from sorl_env.turns.format import neutralise_controls
from sorl_env.turns.tags import parse_turn
from sorl_env.turns.tool_calls import SYNTAXES, parse_message
from sorl_tasks import minihop
from sorl_tools.index import words
from sorl_train.evaluate import ask
from sorl_train.evaluate.answers import read_answer
from sorl_train.openrlhf import launch
from sorl_train.report.dialogues import segments
from sorl_train.rollout.metrics import holds_answer

LENGTH, SECONDS = 60_000, 2  # the slowest reader takes an eighth of a second
METALS = {"A": "Iron", "B": "Zinc", "C": "A reduction in the B", "D": "iron iron iron iron zinc"}


def search(query: str) -> str:
    """Search."""
    return query


TOOLS = (as_tool(search),)
READERS: Mapping[str, Callable[[str], Any]] = {
    "parse_turn": lambda text: parse_turn(text, ("search", "calculate")),
    **{
        f"parse_message {name}": lambda text, syntax=syntax: parse_message(text, TOOLS, syntax)
        for name, syntax in SYNTAXES.items()
    },
    "parse_message in a call": lambda text: [
        parse_message(f"{syntax.open}{text}{syntax.close}", TOOLS) for syntax in SYNTAXES.values()
    ],
    "parse_message in parameters": lambda text: parse_message(
        f"<tool_call><function=search>{'<parameter=query>' * (len(text) // 17)}</function></tool_call>", TOOLS
    ),
    "neutralise_controls": neutralise_controls,
    "read_json": lambda text: read_json(json.dumps(text)),
    "normalize_answer": normalize_answer,
    "substring_match": lambda text: substring_match(text, ["is x is x is y", "Paris"]),
    "multiple_choice": lambda text: multiple_choice(text, "A", METALS),
    "did_you_mean": lambda text: did_you_mean(text, ["search", "calculate", "lookup_passage"]),
    "read_answer of a choice": lambda text: read_answer(text, "cot", METALS),
    "read_answer cot": lambda text: read_answer(text, "cot"),
    "read_answer direct": lambda text: read_answer(text, "direct"),
    "holds_answer": lambda text: holds_answer(text, ["A reduction in the B", "Paris of 1900"]),
    "segments": segments,
    "classify_text": classify_text,
    "token_spans": lambda text: token_spans(text, [text[i : i + 3] for i in range(0, len(text), 3)]),
    "token_spans of other text": lambda text: token_spans(text, ["q"] * len(text)),
    "minihop passages": lambda text: minihop._read_fact(text, "Nobody", "capital"),
    "a worker's exception": launch._EXCEPTION.findall,
    "colours of a terminal": lambda text: ask._COLOUR.sub("", text),
    "words of a query": lambda text: words.PATTERN.findall(text),
}
# what is repeated, and between what
TEXTS = (
    ("The ", "answer is ", ""), ("answer is", "\n", ""), ("", " ", "x"), ("", "\n", "x"), ("", "A", ""),
    ("", "A or ", ""), ("not ", "B ", "."), ("", "B is ", "wrong"), ("", "\\boxed{", ""), ("", "**", "B"),
    ("", "(", "B"), ("", "<answer>", ""), ("", "</answer>", ""), ("", "</think><answer>", ""),
    ("<think>", "<search>", "</think>"), ("", "<a><b>", "</a>"), ("", "<a", ">"), ("", "<", ""), ("", "iron ", ""),
    ("", "the answer ", "Iron"), ("", "A: Iron B: Zinc ", ""), ("that ", "is ", ""), ("", "9.", ""),
    ("", "1,000", ""), ("", "a'", ""), ("", "a-", ""), ("", "Doc 1 (", ""), ("", "Doc 1 (x\n", ""),
    ("", "is x ", "is y"), ("", "\ud83d\ude00", ""), ("", "\u0301", "e"), ("Question:", " ", ""), ("", "{[", ""),
)  # fmt: skip


def read_all(readers: Mapping[str, Callable[[str], Any]], seconds: int) -> None:
    """Run each reader on each text; a read that takes more seconds of the processor ends the process."""
    for reader, read in readers.items():
        for before, repeated, after in TEXTS:
            print(reader, repr(repeated), flush=True)
            signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
            read(before + repeated * (LENGTH // len(repeated)) + after)
    print("all read")


def run(readers: str, seconds: int = SECONDS) -> str:
    """What ``read_all`` prints in a process of its own."""
    code = f"import re, runpy; own = runpy.run_path({__file__!r}); own['read_all']({readers}, {seconds})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
    return done.stdout[-300:] + done.stderr[-600:]


@pytest.mark.slow
def test_every_reader_reads_long_texts() -> None:
    assert run("own['READERS']").endswith("all read\n")


@pytest.mark.parametrize("pattern", [r"(?s)<answer>(.*?)</answer>", r"\s+x"])
def test_a_pattern_that_is_not_linear_is_stopped(pattern: str) -> None:
    """A pattern that this project had, and a textbook one."""
    assert "all read" not in run(f"{{'bad': re.compile({pattern!r}).findall}}", seconds=1)
