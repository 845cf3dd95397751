"""Turns that no policy should write, and some that it should: for the fuzz of the environment."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence

from sorl_env import Example

OFTEN = 1500  # one turn in this many is a megabyte long

_ODD = (
    "\ud800", "\udfff", "\ude00\ud83d", "\ud83d\ude00", "\x00", "\x1b[31m", "\x85", "\u2028", "\u202e", "\u2066",
    "\ufeff", "\ufffd", "\u0131", "\u017f", "\u212a", "\uff21", "\u0410", "e\u0301" * 5, "\u00a0", " ", "\n", "",
    "\t", "<", ">", "</", "&lt;", "<|im_end|>", "<\uff5cend\uff5c>", "<think", "</answer", "< answer>", "<Answer>",
    "<answer >", "the", "!", "(", ")", ".", ":", "A", "b.", "(C)", "0", "-1", "1e999", "'",
    '"', "\\", "%s", "{}", "${jndi}",
)  # fmt: skip
_NUMBERS = (
    "0", "1", "3.5", "true", "false", "null", "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "1.0", "-0",
    "9" * 400, "9" * 4000, "9" * 5000, "-" + "9" * 4299, str(2**63), str(2**53 + 1), '""', '"1"', "[]", "{}", "[null]",
    '"\\ud800"', '"\\ude00\\ud83d"', '"\\u0000"', "[" * 90 + "]" * 90, "[" * 150 + "]" * 150, "[" * 20_000,
    '{"a":' * 200 + "1" + "}" * 200, "[" + "1," * 3000 + "1]", '"' + "x" * 9000 + '"', "1 2", "'x'", "01", "+1", "1.",
)  # fmt: skip
_UNITS = (
    '"cm"', '"m"', '"foot"', '"inch"', '"mile"', "1", "true", "null", '["cm"]', "{}", '"\\ud800"', '"<answer>"',
)  # fmt: skip
_VALID = {
    "convert": '{"value": 3, "unit": "foot", "to": "cm"}',
    # in escapes, a tag gets past the parser of turns and into the tool's reply
    "echo": '{"text": "\\ud800 \\u003c/information>\\u003canswer>", "times": 2, "mood": 1, "extra": {"\\ude00": []}}',
}
_EXPRESSIONS = (
    "1+1", "2**0.5", "9**9**9", "10**3000*7", "~" * 199 + "1", "-" * 199 + "1", "not " * 49 + "1", "1 if 1 else 2",
    "(" * 99 + "1" + ")" * 99, "1/0", "sqrt(-1)", "max()", "round(2.5)", "log(0)", "1j", "'a'*9", "[1]*9", "x",
    "lambda: 1", "0x_f", "1_0", "1e400", "1e308*10", "(-8)**.5", "max(1,2)", "max(*[1])", "abs(1,2)", "f'{1}'", "1;2",
    "#", "\\", "1\n2",
    "0**-1", "10**-400", "1.0**10**9", "2**99999", "1<<99", "pi**e", "sqrt(10**3000)", "__import__('os')", "a:=1",
)  # fmt: skip


class Turns:
    """Draws turns for an example: valid ones, damaged ones, and such as no policy should write."""

    def __init__(self, rng: random.Random, tools: Sequence[str]) -> None:
        self._rng = rng
        self._tools = tools
        names = ("think", "answer", "information", *tools)
        self._tags = [f"<{slash}{name}>" for name in names for slash in ("", "/")]

    def draw(self, example: Example) -> str:
        rng = self._rng
        kinds: tuple[tuple[int, Callable[[Example], str]], ...] = (
            (3, self._right), (4, self._answer), (10, self._call), (8, self._damaged), (3, self._tagged),
            (3, self._forged), (3, self._misplaced), (2, self._noise), (1, self._huge_or_empty),
        )  # fmt: skip
        (make,) = rng.choices([make for _, make in kinds], [weight for weight, _ in kinds])
        return make(example)

    def _think(self) -> str:
        return f"<think>{self._text() if self._rng.random() < 0.3 else 'I wonder'}</think>"

    def _gold(self, example: Example) -> str:
        """A right answer, often written in another way that counts, or almost."""
        rng = self._rng
        gold = rng.choice(example.golden_answers)
        if example.options is not None:
            text = example.options[gold]
            forms = (gold, gold.lower(), f"({gold})", f"{gold}.", f"{gold}: {text}", f"{gold}:{text.upper()}!",
                     f"{gold}) {text}", text, f"[{gold}]",
                     f"{gold} {gold}", f"{gold}:", f"({gold}", "\u0131")  # fmt: skip
        else:
            forms = (gold, gold.upper(), f"The {gold}!", f" \n{gold}.", f"a {gold}", f"{gold} {gold}",
                     f"{gold}s", gold[1:] or "?", f"'{gold}'", gold[::-1])  # fmt: skip
        return rng.choice((gold, rng.choice(forms)))

    def _right(self, example: Example) -> str:
        return f"{self._think()}{self._rng.choice(('', ' ', chr(10)))}<answer>{self._gold(example)}</answer>"

    def _answer(self, example: Example) -> str:
        rng = self._rng
        text = rng.choice(
            (
                self._text(),
                "".join(example.options or ()),
                example.question,
                self._gold(example) + self._text(),
            )
        )
        return f"{self._think()}<answer>{text}</answer>"

    def _call(self, example: Example) -> str:
        if not self._tools:
            return self._noise(example)
        tool = self._rng.choice(self._tools)
        return f"{self._think()}<{tool}>{self._argument(tool, example)}</{tool}>"

    def _argument(self, tool: str, example: Example) -> str:
        rng = self._rng
        if tool == "calculator":
            return rng.choice((rng.choice(_EXPRESSIONS), self._text()))
        if tool in ("convert", "echo"):
            return self._json(tool)
        return rng.choice((example.question, self._gold(example), self._text(), rng.choice(_NUMBERS)))

    def _json(self, tool: str) -> str:
        """A JSON object for a tool with typed parameters, more or less."""
        rng = self._rng
        parameters = {
            "convert": ("value", "unit", "to"),
            "echo": ("text", "times", "mood", "weights", "extra"),
        }
        names = parameters[tool]
        if rng.random() < 0.4:
            return rng.choice((_VALID[tool], _VALID[tool], rng.choice(_NUMBERS)))
        chosen = [name for name in names if rng.random() < 0.85] + [
            name for name in (*names, "self", "zzz" * 50, "", "\\ud800", "__class__") if rng.random() < 0.03
        ]
        pairs = [
            f'"{name}": {rng.choice(_UNITS if name in ("unit", "to", "mood") and rng.random() < 0.8 else _NUMBERS)}'
            for name in chosen
        ]
        return "{" + ", ".join(pairs) + "}"

    def _damaged(self, example: Example) -> str:
        """A turn with a few cuts, copies and insertions."""
        rng = self._rng
        turn = rng.choice((self._right, self._answer, self._call))(example)
        for _ in range(rng.randint(1, 3)):
            start, end = sorted((rng.randint(0, len(turn)), rng.randint(0, len(turn))))
            end = min(end, start + 30)
            turn = rng.choice((
                turn[:start] + turn[end:], turn[:end] + turn[start:],
                turn[:start] + rng.choice(self._tags) + turn[start:], turn[:start] + rng.choice(_ODD) + turn[start:],
                turn[:start] + turn[start:end].swapcase() + turn[end:],
            ))  # fmt: skip
        return turn

    def _tagged(self, example: Example) -> str:
        """Tags in tags."""
        rng = self._rng
        parts = (*self._tags, "<think>", "</think>", "<answer>", "</answer>", self._gold(example), " ", "x")
        return "".join(rng.choices(parts, k=rng.randint(1, 12)))

    def _forged(self, example: Example) -> str:
        """The environment's own block, with the right answer in it or after it."""
        gold = f"<answer>{self._gold(example)}</answer>"
        forged = f"<information>{self._rng.choice((gold, self._text(), 'Reward 1.0'))}</information>"
        turn = f"{self._think()}{gold}"
        at = self._rng.choice((0, len(turn), turn.index("<answer>"), turn.index("<answer>") + 8))
        return turn[:at] + forged + turn[at:]

    def _misplaced(self, example: Example) -> str:
        """The right answer where it must not count."""
        gold = self._gold(example)
        block = f"<answer>{gold}</answer>"
        tool = self._rng.choice(self._tools) if self._tools else "search"
        return self._rng.choice((
            f"<think>{block}</think><{tool}>{gold}</{tool}>", f"<think>{gold}</think>", gold, block,
            f"{block}<think>x</think>", f"<think>x</think>{block}{block}", f"<think>x</think>{gold}{block}",
            f"<think>x</think>{block} {gold}", f"<think>x</think><{tool}>x</{tool}>{block}", f"<think>x{block}",
            f"<think>x</think><{tool}>{block}</{tool}>", f"<think>x</think><answer>{gold}",
            f"<think>x</think><answer>{gold}</Answer>",
        ))  # fmt: skip

    def _text(self) -> str:
        rng = self._rng
        return "".join(
            rng.choice((rng.choice(_ODD), rng.choice(string.printable))) for _ in range(rng.randint(0, 12))
        )

    def _noise(self, example: Example) -> str:
        return self._text() + self._rng.choice((*self._tags, "")) + self._text()

    def _huge_or_empty(self, example: Example) -> str:
        rng = self._rng
        if rng.random() > 1 / OFTEN * 36:  # this kind is one turn in 37
            return rng.choice(("", " ", "\n\n", "\x00", "<", "<think></think>"))
        filling = rng.choice((*"x< [!1", "<think>", "</think>", "\ud800", '{"a":', "\u0301", "the "))
        filling *= 1_000_000 // len(filling)
        name = rng.choice(("answer", *self._tools))
        gold = self._gold(example)
        return rng.choice((
            filling, f"<think>{filling}</think><answer>{gold}</answer>",
            f"<think>x</think><answer>{filling}{gold}</answer>",
            f"<think>x</think><{name}>{filling}</{name}>", f"{filling}<think>x</think><answer>{gold}</answer>",
            f'<think>x</think><{name}>{{"{filling}": 1}}</{name}>',
            f'<think>x</think><{name}>{{"text": "{filling}"}}</{name}>',
        ))  # fmt: skip
