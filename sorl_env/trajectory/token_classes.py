"""The part of a turn that each token of the policy belongs to: tags, reasoning, query or answer. Needs no torch.

The paper's appendix says that clipped tokens are mostly those of the format; metrics by class show whether they are.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sorl_env.trajectory.trajectory import Trajectory, Turn
from sorl_env.turns.tool_calls import REASONING_MARKERS, SYNTAXES

CLASSES = ("tag", "reasoning", "query", "answer", "other")
TAG, REASONING, QUERY, ANSWER, OTHER = range(len(CLASSES))
_TAG = re.compile(r"<(/?)([A-Za-z_][\w-]*)>")
REACH = 8  # characters ahead in which a token's piece is looked for
_BLOCKS = {"think": REASONING, "answer": ANSWER}


class TokenClassifier:
    """Finds the classes of a trajectory's tokens from the text of its turns; takes a transformers tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}  # by token id; decoding is slow

    def __call__(self, trajectory: Trajectory) -> NDArray[np.int8]:
        """(L,) indices into ``CLASSES``; -1 for tokens that the policy did not sample."""
        classes = np.full(len(trajectory.token_ids), -1, dtype=np.int8)
        tags = trajectory.metadata.get("format", "tags") == "tags"
        for turn in trajectory.turns:
            ids = trajectory.token_ids[turn.start : turn.end].tolist()
            of_characters = classify_text(turn.text) if tags else classify_message(turn)
            spans = token_spans(turn.text, [self._piece(token) for token in ids])
            classes[turn.start : turn.end] = [of_characters[begin] for begin, _ in spans]
        return classes

    def texts(self, trajectory: Trajectory) -> list[str]:
        """What each token of the policy adds to the text of its turn, in order, with the spaces before it."""
        texts = []
        for turn in trajectory.turns:
            pieces = [self._piece(token) for token in trajectory.token_ids[turn.start : turn.end].tolist()]
            end = 0
            for piece, (_, stop) in zip(pieces, token_spans(turn.text, pieces), strict=True):
                texts.append(turn.text[end:stop] or piece)  # part of a character, or beyond the text
                end = max(end, stop)
        return texts

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self._tokenizer.decode([token])
        return self._pieces[token]


def classify_text(text: str) -> list[int]:
    """The class of each character, and of the position after the last one: (len(text) + 1,).

    The text after an opening tag belongs to its block, whether the block is closed or not. A block that is neither
    ``think`` nor ``answer`` calls the tool of that name, so its text is a query.
    """
    classes, inside, end = [], OTHER, 0
    for match in _TAG.finditer(text):
        closing, name = match.groups()
        classes += [inside] * (match.start() - end) + [TAG] * len(match[0])
        inside, end = OTHER if closing else _BLOCKS.get(name, QUERY), match.end()
    return classes + [inside] * (len(text) - end) + [classes[-1] if classes and end == len(text) else inside]


def classify_message(turn: Turn) -> list[int]:
    """As ``classify_text``, for a message with a tool call or an answer: a call is ``tag`` but for its argument."""
    text = turn.text
    classes = [OTHER] * (len(text) + 1)
    for kind, start, end in message_parts(turn):
        if kind == "tool":
            argument = text.find(turn.content, start, end) if turn.content else -1
            # an argument that is written in another way than it is passed on, such as JSON, is all of the call
            classes[start:end] = [QUERY if argument < 0 else TAG] * (end - start)
            if argument >= 0:
                classes[argument : argument + len(turn.content)] = [QUERY] * len(turn.content)
        else:
            classes[start:end] = [_PARTS[kind]] * (end - start)
    classes[-1] = TAG  # the token that ends the message
    return classes


_PARTS = {"think": REASONING, "answer": ANSWER, "plain": OTHER}


def message_parts(turn: Turn) -> list[tuple[str, int, int]]:
    """The parts of a message as (kind, start, end), in order; the kinds are ``think``, ``tool``, ``answer`` and
    ``plain``, which is what an invalid message says."""
    text = turn.text
    closings = ((text.find(closing), closing) for _, closing in REASONING_MARKERS)
    thought = next((at + len(closing) for at, closing in closings if at >= 0), 0)
    said = turn.kind if turn.kind in ("tool", "answer") else "plain"
    if said == "tool":  # what is said before a call is thought aloud
        opens = [text.find(syntax.open, thought) for syntax in SYNTAXES.values()]
        thought = min((at for at in opens if at >= 0), default=thought)
    parts = [("think", 0, thought), (said, thought, len(text))]
    return [part for part in parts if part[1] < part[2]]


def token_spans(text: str, pieces: list[str]) -> list[tuple[int, int]]:
    """Where each token's piece begins and ends in the text, without the spaces around it.

    The pieces need not add up to the text: word-level tokenizers add spaces, and byte-level ones may split a character
    over several tokens. A piece that is not found gets an empty span where the one before it ended.
    """
    spans, position, after_space = [], 0, 0
    for piece in pieces:
        word, begin = piece.strip(), position
        if word:
            found = text.find(word, begin, begin + len(word) + REACH)
            if found < 0:  # more than REACH characters of space may precede it
                begin = after_space = max(begin, after_space)  # so that no space is passed over twice
                while begin < len(text) and text[begin].isspace():
                    begin = after_space = begin + 1
                found = text.find(word, begin, begin + len(word) + REACH)
            if found >= 0:
                begin, position = found, found + len(word)
        spans.append((begin, max(begin, position)))
    return spans
