"""Text from outside is made valid Unicode where it enters, and JSON is read with a single kind of error; figures are
written as a person reads them.

Questions, replies of tools and servers, and corpora all pass through here. After that, every text can be tokenized,
written as UTF-8 and compared without further checks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

MAX_DEPTH = 100  # nesting of lists and objects in JSON from outside

# An escaped half of a surrogate pair. JSON that is valid text and has no such escape holds valid text only.
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def valid_text(text: str) -> str:
    r"""``text`` as valid Unicode: halves of a surrogate pair are joined, and a half without the other is replaced.

    Python accepts a lone surrogate (``json.loads('"\\ud800"')``) until someone encodes it: then tokenizers raise
    TypeError, and files and sockets raise UnicodeEncodeError.

    >>> valid_text("a" + chr(0xD800) + "b")
    'a\ufffdb'
    """
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def read_json(text: str | bytes) -> Any:
    """The value of a JSON text from outside, in which all strings are valid text.

    Lists and objects may be nested ``MAX_DEPTH`` deep. This limit is fixed, because that of Python's parser depends on
    its version and on the caller's stack, and later code may walk the value recursively.

    Raises:
        ValueError: the text is not JSON, not UTF-8, nested too deeply, or has an integer with more digits than Python
            converts. The message says which of these, and never quotes the text.
    """
    try:
        text = text if isinstance(text, str) else text.decode(json.detect_encoding(text), "surrogatepass")
        value = json.loads(text)
        if text.count("[") + text.count("{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
            raise RecursionError
        return _with_valid_text(value) if not text.isascii() or _SURROGATE_ESCAPE.search(text) else value
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: byte {error.start} cannot be decoded") from None


def quoted(text: str, most: int = 60) -> str:
    """``text`` in quotes, shortened to ``most`` characters, for a message.

    A policy may write a megabyte, and messages go into observations, records and logs.

    >>> quoted("a" * 70, most=10)
    "'aaaaaaa...'"
    """
    return repr(text if len(text) <= most else text[: most - 3] + "...")


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether lists and objects are nested more than ``depth`` deep; found without recursion."""
    level = [value]
    for _ in range(depth + 1):
        nested = [item for item in level if isinstance(item, (list, dict))]
        level = [inner for item in nested for inner in (item.values() if isinstance(item, dict) else item)]
        if not nested:
            return False
    return True


def _with_valid_text(value: Any) -> Any:
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, list):
        return [_with_valid_text(item) for item in value]
    if isinstance(value, dict):
        return {valid_text(name): _with_valid_text(item) for name, item in value.items()}
    return value


MISSING = "–"  # noqa: RUF001  an en dash, where there is no figure


def format_number(value: Any, form: str = ".3f", missing: str = MISSING) -> str:
    """A number in a format of `format`, or ``missing`` where there is none.

    >>> format_number(0.25), format_number(None, missing="-")
    ('0.250', '-')
    """
    return f"{value:{form}}" if isinstance(value, (int, float)) else missing


def duration(seconds: float) -> str:
    """A duration in the units that suit it.

    >>> [duration(s) for s in (0.25, 0.9996, 42, 185, 7800, 8e6)]
    ['250 ms', '1 s', '42 s', '3 min 05 s', '2 h 10 min', '93 days']
    """
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 59.95:
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
