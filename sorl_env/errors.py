"""Errors that a user can cause and mend, and the suggestions that go with them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

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
    return f"Known: {', '.join(names)}." if names else "There are none."
