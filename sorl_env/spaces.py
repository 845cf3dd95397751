"""The space of all strings."""

from __future__ import annotations

import multiprocessing
import string
from typing import Any

import numpy as np
from gymnasium.error import CustomSpaceError
from gymnasium.spaces import Text
from gymnasium.vector.utils import create_shared_memory

_SAMPLED = string.ascii_letters + string.digits + " .,?!'-<>/äßøπшжの漢"


class UnicodeText(Text):
    """Any Python string, of any length. ``sample`` draws short lines of letters, markup signs and non-ASCII text.

    >>> "<answer>naïve</answer>" in UnicodeText()
    True
    """

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(max_length=64, min_length=1, charset=_SAMPLED, seed=seed)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "UnicodeText()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnicodeText)


@create_shared_memory.register(UnicodeText)
def _refuse(space: UnicodeText, n: int = 1, ctx: Any = multiprocessing) -> Any:
    """Let ``AsyncVectorEnv`` ask for ``shared_memory=False``: the arrays that it shares hold texts of one length."""
    raise CustomSpaceError("a text of any length fits no shared memory")
