"""The key-value cache of the sampler: one row for each trajectory in flight, who owns it, and how tokens are drawn."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sorl_env.rollout import SampledTurn, SamplingParams
from sorl_train.models.attention import AttentionMasks, text_config
from sorl_train.models.forward import logits_at

COLUMNS = 64  # the capacity is a multiple of this


class RowCache:
    """Keys and values of all rows, (layers, 2, rows, kv_heads, capacity, head_dim), written in place. It replaces a
    transformers ``Cache``: the model calls ``update`` once in each layer. Before a forward pass, ``select`` says which
    rows it covers and where their new tokens go. The mask that it returns hides what lies beyond a row's length, and
    what lies before a layer's window. Hidden values must be finite all the same: NaN times an attention weight of 0 is
    NaN. Raises ``UserError`` if the model keeps more than keys and values (see ``AttentionMasks.of``)."""

    def __init__(self, model: Any, rows: int, dtype: torch.dtype, capacity: int) -> None:
        self._masks = AttentionMasks.of(model)
        config = text_config(model)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, rows, heads, capacity, head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=next(model.parameters()).device)
        self.lengths = np.zeros(rows, dtype=np.int64)
        self._rows = slice(0, 0)
        self._width = 0
        self._row_index: Tensor = torch.empty(0)
        self._column_index: Tensor = torch.empty(0)

    @property
    def capacity(self) -> int:
        """Tokens that a row can hold before the cache has to grow."""
        return self.data.shape[4]

    def select(self, rows: slice, new_tokens: int) -> tuple[Tensor, Tensor | dict[str, Tensor]]:
        """Prepare a forward pass of ``new_tokens`` columns over ``rows``. Returns position ids (b, n), and the mask (b,
        1, n, w) to be added to the attention scores, or one such mask for each kind of layer. A boolean mask would be
        converted to this form in every layer."""
        lengths = self.lengths[rows]
        self._width = int(lengths.max()) + new_tokens
        self._grow(self._width)
        device = self.data.device
        columns = torch.as_tensor(lengths, device=device)[:, None] + torch.arange(new_tokens, device=device)
        self._rows, self._column_index = rows, columns
        self._row_index = torch.arange(rows.start, rows.stop, device=device)[:, None]
        return columns, self._masks.make(columns, self._width, self.data.dtype)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values, each (b, heads, n, dim); return all of the selected rows, up to the longest."""
        for kind, new in enumerate((keys, values)):
            stored = new.transpose(1, 2).to(self.data.dtype)
            self.data[layer, kind, self._row_index, :, self._column_index] = stored
        view = self.data[layer, :, self._rows, :, : self._width]
        return view[0], view[1]

    def get_seq_length(self, layer: int = 0) -> int:
        """The length of the longest selected row, which some models ask a transformers ``Cache`` for."""
        return int(self.lengths[self._rows].max())

    @torch.inference_mode()
    def swap(self, a: int, b: int) -> None:
        """Exchange the contents of two rows."""
        width = int(max(self.lengths[a], self.lengths[b]))
        kept = self.data[:, :, a, :, :width].clone()
        self.data[:, :, a, :, :width] = self.data[:, :, b, :, :width]
        self.data[:, :, b, :, :width] = kept
        self.lengths[[a, b]] = self.lengths[[b, a]]

    @torch.inference_mode()
    def copy(self, sources: Sequence[int], targets: Sequence[int], most: int | None = None) -> None:
        """Copy rows, or at most that number of their first tokens, into empty rows, pair by pair."""
        assert not self.lengths[targets].any(), (
            f"rows {targets} are not empty: {self.lengths[targets]} tokens"
        )
        lengths = self.lengths[sources]
        self.lengths[targets] = lengths if most is None else np.minimum(lengths, most)
        width = int(self.lengths[targets].max(initial=0))
        self.data[:, :, targets, :, :width] = self.data[:, :, sources, :, :width]

    def free(self, row: int) -> None:
        """Empty a row by setting its length to 0; what is beyond a row's length is never read."""
        self.lengths[row] = 0

    def _grow(self, width: int) -> None:
        if width <= self.capacity:
            return
        layers, two, rows, heads, capacity, dim = self.data.shape
        # Rows begin at whole cache lines at any capacity: the alignment of a row decides the order of its sums.
        wanted = -(-max(width, capacity * 3 // 2) // COLUMNS) * COLUMNS
        data = self.data.new_zeros((layers, two, rows, heads, wanted, dim))
        data[..., :capacity, :] = self.data
        self.data = data


@functools.cache
def cache_argument(model: Any) -> str:
    """The name under which the ``forward`` of a class takes the cache: transformers 5.24 begins to rename it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.inference_mode()
def feed(model: Any, cache: RowCache, rows: slice, tokens: Sequence[Sequence[int]]) -> Tensor:
    """Read ``tokens``, a list for each of ``rows``, into the cache; returns logits (b, V) after the last of each."""
    kind: Any = type(model)
    device = cache.data.device
    counts = np.fromiter((len(new) for new in tokens), dtype=np.int64)
    columns = np.zeros((len(tokens), counts.max()), dtype=np.int64)
    for i, new in enumerate(tokens):
        columns[i, : len(new)] = new
    last = torch.as_tensor(counts - 1, device=device)
    positions, mask = cache.select(rows, columns.shape[1])
    inputs = {
        "input_ids": torch.from_numpy(columns).to(device),
        "attention_mask": mask,
        # Padding gets the position of its row's last token: the model may have no later ones.
        "position_ids": torch.minimum(positions, positions.gather(1, last[:, None])),
        cache_argument(kind): cache,
        "use_cache": True,
    }
    logits = logits_at(model, lambda hidden: hidden[torch.arange(len(tokens), device=device), last], inputs)
    cache.lengths[rows] += counts
    return logits


@dataclass(eq=False)
class ActiveRollout:
    """One trajectory in flight. ``reply`` is set while a turn of it is being sampled."""

    session: str
    slot: int
    cached: list[int] = field(default_factory=list)  # tokens whose keys and values are in the cache
    pending: list[int] = field(default_factory=list)  # tokens to feed before the next one is sampled
    drawn: list[int] = field(default_factory=list)  # tokens of the turn so far, with their log-probabilities
    log_probs: list[float] = field(default_factory=list)
    params: SamplingParams = field(default_factory=lambda: SamplingParams(1))
    draws: np.random.Generator = None  # type: ignore[assignment]  # set at the beginning of each turn
    reply: asyncio.Future[SampledTurn] | None = None

    def settle(self, error: Exception | None) -> bool:
        """End the turn without a result: the waiting caller gets ``error``, or is cancelled where that is None. Returns
        whether a caller was waiting."""
        reply, self.reply = self.reply, None
        if reply is None or reply.done() or reply.get_loop().is_closed():
            return False
        if error is None:
            reply.cancel()
        else:
            reply.set_exception(error)
        return True


class Slots:
    """The slots of a cache and the rows that own them. Decoding rows are in front, in the slots ``[0, num_active)``. A
    slot without an owner is empty, and a slot with one holds that row's tokens and no others. This keeps the tokens of
    one dialogue out of another. Only this class and the forward pass change what a slot holds. The rule is asserted for
    all slots when a row is admitted, and for the slots of each forward pass. ``cache`` is empty at first, and has a row
    for each slot."""

    def __init__(self, cache: RowCache) -> None:
        self.num_active = 0
        self._cache = cache
        self._rows: dict[str, ActiveRollout] = {}  # by session
        self._by_slot: list[ActiveRollout | None] = [None] * len(cache.lengths)

    def get(self, session: str) -> ActiveRollout | None:
        """The row of a session, if it has one."""
        return self._rows.get(session)

    def all_rows(self) -> list[ActiveRollout]:
        """All rows, decoding or not."""
        return list(self._rows.values())

    def admit(self, session: str) -> ActiveRollout:
        """Give a session its row, in a free slot. Raises ``ValueError`` if all slots are taken."""
        if len(self._rows) == len(self._by_slot):
            raise ValueError(
                f"session {session}: more than max_concurrency={len(self._by_slot)} trajectories in flight"
            )
        for slot in (slot for slot, owner in enumerate(self._by_slot) if owner is None):
            left = self._cache.lengths[slot]
            assert left == 0, f"slot {slot} has no owner, but holds {left} tokens of an earlier session"
        slot = len(self._rows)  # the first one behind the others, which is free unless a row has left
        if self._by_slot[slot] is not None:
            slot = self._by_slot.index(None)
        row = self._rows[session] = self._by_slot[slot] = ActiveRollout(session, slot)
        return row

    def drop(self, row: ActiveRollout) -> None:
        """Remove a row and empty its slot, unless it is removed already: another row may own that slot now."""
        if self._rows.get(row.session) is not row:
            return
        del self._rows[row.session]
        if row.slot < self.num_active:
            self.deactivate(row)
        self._by_slot[row.slot] = None
        self._cache.free(row.slot)

    def clear(self) -> list[ActiveRollout]:
        """Remove all rows, which are returned, and empty all slots."""
        rows = list(self._rows.values())
        self._rows.clear()
        self._by_slot = [None] * len(self._by_slot)
        self.num_active = 0
        self._cache.lengths[:] = 0
        return rows

    def activate(self, rows: Sequence[ActiveRollout]) -> slice:
        """Move ``rows`` into the slots right after the decoding rows (rows already there stay); returns these slots."""
        slots = slice(self.num_active, self.num_active + len(rows))
        here = {row.slot for row in rows}
        vacant = [slot for slot in range(slots.start, slots.stop) if slot not in here]
        for row in rows:
            if row.slot >= slots.stop:
                self._move(row, vacant.pop())
        self.num_active = slots.stop
        return slots

    def deactivate(self, row: ActiveRollout) -> None:
        """Move a row out of the decoding rows. Its tokens stay cached."""
        self._move(row, self.num_active - 1)
        self.num_active -= 1

    def rows_in(self, slots: slice) -> list[ActiveRollout]:
        """The rows that own ``slots``, none of which is free."""
        rows = [row for row in self._by_slot[slots] if row is not None]
        held, cached = self._cache.lengths[slots].tolist(), [len(row.cached) for row in rows]
        assert held == cached, (
            f"slots {slots.start} to {slots.stop - 1} hold {held} tokens, but their rows have read {cached}"
        )
        return rows

    def _move(self, row: ActiveRollout, slot: int) -> None:
        """Give ``row`` another slot. A row that owns it gets the old slot of ``row``."""
        if slot == row.slot:
            return
        other = self._by_slot[slot]
        if other is None:
            self._cache.copy([row.slot], [slot])
            self._cache.free(row.slot)
        else:
            self._cache.swap(row.slot, slot)
            other.slot = row.slot
        self._by_slot[row.slot], self._by_slot[slot] = other, row
        row.slot = slot


@torch.inference_mode()
def draw(logits: Tensor, rows: Sequence[ActiveRollout]) -> tuple[list[int], list[float]]:
    """Sample one token for each row from logits (b, V). Returns the tokens and their log-probabilities in the
    distribution that they were drawn from: after the temperature and ``top_p``, which is 1 where a row is greedy. vLLM
    can report no others after the temperature."""
    temperatures = [row.params.temperature for row in rows]
    scale = torch.tensor([t or 1.0 for t in temperatures], device=logits.device)
    log_probs = torch.log_softmax(logits.float() / scale[:, None], dim=-1)
    limits = [row.params.top_p if row.params.temperature else 1.0 for row in rows]
    if not any(temperatures):
        tokens = log_probs.argmax(dim=-1)
    else:
        uniforms = torch.tensor(
            [row.draws.random() if row.params.temperature else 0.0 for row in rows],
            dtype=torch.float64,
            device=logits.device,
        )
        probs = log_probs.exp()
        if min(limits) < 1.0:
            probs, log_mass = _nucleus(probs, limits)
            log_probs = log_probs - log_mass[:, None]
        cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
        points = (uniforms * cumulative[:, -1])[:, None]
        tokens = torch.searchsorted(cumulative, points, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
        if not all(temperatures):
            greedy = torch.tensor([not t for t in temperatures], device=logits.device)
            tokens = torch.where(greedy, log_probs.argmax(dim=-1), tokens)
    return tokens.tolist(), log_probs.gather(-1, tokens[:, None])[:, 0].tolist()


def _nucleus(probs: Tensor, limits: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Zero all but the most likely tokens whose probabilities add up to the limit (the first one always stays). Returns
    (b, V), and the log (b,) of the mass that stays. All of it stays where the limit is 1."""
    top_p = torch.tensor(limits, dtype=torch.float64, device=probs.device)
    ordered, order = probs.double().sort(dim=-1, descending=True, stable=True)
    dropped = (ordered.cumsum(dim=-1) - ordered) >= top_p[:, None]
    ordered[dropped & (top_p < 1.0)[:, None]] = 0.0
    mass = torch.where(top_p < 1.0, ordered.sum(dim=-1), 1.0)
    return torch.zeros_like(ordered).scatter(-1, order, ordered), mass.log().float()
