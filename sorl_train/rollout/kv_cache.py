"""The key-value cache of the sampler: one row for each trajectory in flight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sorl_train.models.attention import AttentionMasks, text_config
from sorl_train.models.forward import logits_at

COLUMNS = 64  # the capacity is a multiple of this


class RowCache:
    """Keys and values of all rows, (layers, 2, rows, kv_heads, capacity, head_dim), written in place.

    It replaces a transformers ``Cache``: the model calls ``update`` once in each layer. Before a forward pass,
    ``select`` says which rows it covers and where their new tokens go. The mask that it returns hides what lies beyond
    a row's length, and what lies before a layer's window. Hidden values must be finite all the same: NaN times an
    attention weight of 0 is NaN.

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
        """Tokens that a row can hold before the cache has to grow."""
        return self.data.shape[4]

    def select(self, rows: slice, new_tokens: int) -> tuple[Tensor, Tensor | dict[str, Tensor]]:
        """Prepare a forward pass of ``new_tokens`` columns over ``rows``.

        Returns:
            Position ids (b, n), and the mask (b, 1, n, w) to be added to the attention scores, or one such mask for
            each kind of layer. A boolean mask would be converted to this form in every layer.
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
        """Copy rows, or at most so many of their first tokens, into empty rows, pair by pair."""
        assert not self.lengths[targets].any(), (
            f"rows {targets} are not empty: {self.lengths[targets]} tokens"
        )
        lengths = self.lengths[sources]
        self.lengths[targets] = lengths if most is None else np.minimum(lengths, most)
        width = int(self.lengths[targets].max(initial=0))
        self.data[:, :, targets, :, :width] = self.data[:, :, sources, :, :width]

    def move(self, source: int, target: int) -> None:
        """Copy a row into an empty one, and empty the first."""
        self.copy([source], [target])
        self.free(source)

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


@torch.inference_mode()
def feed(model: Any, cache: RowCache, rows: slice, tokens: Sequence[Sequence[int]]) -> Tensor:
    """Read ``tokens``, a list for each of ``rows``, into the cache; returns logits (b, V) after the last of each."""
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
        "past_key_values": cache,
        "use_cache": True,
    }
    logits = logits_at(model, lambda hidden: hidden[torch.arange(len(tokens), device=device), last], inputs)
    cache.lengths[rows] += counts
    return logits
