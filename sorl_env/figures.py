"""Figures as a person reads them: numbers, durations, sizes, and tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

MISSING = "–"  # noqa: RUF001  an en dash, where there is no figure


def figure(value: Any, form: str = ".3f", missing: str = MISSING) -> str:
    """A number in a format of `format`, or ``missing`` where there is none.

    >>> figure(0.25), figure(None, missing="-")
    ('0.250', '-')
    """
    return f"{value:{form}}" if isinstance(value, (int, float)) else missing


def duration(seconds: float) -> str:
    """A duration in the units that suit it.

    >>> [duration(s) for s in (0.25, 42, 185, 7800, 8e6)]
    ['250 ms', '42 s', '3 min 05 s', '2 h 10 min', '93 days']
    """
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 72:
        return f"{seconds / 86400:.0f} days"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def size(count: float) -> str:
    """A number of bytes in powers of ten.

    >>> size(1.53e9)
    '1.5 GB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[Any]], align: str = "") -> str:
    """A table in Markdown, without a line end after the last row.

    Args:
        align: a letter for each column, ``l`` or ``r``; empty aligns all of them to the left.

    >>> print(markdown_table(["name", "share"], [["a|b", 1], ["c", ""]], "lr"))
    | name | share |
    |---|---:|
    | a\\|b | 1 |
    | c | |
    """
    marks = {"l": "---", "r": "---:"}
    rule = "|".join(marks[letter] for letter in align or "l" * len(head))
    return "\n".join([_line(head), f"|{rule}|", *map(_line, rows)])


def _line(cells: Sequence[Any]) -> str:
    texts = (str(cell).replace("|", "\\|") for cell in cells)
    return "|" + "".join(f" {text} |" if text else " |" for text in texts)
