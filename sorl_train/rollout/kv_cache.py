"""The key-value cache of the sampler: one row a trajectory, written in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sorl_train.models.attention import AttentionMasks, text_config
from sorl_train.models.forward import picked_logits

COLUMNS = 64  # capacity comes in multiples of this


class RowCache:
    """Keys and values of all rows, (layers, 2, rows, kv_heads, capacity, head_dim), written in place.

    It stands in for a transformers ``Cache``: the model calls ``update`` once a layer. ``select`` says beforehand which
    rows a forward pass covers and where their new tokens go; its mask hides what lies behind a row's length (which has
    to be finite: NaN gets past a weight of 0), and before the window of a layer that has one.

    Raises:
        UserError: the model keeps more than keys and values (see ``AttentionMasks.of``).
    """

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
        return self.data.shape[4]

    def select(self, rows: slice, new_tokens: int) -> tuple[Tensor, Tensor | dict[str, Tensor]]:
        """Prepare a pass of ``new_tokens`` columns over ``rows``.

        Returns position ids (b, n) and the mask (b, 1, n, w) to add to the attention scores, or one mask for each kind
        of layer; a boolean mask would be turned into this one again in every layer.
        """
        lengths = self.lengths[rows]
        self._width = int(lengths.max()) + new_tokens
        self._grow(self._width)
        device = self.data.device
        columns = torch.as_tensor(lengths, device=device)[:, None] + torch.arange(new_tokens, device=device)
        self._rows, self._column_index = rows, columns
        self._row_index = torch.arange(rows.start, rows.stop, device=device)[:, None]
        return columns, self._masks.make(columns, self._width, self.data.dtype)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store (b, heads, n, dim) at the selected places and return all keys and values up to the widest row."""
        for kind, new in enumerate((keys, values)):
            stored = new.transpose(1, 2).to(self.data.dtype)
            self.data[layer, kind, self._row_index, :, self._column_index] = stored
        view = self.data[layer, :, self._rows, :, : self._width]
        return view[0], view[1]

    def get_seq_length(self, layer: int = 0) -> int:
        """What some models ask of a transformers ``Cache``; rows differ, and positions and masks come with the call."""
        return int(self.lengths[self._rows].max())

    @torch.inference_mode()
    def swap(self, a: int, b: int) -> None:
        """Exchange two rows."""
        width = int(max(self.lengths[a], self.lengths[b]))
        kept = self.data[:, :, a, :, :width].clone()
        self.data[:, :, a, :, :width] = self.data[:, :, b, :, :width]
        self.data[:, :, b, :, :width] = kept
        self.lengths[[a, b]] = self.lengths[[b, a]]

    @torch.inference_mode()
    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Fill empty rows with what others hold, pair by pair."""
        assert not self.lengths[targets].any(), (
            f"rows {targets} are not empty: {self.lengths[targets]} tokens"
        )
        self.lengths[targets] = self.lengths[sources]
        width = int(self.lengths[targets].max())
        self.data[:, :, targets, :, :width] = self.data[:, :, sources, :, :width]

    def move(self, source: int, target: int) -> None:
        """Give a row's content to an empty one; the row itself is empty afterwards."""
        self.copy([source], [target])
        self.free(source)

    def free(self, row: int) -> None:
        """Empty a row. Only its length says that something is in it, so nothing has to be erased."""
        self.lengths[row] = 0

    def _grow(self, width: int) -> None:
        if width <= self.capacity:
            return
        layers, two, rows, heads, capacity, dim = self.data.shape
        # in whole cache lines: where a row begins in memory, and so how its sums are taken, is the same at any capacity
        wanted = -(-max(width, capacity * 3 // 2) // COLUMNS) * COLUMNS
        data = self.data.new_zeros((layers, two, rows, heads, wanted, dim))
        data[..., :capacity, :] = self.data
        self.data = data


@torch.inference_mode()
def feed(model: Any, cache: RowCache, rows: slice, tokens: Sequence[Sequence[int]]) -> Tensor:
    """Read ``tokens``, a list for each of ``rows``, into the cache; returns the logits after their last ones (b, V)."""
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
        # padding takes the position of its row's last token: further positions may not exist
        "position_ids": torch.minimum(positions, positions.gather(1, last[:, None])),
        "past_key_values": cache,
        "use_cache": True,
    }
    logits = picked_logits(
        model, lambda hidden: hidden[torch.arange(len(tokens), device=device), last], inputs
    )
    cache.lengths[rows] += counts
    return logits
