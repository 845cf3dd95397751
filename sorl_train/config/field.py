"""``opt``: one documented field of a config dataclass."""

from __future__ import annotations

import dataclasses
from typing import Any

from sorl_env.bounds import Bounds


def opt(
    default: Any,
    help: str,
    *,
    paper: str | None = None,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
) -> Any:
    """A field of a config dataclass, with what ``--help`` says about it.

    Args:
        help: one line about the field.
        paper: the paper's value, where it gives one.
        low, high: the smallest and the largest allowed value of a number.
        above: a number that the value must exceed.
    """
    metadata = {"help": help, "paper": paper, "bounds": Bounds(low, high, above)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
