"""A backtracking matcher that counts its steps, and texts on which a pattern may need too many.

Python's own engine cannot be asked how often it tried. This one takes the same parsed pattern and tries in the same
order, and counts; `test_linear_time` checks that both find the same. It is slow: for a few hundred characters.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

if sys.version_info >= (3, 11):
    from re import _constants as sre
    from re import _parser as parser
else:
    import sre_constants as sre
    import sre_parse as parser

Rest = Callable[[int], "int | None"]
_CATEGORIES = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda c: c.isalnum() or c == "_",
}


class TooManySteps(Exception):
    """The limit of a `StepCounter` was reached."""


class StepCounter:
    """Finds what ``re.finditer`` finds, and counts how many parts of the pattern it tried (``steps``)."""

    def __init__(self, pattern: re.Pattern[str], limit: int = 300_000) -> None:
        self.limit = limit
        self.tree = list(parser.parse(pattern.pattern, pattern.flags))
        self.flags = pattern.flags
        self.steps = 0

    def spans(self, text: str) -> list[tuple[int, int]]:
        """The spans of all matches in a text."""
        self.text, self.steps = text, 0
        found, at, last = [], 0, -1
        while at <= len(text):
            self.groups: dict[int, tuple[int, int]] = {}
            end = self._run(self.tree, 0, at, lambda stop: stop)
            if end is None or (end == at == last):
                at += 1
                continue
            found.append((at, end))
            last = end
            at = end if end > at else at + 1
        return found

    def _run(self, nodes: Any, index: int, at: int, rest: Rest) -> int | None:
        self.steps += 1
        if self.steps > self.limit:
            raise TooManySteps(f"more than {self.limit} steps")
        if index == len(nodes):
            return rest(at)
        code, value = nodes[index]
        name = str(code)
        if name in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
            fits = at < len(self.text) and self._is_in(name, value, self.text[at])
            return self._run(nodes, index + 1, at + 1, rest) if fits else None

        def go_on(stop: int) -> int | None:
            return self._run(nodes, index + 1, stop, rest)

        if name == "AT":
            return go_on(at) if self._is_at(str(value), at) else None
        if name == "BRANCH":
            ends = (self._run(list(branch), 0, at, go_on) for branch in value[1])
            return next((end for end in ends if end is not None), None)
        if name == "SUBPATTERN":
            return self._group(value[0], list(value[3]), at, go_on)
        if name == "GROUPREF":
            start, stop = self.groups.get(value, (0, -1))
            said = self.text[start:stop] if stop >= 0 else None
            self.steps += len(said or "")
            return go_on(at + len(said)) if said is not None and self.text.startswith(said, at) else None
        if name in ("ASSERT", "ASSERT_NOT"):
            start = at - value[1].getwidth()[0] if value[0] < 0 else at
            holds = start >= 0 and self._run(list(value[1]), 0, start, lambda stop: stop) is not None
            return go_on(at) if holds == (name == "ASSERT") else None
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            return self._repeat(value[0], value[1], list(value[2]), 0, at, go_on, name == "MAX_REPEAT")
        raise NotImplementedError(f"{name}: teach StepCounter this part of patterns")

    def _group(self, number: int | None, nodes: Any, at: int, go_on: Rest) -> int | None:
        before = self.groups.get(number) if number else None

        def close(stop: int) -> int | None:
            if number:
                self.groups[number] = (at, stop)
            return go_on(stop)

        end = self._run(nodes, 0, at, close)
        if end is None and number:
            self.groups.pop(number, None)
            if before:
                self.groups[number] = before
        return end

    def _repeat(
        self, least: int, most: Any, nodes: Any, done: int, at: int, go_on: Rest, greedy: bool
    ) -> int | None:
        self.steps += 1

        def again(stop: int) -> int | None:
            if stop == at and done >= least:
                return None  # an empty round
            return self._repeat(least, most, nodes, done + 1, stop, go_on, greedy)

        may_go_on = most is sre.MAXREPEAT or done < most
        if done < least:
            return self._run(nodes, 0, at, again)
        if greedy:
            end = self._run(nodes, 0, at, again) if may_go_on else None
            return end if end is not None else go_on(at)
        end = go_on(at)
        return end if end is not None or not may_go_on else self._run(nodes, 0, at, again)

    def _is_in(self, name: str, value: Any, char: str) -> bool:
        if name == "ANY":
            return char != "\n" or bool(self.flags & re.DOTALL)
        cases = {char, char.lower(), char.upper()} if self.flags & re.IGNORECASE else {char}
        if name != "IN":
            return (chr(value) in cases) == (name == "LITERAL")
        negated = str(value[0][0]) == "NEGATE"
        return any(self._has(item, case) for item in value for case in cases) != negated

    @staticmethod
    def _has(item: Any, char: str) -> bool:
        kind, value = str(item[0]), item[1]
        if kind == "LITERAL":
            return char == chr(value)
        if kind == "RANGE":
            return value[0] <= ord(char) <= value[1]
        if kind == "CATEGORY":
            name = str(value)
            found: bool = _CATEGORIES[name.replace("_NOT", "")](char)
            return found != ("_NOT" in name)
        return False  # NEGATE

    def _is_at(self, where: str, at: int) -> bool:
        text = self.text
        if where in ("AT_BOUNDARY", "AT_NON_BOUNDARY"):
            is_word = _CATEGORIES["CATEGORY_WORD"]
            sides = [bool(c) and is_word(c) for c in (text[max(0, at - 1) : at], text[at : at + 1])]
            return (sides[0] != sides[1]) == (where == "AT_BOUNDARY")
        multiline = bool(self.flags & re.MULTILINE)
        if where.startswith("AT_BEGINNING"):
            return at == 0 or (multiline and where == "AT_BEGINNING" and text[at - 1] == "\n")
        at_line_end = text[at : at + 1] == "\n" and (multiline or at == len(text) - 1)
        return at == len(text) or (where == "AT_END" and at_line_end)


def attacks(pattern: re.Pattern[str], count: int, seed: int = 0) -> Iterator[tuple[str, str, str]]:
    """Texts made of what a pattern knows, as (beginning, part to repeat, end): its words and samples of its classes."""
    pieces = [*dict.fromkeys(_pieces(list(parser.parse(pattern.pattern, pattern.flags))))]
    pieces += [" ", "\n", "x", "A", "0", ".", "<", "\u00e9"]
    for piece in pieces:  # each by itself, with a blank, then mixtures
        yield "", piece, "\0"
        yield "", f"{piece} ", ""
    generator = random.Random(seed)
    for _ in range(count):
        parts = ["".join(generator.choices(pieces, k=generator.randint(0, most))) for most in (2, 4, 1)]
        if parts[1]:
            yield parts[0], parts[1], parts[2]


def _pieces(nodes: Any) -> Iterator[str]:
    word = ""
    for code, value in [*nodes, ("END", None)]:
        name = str(code)
        if name == "LITERAL":
            word += chr(value)
            continue
        if word:
            yield word
            word = ""
        if name == "IN":
            for item in value:
                if str(item[0]) == "LITERAL":
                    yield chr(item[1])
                elif str(item[0]) == "RANGE":
                    yield chr(item[1][0])
        elif name == "BRANCH":
            for branch in value[1]:
                yield from _pieces(list(branch))
        elif name == "SUBPATTERN":
            yield from _pieces(list(value[3]))
        elif name in ("ASSERT", "ASSERT_NOT"):
            yield from _pieces(list(value[1]))
        elif name in ("MAX_REPEAT", "MIN_REPEAT"):
            yield from _pieces(list(value[2]))
