r"""AlphaMed19K: medical multiple choice with search, as in the paper.

A row has one of two forms:

- the published columns: ``question`` with its options inside (``..\nA: ..\nB: ..``), ``answer`` (a letter) and
  ``subset_name``;
- options as a mapping: ``question``, ``options`` ({"A": .., "B": ..}, up to J), and the letter, either in
  ``answer_idx`` (as in MedQA) or as the only one of ``golden_answers`` (as ``sorl-data prepare`` writes all of them).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sorl_env.rewards import multiple_choice
from sorl_env.task import Example, HubSource, Task
from sorl_env.turns.tags import ParsedTurn
from sorl_tasks._qa import last_answer, row_id, sample, search_tools, text_column

# The paper's "Prefix Prompt for the Medical Task" (appendix), word for word.
_INSTRUCTION = """\
Answer the given medical multiple-choice question. Think step-by-step inside <think> and </think> tags.

When you encounter:
- Unfamiliar medical terminology or drug names
- Complex disease mechanisms you're uncertain about
- Specific treatment protocols or guidelines you need to verify
- Any information where you lack confidence

You can search for clarification using <search> query </search>, and results will appear between <information> and \
</information>.
Use search strategically to fill knowledge gaps and improve answer accuracy.
After sufficient reasoning and any necessary searches, provide your final answer inside <answer> and </answer> with \
ONLY the letter (e.g., <answer>A</answer>)."""

_TOOL_CALL_INSTRUCTION = (
    "Answer the given medical multiple-choice question. Search for terms, mechanisms, treatments and facts that you "
    "are not sure about, with one call at a time. Then reply with ONLY the letter of the answer (for example: A)."
)

_LABEL = re.compile(r"\s+([A-E]):\s*")
_LETTER = re.compile(r"[A-J]")


def prompt(example: Example) -> str:
    """The paper's instruction, the question and its options."""
    return f"{_INSTRUCTION}\n\n{_asked(example)}\n"


def tool_call_prompt(example: Example) -> str:
    """As ``prompt``, for tool calls: it names no tags."""
    return f"{_TOOL_CALL_INSTRUCTION}\n\n{_asked(example)}"


def _asked(example: Example) -> str:
    options = "\n".join(f"{letter}: {text}" for letter, text in (example.options or {}).items())
    return f"Question: {example.question}\nOptions:\n{options}"


def reward(example: Example, turns: Sequence[ParsedTurn]) -> Mapping[str, float]:
    """1 for the right letter (``A``, ``A.``, ``(A)``, or ``A:`` with that option's text), else 0."""
    answer = last_answer(turns)
    letter = example.golden_answers[0]
    return {"multiple_choice": 0.0 if answer is None else multiple_choice(answer, letter, example.options)}


def parse_row(row: Mapping[str, Any]) -> Example:
    """An example from a row in one of the two forms that this module's docstring describes. Raises ``KeyError`` if a
    column is missing, and ``ValueError`` if a column is empty, or the options and the answer do not match."""
    question = text_column(row, "question")
    if row.get("options") is not None:
        stem, options = question, _read_options(row["options"])
        column = "answer_idx" if "golden_answers" not in row else "golden_answers"
    else:
        stem, options = split_options(question)
        column = "answer"
    letter = _only_letter(row) if column == "golden_answers" else text_column(row, column)
    if letter not in options:
        raise ValueError(f"column {column!r} is {letter!r}, not one of the options {', '.join(options)}")
    return Example(
        id=row_id(row, question),
        question=stem,
        golden_answers=(letter,),
        options=options,
        metadata={name: row[name] for name in _KEPT if row.get(name) is not None},
    )


_KEPT = ("subset_name", "subject", "medical_task", "body_system", "question_type", "gold_ids")


def _only_letter(row: Mapping[str, Any]) -> str:
    letters = row["golden_answers"]
    if not isinstance(letters, (list, tuple)) or len(letters) != 1 or not isinstance(letters[0], str):
        raise ValueError(f"column 'golden_answers' must hold one letter, as ['B'], not {letters!r}")
    return letters[0]


def split_options(question: str) -> tuple[str, dict[str, str]]:
    r"""The question itself, and the options at its end.

    A label is a letter from A to E with white space before it and a colon after it. The options are the last A and the
    letters that follow it in order, so that a "hepatitis A: .." in the question, or a "type B: .." in an option, is
    text.

    >>> split_options("Which vitamin?\nA: C\nB: D")
    ('Which vitamin?', {'A': 'C', 'B': 'D'})

    Raises ``ValueError`` if there are fewer than two options.
    """
    labels: list[re.Match[str]] = []
    for match in _LABEL.finditer(question):
        if match[1] == "A":
            labels = [match]
        elif labels and ord(match[1]) == ord(labels[-1][1]) + 1:
            labels.append(match)
    if len(labels) < 2:
        raise ValueError("column 'question' has no options: write '..\\nA: ..\\nB: ..' or a column 'options'")
    ends = [match.start() for match in labels[1:]] + [len(question)]
    options = {match[1]: question[match.end() : end].strip() for match, end in zip(labels, ends, strict=True)}
    return question[: labels[0].start()].strip(), options


def wrong_answer(example: Example) -> str:
    """The letter of another option."""
    return next(letter for letter in example.options or () if letter != example.golden_answers[0])


def _read_options(options: Any) -> dict[str, str]:
    if not isinstance(options, Mapping):
        raise ValueError(f"column 'options' must map letters to texts, not be {options!r}")
    texts = dict(sorted(options.items()))
    while texts and texts[last := list(texts)[-1]] is None:
        del texts[last]  # columnar formats give all rows the same letters, and None for those that they lack
    for letter, text in texts.items():
        if not isinstance(text, (str, int, float)) or isinstance(text, bool):
            raise ValueError(f"column 'options': {letter} must be a text, not {text!r}")
    if len(texts) < 2 or not all(_LETTER.fullmatch(letter) for letter in texts):
        raise ValueError(f"column 'options' must hold two or more of the letters A to J, not {list(texts)}")
    return {letter: str(text).strip() for letter, text in texts.items()}


def choice_task(
    name: str,
    env_id: str,
    description: str,
    parse_published: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    *,
    hub: HubSource | None = None,
    corpus: str = "alphamed19k",
) -> Task:
    """A benchmark with the search tool and a reward for the letter. ``parse_published`` gives a row as its authors
    publish it ``options`` and ``answer_idx``; ``corpus`` names the embedded sample of passages."""

    def parse(row: Mapping[str, Any]) -> Example:
        is_common = row.get("options") is not None and ("golden_answers" in row or "answer_idx" in row)
        return parse_row(row if is_common or parse_published is None else parse_published(row))

    return Task(
        name=name,
        description=description,
        env_id=env_id,
        prompt=prompt,
        tool_call_prompt=tool_call_prompt,
        reward=reward,
        parse_row=parse,
        tools=search_tools(corpus),
        embedded=sample(name, parse),
        embedded_is_sample=True,
        hub=hub,
        wrong_answer=wrong_answer,
    )


TASK = choice_task(
    "alphamed19k",
    "sorl/AlphaMed19K-v0",
    "AlphaMed19K: medical multiple choice, scored by the letter.",
    hub=HubSource("che111/AlphaMed19K"),
)
