"""Errors that a user can cause and correct, and the suggestions that go with them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

_MOST_NAMES = 20  # names that a message lists
_LONGEST_NAME = 200  # characters of an unknown name that are compared


class UserError(ValueError):
    """A mistake in what the user gave: an option, a config, a file, a row of data.

    The message names the wrong value and says what to do. Commands print it without a traceback; in Python it is a
    ``ValueError``.
    """


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence for the end of a message about an unknown name: the closest known names, or else all of them.

    >>> did_you_mean("so_pppo", ["ppo", "so_ppo"])
    "Did you mean 'so_ppo'?"
    """
    name = name[:_LONGEST_NAME]  # the comparison takes quadratic time, and the name may come from outside
    names = sorted(known)
    by_lower = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name.lower(), list(by_lower), n=3, cutoff=0.6)
    if close:
        return f"Did you mean {' or '.join(repr(by_lower[match]) for match in close)}?"
    if not names:
        return "There are none."
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"Known: {', '.join(names[:_MOST_NAMES])}{more}."


def no_such_file(path: Path, suffixes: tuple[str, ...] = (), what: str = "file") -> str:
    """Why there is no file to read at ``path``, and the most similar names beside it.

    Args:
        suffixes: only files with these suffixes are suggested; any name when empty.
        what: what was looked for, such as ``file or folder``.
    """
    if path.is_dir():
        return f"{path}: it is a folder; give a file"
    if path.is_symlink() and not path.exists():
        return f"{path}: a link to {path.readlink()}, which does not exist"
    if path.exists():
        return f"{path}: it is not an ordinary file"
    if not path.parent.is_dir():
        return f"{path}: no such {what}. Its folder {path.parent} does not exist either"
    names = [entry.name for entry in path.parent.iterdir() if not suffixes or entry.name.endswith(suffixes)]
    return f"{path}: no such {what}. {did_you_mean(path.name, names)}"
