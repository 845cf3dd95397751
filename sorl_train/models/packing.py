"""Trajectories in one row without padding, in which a prompt that several of them share is computed once.

Everything in a transformer but its attention treats tokens alone. So the tokens of a batch lie one after another, each
with its own position, and only attention sees trajectories: there each row has its own tokens as queries, and the
shared prompt and its own tokens as keys::

    three trajectories   P P P A A, P P P B, Q C C C    (the prompt P is that of the first two)
    packed               P P P  A A  B  Q C C C

What follows a trajectory's last loss token is left out, and so are trajectories without one: nothing asks for them. The
result is that of padded rows, up to rounding. Models whose attention this cannot express keep padded rows:
``rollout/model_check.py`` finds out when a model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED = "sorl_packed"  # the name of the attention, in ``model.config._attn_implementation``
SAVES = 0.9  # rows are packed where that leaves at most this share of the padded tokens


@dataclass(frozen=True)
class Packed:
    """N packed tokens of B trajectories; attention sees them as R rows of at most W tokens behind prompts of at most P.

    Attributes:
        token_ids, positions: (1, N).
        where: (B, T) the packed token whose state scores token t + 1; 0 where nothing asks for it.
        queries: (R, W) the packed tokens of each row, padded with 0.
        keys: (R, P + W) those that the row may attend to: its shared prompt, then its own.
        mask: (R, 1, W, P + W) bool, which it does attend to; None without shared prompts, where it is causal.
        restore: (N,) the place of each packed token in the flattened ``queries``.
    """

    token_ids: Tensor
    positions: Tensor
    where: Tensor
    queries: Tensor
    keys: Tensor
    mask: Tensor | None
    restore: Tensor


def packs(model: Any) -> bool:
    """Whether ``enable_packing`` was called on the model."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == PACKED


def enable_packing(model: Any) -> None:
    """Let a model with torch's fast attention take packed rows, too; all else stays as it is."""
    model.set_attn_implementation(PACKED)


def pack(token_ids: Tensor, mask: Tensor) -> Packed | None:
    """Pack the tokens that the masked ones depend on; None where that saves little, or where nothing is masked.

    Args:
        token_ids: (B, L), padded on the right.
        mask: bool (B, T), T = L - 1: the tokens to score.
    """
    device = token_ids.device
    rows, columns = token_ids.cpu(), mask.cpu()
    present = columns.any(dim=1).nonzero()[:, 0].tolist()
    if not present:
        return None
    prompts: dict[tuple[int, ...], list[int]] = {}  # rows by the tokens in front of their first masked one
    ends: dict[int, int] = {}
    for row in present:
        scored = columns[row].nonzero()[:, 0]
        ends[row] = int(scored[-1]) + 1  # the state of a token scores the next one, so the last is not read
        prompts.setdefault(tuple(rows[row, : int(scored[0]) + 1].tolist()), []).append(row)
    saved = sum(len(prompt) * (len(members) - 1) for prompt, members in prompts.items())
    count = sum(ends.values()) - saved
    if count > SAVES * len(rows) * (rows.shape[1] - 1):
        return None

    tokens = torch.zeros(count, dtype=torch.long)
    positions, where = torch.zeros_like(tokens), torch.zeros_like(columns, dtype=torch.long)
    own: list[Tensor] = []  # packed tokens of each row of attention
    behind: list[Tensor] = []  # and those of its shared prompt
    used, nothing = 0, torch.zeros(0, dtype=torch.long)

    def add(row: int, start: int, stop: int, prompt: Tensor) -> Tensor:
        """Pack these tokens of a row, which see ``prompt`` and one another."""
        nonlocal used
        places = torch.arange(used, used + stop - start)
        tokens[places], positions[places] = rows[row, start:stop], torch.arange(start, stop)
        used += stop - start
        own.append(places)
        behind.append(prompt)
        return places

    for prompt, members in prompts.items():
        prefix = add(members[0], 0, len(prompt), nothing) if len(members) > 1 else nothing
        for row in members:
            places = add(row, len(prefix), ends[row], prefix)
            where[row, : ends[row]] = torch.cat([prefix, places])
    queries, keys, seen, restore = _attention_rows(own, behind, count)
    return Packed(
        tokens[None].to(device),
        positions[None].to(device),
        where.to(device),
        queries.to(device),
        keys.to(device),
        None if seen is None else seen.to(device),
        restore.to(device),
    )


def _attention_rows(
    own: list[Tensor], behind: list[Tensor], count: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """``queries``, ``keys``, ``mask`` and ``restore`` of ``Packed``.

    Args:
        own: the packed tokens of each row.
        behind: those of the prompt that it shares, if any.
        count: packed tokens in all.
    """
    width, before = max(map(len, own)), max(map(len, behind))
    queries = torch.zeros(len(own), width, dtype=torch.long)
    keys = torch.zeros(len(own), before + width, dtype=torch.long)
    restore = torch.zeros(count, dtype=torch.long)
    seen = torch.zeros(len(own), 1, width, before + width, dtype=torch.bool)
    seen[..., before:] = torch.ones(
        width, width, dtype=torch.bool
    ).tril()  # padding sees itself, so none is empty
    for number, (places, prefix) in enumerate(zip(own, behind, strict=True)):
        queries[number, : len(places)] = places
        keys[number, : len(prefix)], keys[number, before : before + len(places)] = prefix, places
        seen[number, ..., : len(prefix)] = True
        restore[places] = number * width + torch.arange(len(places))
    return queries, keys, seen if before else None, restore


def inputs(packed: Packed) -> dict[str, Any]:
    """The arguments of a model's forward pass. A mask of four dimensions is passed on to the attention as it is."""
    return {
        "input_ids": packed.token_ids,
        "position_ids": packed.positions,
        "attention_mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=packed.token_ids.device),
        "use_cache": False,
        "packed": packed,
    }


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: Packed | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of packed tokens, for transformers: (1, heads, N, d) to (1, N, heads, d). Of others as ever."""
    if packed is None:
        found: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        return found
    window, scaling = kwargs.get("sliding_window"), kwargs.get("scaling")
    rows, width = packed.queries.shape

    def pick(tensor: Tensor, index: Tensor) -> Tensor:
        """(1, heads, N, d) -> (R, heads, columns, d)."""
        chosen = tensor[0].index_select(1, index.flatten())
        return chosen.view(len(chosen), rows, -1, tensor.shape[-1]).transpose(0, 1)

    groups = query.shape[1] // key.shape[1]
    keys, values = (pick(tensor, packed.keys).repeat_interleave(groups, dim=1) for tensor in (key, value))
    mask = packed.mask
    if window is not None:
        near = packed.positions[0][packed.keys][:, None, None] > (
            packed.positions[0][packed.queries][:, None, :, None] - window
        )
        if mask is None:
            mask = torch.ones(width, width, dtype=torch.bool, device=query.device).tril()
        mask = mask & near
    output = torch.nn.functional.scaled_dot_product_attention(
        pick(query, packed.queries), keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling
    )
    restored = output.transpose(1, 2).flatten(0, 1).index_select(0, packed.restore)
    return restored[None].contiguous(), None


AttentionInterface.register(PACKED, attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)
