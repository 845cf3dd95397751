"""How Gymnasium's ``AsyncVectorEnv`` passes texts of any length from its processes to the main one.

Gymnasium gives a ``Text`` space one number for each of ``max_length`` characters of a fixed alphabet, which fits
neither prompts nor observations, and reads that memory only once, before the first reset. For ``UnicodeText`` the
shared memory holds the length in bytes of each environment's text, then the text as UTF-8, and it is read whenever it
is copied. Importing this module registers these functions with Gymnasium.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from gymnasium.vector.utils.shared_memory import (
    create_shared_memory,
    read_from_shared_memory,
    write_to_shared_memory,
)
from numpy.typing import NDArray

from sorl_env.spaces import UnicodeText
from sorl_env.text import valid_text

MAX_TEXT_BYTES = 1 << 18  # of one observation; a prompt of 2,048 tokens has about 10,000
_LENGTH_BYTES = 8


class SharedTexts(Sequence[str]):
    """The texts that are in shared memory now, one per environment; ``copy.deepcopy`` returns them as a tuple.

    Gymnasium keeps one such view and copies it after each step. With ``vector_kwargs={"copy": False}`` the caller gets
    the view itself, as with a numpy array over the shared memory.
    """

    def __init__(self, shared_memory: Any) -> None:
        self._rows = _rows(shared_memory)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return tuple(self)[index]
        row = self._rows[index]
        size = int(row[:_LENGTH_BYTES].view(np.int64)[0])
        return row[_LENGTH_BYTES : _LENGTH_BYTES + size].tobytes().decode()

    def __deepcopy__(self, memo: dict[int, Any]) -> tuple[str, ...]:
        return tuple(self)


@create_shared_memory.register(UnicodeText)
def _create(space: UnicodeText, n: int = 1, ctx: Any = multiprocessing) -> Any:
    return ctx.Array("B", n * (_LENGTH_BYTES + MAX_TEXT_BYTES))


@write_to_shared_memory.register(UnicodeText)
def _write(space: UnicodeText, index: int, value: str, shared_memory: Any) -> None:
    encoded = valid_text(value).encode()
    if len(encoded) > MAX_TEXT_BYTES:
        raise ValueError(
            f"an observation has {len(encoded)} bytes, more than the {MAX_TEXT_BYTES} that shared memory holds: use "
            "make_vec(.., vector_kwargs={'shared_memory': False})"
        )
    row = _rows(shared_memory)[index]
    row[:_LENGTH_BYTES].view(np.int64)[0] = len(encoded)
    row[_LENGTH_BYTES : _LENGTH_BYTES + len(encoded)] = np.frombuffer(encoded, dtype=np.uint8)


@read_from_shared_memory.register(UnicodeText)
def _read(space: UnicodeText, shared_memory: Any, n: int = 1) -> SharedTexts:
    return SharedTexts(shared_memory)


def _rows(shared_memory: Any) -> NDArray[np.uint8]:
    """A view of the shared memory, (environments, bytes per environment)."""
    flat: NDArray[np.uint8] = np.frombuffer(shared_memory.get_obj(), dtype=np.uint8)
    return flat.reshape(-1, _LENGTH_BYTES + MAX_TEXT_BYTES)
