"""The range that a number must lie in, where a user gives it on a command line or in a config."""

from __future__ import annotations

from typing import NamedTuple

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
