"""What the question-answering tasks share: samples, rows, the Search-R1 prompt and reward."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError, did_you_mean
from sorl_env.rewards import answer_match
from sorl_env.task import Example, ToolSettings
from sorl_env.tool import ToolLike
from sorl_env.turns.tags import ParsedTurn
from sorl_tools.search.bm25_search import search_tool

_SAMPLES = Path(__file__).parent / "samples"
_SPLITS = ("train", "test")
_TEST_EVERY = 4

# Search-R1's instruction (arXiv 2503.09516, Table 1), nearly word for word.
_INSTRUCTION = (
    "Answer the given question. You must reason inside <think> and </think> first, every time you get new "
    "information. After reasoning, if you find that you lack some knowledge, you can call a search engine by "
    "<search> query </search>, and it will return the top search results between <information> and "
    "</information>. You can search as many times as you want. If you find that no further outside knowledge is "
    "needed, give the answer inside <answer> and </answer>, without detailed explanations. For example, "
    "<answer> Beijing </answer>. Question: "
)


_TOOL_CALL_INSTRUCTION = (
    "Answer the given question. Search for what you do not know, as often as you want, with one call at a time. When "
    "no further knowledge is needed, reply with the answer alone, without explanations, for example: Beijing"
    "\nQuestion: "
)


def qa_prompt(example: Example) -> str:
    """The instruction and the question, which ends in a question mark as in Search-R1's prepared data."""
    return f"{_INSTRUCTION}{_asked(example)}\n"


def qa_tool_call_prompt(example: Example) -> str:
    """As ``qa_prompt``, for tool calls: it names no tags."""
    return f"{_TOOL_CALL_INSTRUCTION}{_asked(example)}"


def _asked(example: Example) -> str:
    question = example.question.strip()
    return question if question.endswith("?") else f"{question}?"


def qa_reward(example: Example, turns: Sequence[ParsedTurn]) -> Mapping[str, float]:
    """1 if the policy's answer matches after SQuAD's normalization (`answer_match`), else 0; 0 without an answer."""
    answer = last_answer(turns)
    return {"exact_match": 0.0 if answer is None else answer_match(answer, example.golden_answers)}


def parse_qa_row(row: Mapping[str, Any]) -> Example:
    """An example from a row with ``question`` and ``golden_answers`` (as Search-R1 publishes them) or ``answer``.
    Answers are a text or a list of texts. ``id`` is used if the row has one; the columns in `_KEPT` become metadata.
    Raises ``KeyError`` if a column is missing, and ``ValueError`` if a column is empty or of another type."""
    question = text_column(row, "question")
    column = "answer" if "golden_answers" not in row and "answer" in row else "golden_answers"
    answers = (row[column],) if isinstance(row[column], str) else row[column]
    if not isinstance(answers, (list, tuple)) or not answers or not all(isinstance(a, str) for a in answers):
        raise ValueError(f"column {column!r} must be a text or a list of texts, not {row[column]!r}")
    return Example(
        id=row_id(row, question),
        question=question,
        golden_answers=tuple(answers),
        metadata={name: row[name] for name in _KEPT if row.get(name) is not None},
    )


_KEPT = ("type", "level", "supporting_facts", "gold_titles", "gold_ids")


def text_column(row: Mapping[str, Any], name: str) -> str:
    """A column that must hold a text. Raises ``KeyError`` if there is no such column, and ``ValueError`` if it is
    empty, or is not a text."""
    value = row[name]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"column {name!r} must be a text, not {value!r}")
    return value.strip()


def row_id(row: Mapping[str, Any], question: str) -> str:
    """The row's ``id``, or else a hash of the question, which is the same in every data set. Raises ``ValueError`` if
    it is neither a text nor a whole number."""
    name = row.get("id")
    if isinstance(name, (str, int)) and not isinstance(name, bool) and name != "":
        return str(name)
    if name not in (None, ""):
        raise ValueError(f"column 'id' must be a text or a whole number, not {name!r}")
    return hashlib.sha256(question.encode()).hexdigest()[:12]


def in_share(example: Example, share: float) -> bool:
    """Whether an example is in a share of the examples; always the same, and unrelated to its content."""
    return zlib.crc32(example.id.encode()) < share * 2**32


def last_answer(turns: Sequence[ParsedTurn]) -> str | None:
    """The policy's last answer, or None if it gave none."""
    return next((turn.content for turn in reversed(turns) if turn.kind == "answer"), None)


def sample(
    name: str, parse_row: Callable[[Mapping[str, Any]], Example]
) -> Callable[[str], Sequence[Example]]:
    """The sample written for this project: every fourth question is for testing, the others are for training."""

    def embedded(split: str) -> Sequence[Example]:
        if split not in _SPLITS:
            raise UserError(f"the sample of {name} has no split {split!r}. {did_you_mean(split, _SPLITS)}")
        train: list[Example] = []
        test: list[Example] = []
        with (_SAMPLES / f"{name}_questions.jsonl").open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                (train if number % _TEST_EVERY else test).append(parse_row(json.loads(line)))
        return tuple(test if split == "test" else train)

    return embedded


def search_tools(name: str) -> Callable[[ToolSettings], Sequence[ToolLike]]:
    """One search tool, over the corpus or server of the settings, or else over the passages of the sample."""
    return lambda settings: (search_tool(settings, sample=_SAMPLES / f"{name}_corpus.jsonl"),)
