"""Everything that reads what a policy wrote or what was retrieved, as functions of one text.

``python readers.py LENGTH SECONDS`` runs each on texts of that length.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from sorl_env.errors import did_you_mean
from sorl_env.option_text import option_words
from sorl_env.parser import neutralise, parse_turn
from sorl_env.rewards import (
    exact_match,
    f1,
    multiple_choice,
    normalize_answer,
    substring_match,
)
from sorl_env.text import read_json, valid_text
from sorl_env.token_classes import classify_text, token_spans
from sorl_env.tool import ToolCall, as_tool
from sorl_env.tool_call_parser import SYNTAXES, parse_message
from sorl_env.turn_format import neutralise_controls
from sorl_tasks import minihop
from sorl_tools.index import words
from sorl_tools.search.stats import holds_answer, search_metrics
from sorl_train.evaluate import ask
from sorl_train.evaluate.answers import answer_in_text, read_answer
from sorl_train.openrlhf import launch
from sorl_train.report.dialogues import segments

METALS = {"A": "Iron", "B": "Zinc", "C": "A reduction in the B", "D": "iron iron iron iron zinc"}


def _call(text: str) -> ToolCall:
    return ToolCall("search", text, text)


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
    "neutralise": neutralise,
    "neutralise_controls": neutralise_controls,
    "valid_text": valid_text,
    "read_json": lambda text: read_json(json.dumps(text)),
    "normalize_answer": normalize_answer,
    "exact_match": lambda text: exact_match(text, ["Paris"]),
    "substring_match": lambda text: substring_match(text, ["is x is x is y", "Paris"]),
    "f1": lambda text: f1(text, ["Paris"]),
    "multiple_choice": lambda text: multiple_choice(text, "A", METALS),
    "did_you_mean": lambda text: did_you_mean(text, ["search", "calculate", "lookup_passage"]),
    "option_words": option_words,
    "read_answer of a choice": lambda text: read_answer(text, "cot", METALS),
    "read_answer cot": lambda text: read_answer(text, "cot"),
    "read_answer direct": lambda text: read_answer(text, "direct"),
    "answer_in_text": lambda text: answer_in_text(text, ["A"], METALS),
    "holds_answer": lambda text: holds_answer([_call(text)], ["Paris of 1900"]),
    "search_metrics": lambda text: search_metrics([([_call(text)], ["Paris"])]),
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
TEXTS: tuple[tuple[str, str, str], ...] = (
    ("The ", "answer is ", ""),
    ("", "answer", ""),
    ("answer is", "\n", ""),
    ("", " ", "x"),
    ("", "\n", "x"),
    ("", "A", ""),
    ("", "A or ", ""),
    ("", "A, ", ""),
    ("not ", "B ", "."),
    ("", "not ", "B"),
    ("", "B is ", "wrong"),
    ("", "I choose ", ""),
    ("", "\\boxed{", ""),
    ("", "**", "B"),
    ("", "(", "B"),
    ("", "<answer>", ""),
    ("", "</answer>", ""),
    ("", "<think>", ""),
    ("", "</think><answer>", ""),
    ("<think>", "<search>", "</think>"),
    ("", "<a><b>", "</a>"),
    ("", "<a", ">"),
    ("", "<", ""),
    ("", "iron ", ""),
    ("", "iron.", "zinc"),
    ("", "the ", ""),
    ("", "the answer ", "Iron"),
    ("", "A: Iron B: Zinc ", ""),
    ("", "it is ", "B"),
    ("that ", "is ", ""),
    ("", "9", ""),
    ("", "9.", ""),
    ("", "1,000", ""),
    ("", "a'", ""),
    ("", "-", ""),
    ("", "a-", ""),
    ("", "Doc 1 (", ""),
    ("", "Doc 1 (x\n", ""),
    ("", "is x ", "is y"),
    ("", "\ud83d\ude00", ""),
    ("", "\u0301", "e"),
    ("Question:", " ", ""),
    ("", "search", ""),
    ("", "{[", ""),
)


def text_of(parts: tuple[str, str, str], length: int) -> str:
    """A text of about ``length`` characters."""
    return parts[0] + parts[1] * (length // len(parts[1])) + parts[2]


def read_all(readers: Mapping[str, Callable[[str], Any]], length: int, seconds: int) -> None:
    """Run each reader on each text; a read that takes more seconds of the processor ends the process.

    Python's engine for patterns heeds no other limit.
    """
    for reader, read in readers.items():
        for parts in TEXTS:
            sys.stdout.write(f"{reader} {parts!r}\n")
            sys.stdout.flush()
            signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
            read(text_of(parts, length))
    sys.stdout.write("all read\n")


if __name__ == "__main__":
    read_all(READERS, int(sys.argv[1]), int(sys.argv[2]))
