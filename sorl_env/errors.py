"""Errors that a user can cause and mend, and the suggestions that go with them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

_MOST_NAMES = 20  # that a message lists

_LONGEST_NAME = 200


class UserError(ValueError):
    """A mistake in what the user gave: a flag, a config, a file, a data row.

    The message names the bad value and the next move. Command-line programs print it without a traceback; as a
    library error it is an ordinary ``ValueError``.
    """


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that helps after an unknown name: the closest known ones, or else all of them.

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
    """What is wrong with a path at which a file was looked for in vain, and the nearest names beside it.

    Args:
        suffixes: of the files that could be meant; all names beside it when empty.
        what: was looked for, as ``file or folder``.
    """
    if path.is_dir():
        return f"{path}: it is a folder; a file is wanted"
    if path.is_symlink() and not path.exists():
        return f"{path}: a link to {path.readlink()}, which is not there"
    if path.exists():
        return f"{path}: it is no ordinary file"
    if not path.parent.is_dir():
        return f"{path}: no such {what}. There is no folder {path.parent} either"
    names = [entry.name for entry in path.parent.iterdir() if not suffixes or entry.name.endswith(suffixes)]
    if names:
        return f"{path}: no such {what}. {did_you_mean(path.name, names)}"
    return f"{path}: no such {what}; the folder {path.parent} has none{' of ' if suffixes else ''}{', '.join(suffixes)}"
