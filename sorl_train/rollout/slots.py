"""Who owns which row of the sampler's cache, and which of them decode."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sorl_env.rollout import SampledTurn, SamplingParams
from sorl_train.rollout.kv_cache import RowCache


@dataclass(eq=False)
class Row:
    """One trajectory in flight; ``reply`` is there while a turn of it is being drawn."""

    session: str
    slot: int
    cached: list[int] = field(default_factory=list)  # the tokens whose keys and values are in the cache
    pending: list[int] = field(default_factory=list)  # tokens to feed before the next draw
    drawn: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    params: SamplingParams = field(default_factory=lambda: SamplingParams(1))
    draws: np.random.Generator = None  # type: ignore[assignment]  # each turn brings its own
    reply: asyncio.Future[SampledTurn] | None = None

    def settle(self, error: Exception | None) -> bool:
        """Tell who waits for a turn: ``error``, or that it is cancelled. Returns whether anybody does."""
        reply, self.reply = self.reply, None
        if reply is None or reply.done() or reply.get_loop().is_closed():
            return False
        if error is None:
            reply.cancel()
        else:
            reply.set_exception(error)
        return True


class Slots:
    """The slots of a cache and their owners; the rows that decode are in front, ``[0, num_active)``.

    A slot of the cache is empty unless a row owns it, and then it holds that row's tokens and no others. This is what
    keeps one dialogue's tokens out of another's. Only this class and the forward pass change what a slot holds, and
    the rule is asserted for all slots whenever a row is admitted, and for those that are fed at every forward pass.

    Args:
        cache: of as many rows as there are slots; all of them empty.
    """

    def __init__(self, cache: RowCache) -> None:
        self.num_active = 0
        self._cache = cache
        self._rows: dict[str, Row] = {}  # by session
        self._by_slot: list[Row | None] = [None] * len(cache.lengths)

    def get(self, session: str) -> Row | None:
        """The row of a session; None where it has none."""
        return self._rows.get(session)

    def admit(self, session: str) -> Row:
        """A row for a session that has none, in a slot that is free and empty.

        Raises:
            ValueError: all slots are taken.
        """
        if len(self._rows) == len(self._by_slot):
            raise ValueError(
                f"session {session}: more than max_concurrency={len(self._by_slot)} trajectories in flight"
            )
        for slot in (slot for slot, owner in enumerate(self._by_slot) if owner is None):
            left = self._cache.lengths[slot]
            assert left == 0, f"slot {slot} is nobody's, and holds {left} tokens of an earlier session"
        slot = len(self._rows)  # free unless a trajectory before it is over
        if self._by_slot[slot] is not None:
            slot = self._by_slot.index(None)
        row = self._rows[session] = self._by_slot[slot] = Row(session, slot)
        return row

    def drop(self, row: Row) -> None:
        """Take a row out and empty its slot. One that is out already is left alone: its slot may be another's now."""
        if self._rows.get(row.session) is not row:
            return
        del self._rows[row.session]
        if row.slot < self.num_active:
            self.deactivate(row)
        self._by_slot[row.slot] = None
        self._cache.free(row.slot)

    def clear(self) -> list[Row]:
        """Take all rows out and empty all slots; returns the rows."""
        rows = list(self._rows.values())
        self._rows.clear()
        self._by_slot = [None] * len(self._by_slot)
        self.num_active = 0
        for slot in range(len(self._by_slot)):
            self._cache.free(slot)
        return rows

    def activate(self, rows: Sequence[Row]) -> slice:
        """Put ``rows`` behind those that decode, moving none that is there already; returns their slots."""
        slots = slice(self.num_active, self.num_active + len(rows))
        here = {row.slot for row in rows}
        vacant = [slot for slot in range(slots.start, slots.stop) if slot not in here]
        for row in rows:
            if row.slot >= slots.stop:
                self._move(row, vacant.pop())
        self.num_active = slots.stop
        return slots

    def deactivate(self, row: Row) -> None:
        """Take a row out of those that decode; it keeps what it holds."""
        self._move(row, self.num_active - 1)
        self.num_active -= 1

    def rows_in(self, slots: slice) -> list[Row]:
        """The rows in ``slots``, where none is free."""
        rows = [row for row in self._by_slot[slots] if row is not None]
        held, cached = self._cache.lengths[slots].tolist(), [len(row.cached) for row in rows]
        assert held == cached, (
            f"slots {slots.start} to {slots.stop - 1} hold {held} tokens, but their rows have read {cached}"
        )
        return rows

    def _move(self, row: Row, slot: int) -> None:
        """Give ``row`` another slot; who was there, if anyone, takes its old one."""
        if slot == row.slot:
            return
        other = self._by_slot[slot]
        if other is None:
            self._cache.move(row.slot, slot)
        else:
            self._cache.swap(row.slot, slot)
            other.slot = row.slot
        self._by_slot[row.slot], self._by_slot[slot] = other, row
        row.slot = slot
