"""Errors that a user can cause and correct, suggestions to go with them, what is installed, and ranges of numbers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import httpx

_MOST_NAMES = 20  # names that a message lists
_LONGEST_NAME = 200  # characters of an unknown name that are compared


class UserError(ValueError):
    """A mistake in what the user gave: an option, a config, a file, a row of data.

    The message names the wrong value and says what to do. Commands print it without a traceback; in Python it is a
    ``ValueError``.
    """


def install_command(extras: str) -> str:
    """The command that installs these extras of sorl, for the end of a message. It installs from a clone, because sorl
    is not on PyPI, where somebody else may take the name.

    >>> install_command("train")
    'pip install -e ".[train]" in your clone of sorl'
    """
    return f'pip install -e ".[{extras}]" in your clone of sorl'


def installed(package: str) -> str | None:
    """The version of an installed package; None if it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


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


def http_address(text: str, option: str, example: str) -> httpx.URL:
    """The address of a server. Raises ``UserError``, which names ``option`` and an ``example``, for any other text."""
    import httpx

    try:
        url = httpx.URL(text)
        if url.scheme not in ("http", "https") or not url.host:
            raise httpx.InvalidURL("it begins with neither http:// nor https://, or has no host")
        # the system would take the remainder of a division by 65536 for the port
        if url.port is not None and not 0 < url.port < 1 << 16:
            raise httpx.InvalidURL(f"a port lies between 1 and 65535, it is {url.port}")
    except httpx.InvalidURL as error:
        raise UserError(f"{option}={text!r}: {error}; give an address such as {example}") from error
    return url


MOST = 2**31 - 1  # the largest whole number that may count something
MAX_SEED = 2**63 - 1


class Bounds(NamedTuple):
    """A value must be at least ``low``, at most ``high`` and larger than ``above``; None: no bound on that side."""

    low: float | None = None
    high: float | None = None
    above: float | None = None

    def problem(self, value: float) -> str | None:
        """What is wrong with ``value``, as a phrase to follow its name; None when the value fits.

        >>> Bounds(low=1).problem(0)
        'must be at least 1, it is 0'
        """
        fits = (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
        )
        return None if fits else f"{self._rule(value)}, it is {value}"

    def _rule(self, value: float) -> str:
        if self.above is not None:
            return f"must be above {self.above:g}" + ("" if self.high is None else f", up to {self.high:g}")
        if self.low is not None and value < self.low and self.high in (None, MOST, MAX_SEED):
            return "cannot be negative" if self.low == 0 else f"must be at least {self.low:g}"
        if self.low is None:
            return f"must be at most {self.high}"
        return f"must lie between {self.low} and {self.high}"
