"""Which part of a turn each of the policy's tokens belongs to: tags, reasoning, query, answer. No torch.

The paper's appendix says that clipped tokens are mostly those of the format. Metrics by class show whether they are.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sorl_env.trajectory import Trajectory

CLASSES = ("tag", "reasoning", "query", "answer", "other")
TAG, REASONING, QUERY, ANSWER, OTHER = range(len(CLASSES))
_TAG = re.compile(r"<(/?)([A-Za-z_][\w-]*)>")
REACH = 8  # characters that are looked through for a piece
_BLOCKS = {"think": REASONING, "answer": ANSWER}


class TokenClassifier:
    """Classes of a trajectory's tokens, from the text of its turns; ``tokenizer`` is a transformers tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}  # of each id seen; decoding one costs more than all the rest

    def __call__(self, trajectory: Trajectory) -> NDArray[np.int8]:
        """(L,) index into ``CLASSES``; -1 off the policy's tokens."""
        classes = np.full(len(trajectory.token_ids), -1, dtype=np.int8)
        for turn in trajectory.turns:
            ids = trajectory.token_ids[turn.start : turn.end].tolist()
            of_characters = classify_text(turn.text)
            spans = token_spans(turn.text, [self._piece(token) for token in ids])
            classes[turn.start : turn.end] = [of_characters[begin] for begin, _ in spans]
        return classes

    def texts(self, trajectory: Trajectory) -> list[str]:
        """Of each of the policy's tokens, in their order: what it adds to the text of its turn, spaces before it
        included."""
        texts = []
        for turn in trajectory.turns:
            pieces = [self._piece(token) for token in trajectory.token_ids[turn.start : turn.end].tolist()]
            end = 0
            for piece, (_, stop) in zip(pieces, token_spans(turn.text, pieces), strict=True):
                texts.append(turn.text[end:stop] or piece)  # a piece of a character, or beyond the text's end
                end = max(end, stop)
        return texts

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self._tokenizer.decode([token])
        return self._pieces[token]


def classify_text(text: str) -> list[int]:
    """The class of each character, and of the end of the text.

    What follows an opening tag belongs to its block, closed or not; a block that is neither ``think`` nor ``answer`` is
    a call of the tool it is named after, and holds a query.
    """
    classes, inside, end = [], OTHER, 0
    for match in _TAG.finditer(text):
        closing, name = match.groups()
        classes += [inside] * (match.start() - end) + [TAG] * len(match[0])
        inside, end = OTHER if closing else _BLOCKS.get(name, QUERY), match.end()
    return classes + [inside] * (len(text) - end) + [classes[-1] if classes and end == len(text) else inside]


def token_spans(text: str, pieces: list[str]) -> list[tuple[int, int]]:
    """Where each token's piece begins and ends in the text, spaces around it left out.

    Pieces need not add up to the text: word-level tokenizers add spaces, and a character may be spread over several
    tokens of a byte-level one. A piece that is not found is empty and lies where the one before it ended.
    """
    spans, position, after_space = [], 0, 0
    for piece in pieces:
        word, begin = piece.strip(), position
        if word:
            found = text.find(word, begin, begin + len(word) + REACH)
            if found < 0:  # there may be more space before it than REACH
                begin = after_space = max(begin, after_space)  # no space is walked over twice
                while begin < len(text) and text[begin].isspace():
                    begin = after_space = begin + 1
                found = text.find(word, begin, begin + len(word) + REACH)
            if found >= 0:
                begin, position = found, found + len(word)
        spans.append((begin, max(begin, position)))
    return spans
