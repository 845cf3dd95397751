"""Text that comes from outside: made valid where it enters, and read as JSON with one kind of error.

Questions, tools' replies, search replies and corpora all come through here. What is behind this border can be
tokenized, written as UTF-8 and compared without a second thought.
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_DEPTH = 100  # lists and objects inside one another in JSON from outside

# An escape of half a surrogate pair. Without one, JSON of valid text holds valid text only.
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def valid_text(text: str) -> str:
    r"""``text`` as valid Unicode: halves of a surrogate pair are joined, and those without their other half replaced.

    Python keeps a lone surrogate (``json.loads('"\\ud800"')``) until somebody encodes it: tokenizers then raise
    TypeError, files and sockets UnicodeEncodeError.

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
    """The value of a JSON text from outside; all its strings are valid text.

    Values are at most ``MAX_DEPTH`` lists and objects deep. The limit is our own and fixed: where Python's parser gives
    up depends on its version and on the caller's stack, and what is behind this border may recurse over the value.

    Raises:
        ValueError: the text is not JSON, not UTF-8, nested too deeply, or has an integer with more digits than Python
            converts. The message says which, and never holds the text.
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
    """``text`` between quotes for a message, at most ``most`` characters of it.

    What a policy wrote can be a megabyte long, and a message goes into observations, records and logs.

    >>> quoted("a" * 70, most=10)
    "'aaaaaaa...'"
    """
    return repr(text if len(text) <= most else text[: most - 3] + "...")


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether more than ``depth`` lists and objects are inside one another; without recursion."""
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
