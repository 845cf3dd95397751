"""Tests wait for conditions, not for moments: what takes a millisecond here takes seconds on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

# Far beyond what any condition takes on a machine with other work. Only a failing test waits this long.
PATIENCE_S = 120.0


def wait_until(condition: Callable[[], T], explain: Callable[[], Any] = lambda: "") -> T:
    """Ask ``condition`` again and again until it is true, and return its value.

    Raises:
        AssertionError: it is still false after ``PATIENCE_S`` seconds; ``explain()`` becomes part of the message.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not true after {PATIENCE_S:g} s: {condition} {explain()}")
        time.sleep(0.01)
