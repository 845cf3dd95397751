"""Trajectories in one row without padding, in which what several of them begin with is computed once.

Apart from attention, a transformer processes each token independently. So the tokens of a batch lie one after another,
each with its own position, and only attention sees trajectories. The trajectories form a tree: a prompt, often a first
search and its results, and then what is a trajectory's own. Attention has a row for each branch, with its own tokens as
queries, and those of the branches that it grows from and its own as keys::

    four trajectories   P P P A A S D, P P P A A S E E, P P P B, Q C C C
    packed              P P P  A A S  D  E E  B  Q C C C

Tokens after a trajectory's last loss token are not computed, nor are trajectories without loss tokens. The result is
that of padded rows, up to rounding. Models whose attention this cannot express keep padded rows:
``rollout/model_check.py`` finds out when a model is loaded.

On a GPU the branches stay in one row: as they are packed in the order of a depth-first search, a token sees those
before it whose subtree it is in, which FlexAttention computes without a mask in memory. It has no backward pass on a
CPU.

The attention is registered with transformers, and does decoding steps and all else as well. Torch's fast attention is
slow on a CPU where a group of heads shares its keys, and where there is one query. Both are written in a faster way
here; what they compute is the same up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

SAVES = 0.9  # rows are packed where that leaves at most this share of the padded tokens
WORTH_A_BRANCH = 8  # tokens that a common beginning must save
SHORTEST = 0.8  # rows of attention are padded to one length down to this share of it
FLEX_BLOCK = 128  # tokens; FlexAttention skips pairs of blocks that do not see each other
PACKED = "sorl_packed"  # the name of the attention, in ``model.config._attn_implementation``
# What the attentions written here know of; a window is in the mask already.
PLAIN = {"dropout", "scaling", "sliding_window", "position_ids", "use_cache"}


@dataclass(frozen=True)
class Block:
    """R rows of attention of similar lengths, each of up to W own tokens after a shared prefix of up to P tokens."""

    queries: Tensor  # (R, W) the packed tokens of each row, padded with 0
    keys: Tensor  # (R, P + W) those that the row may attend to: its beginning, then its own
    begins: Tensor  # (R,) the tokens of its beginning; the others of the first P keys are padding


@dataclass(frozen=True)
class Packed:
    """N packed tokens of B trajectories."""

    token_ids: Tensor  # (1, N)
    positions: Tensor  # (1, N)
    where: Tensor  # (B, T) the packed token whose state scores token t + 1; 0 where nothing asks for it
    blocks: tuple[Block, ...]  # what attention sees, each packed token once among the queries
    restore: Tensor  # (N,) the place of each packed token in the flattened ``queries`` of all blocks
    until: Tensor  # (N,) where the subtree of each packed token's branch ends: later tokens before that see the token
    # Made in the first layer for all: autograd keeps a layer's mask until the backward pass.
    masks: dict[Any, Any] = field(default_factory=dict, repr=False)


def pack(token_ids: Tensor, mask: Tensor) -> Packed | None:
    """Pack the tokens that the masked ones depend on; None if packing would save little, or if ``mask`` is empty.
    ``token_ids`` is (B, L), padded on the right; the bool ``mask`` (B, T), T = L - 1, has the tokens to score."""
    device = token_ids.device
    rows, columns = token_ids.cpu(), mask.cpu()
    present = columns.any(dim=1).nonzero()[:, 0].tolist()
    if not present:
        return None
    # the state of a token scores the next one, so that of the last is not read
    ends = {row: int(columns[row].nonzero()[-1, 0]) + 1 for row in present}
    tree = _Tree(rows, ends)
    if tree.count > SAVES * len(rows) * (rows.shape[1] - 1):
        return None
    where = torch.zeros_like(columns, dtype=torch.long)
    for row, path in tree.paths.items():
        where[row, : len(path)] = path
    blocks, restore = _attention_blocks(tree.own, tree.behind, tree.count, device)
    until = torch.zeros(tree.count, dtype=torch.long)
    # a branch comes after those that it grows from
    for own, behind in zip(tree.own, tree.behind, strict=True):
        until[torch.cat([behind, own])] = own[-1] + 1
    return Packed(
        torch.cat(tree.tokens)[None].to(device),
        torch.cat(tree.positions)[None].to(device),
        where.to(device),
        blocks,
        restore,
        until.to(device),
    )


class _Tree:
    """The prefix tree of the rows of ``token_ids`` (B, L), in which each branch is packed once."""

    def __init__(self, token_ids: Tensor, ends: dict[int, int]) -> None:
        self.own: list[Tensor] = []  # of each branch, its packed tokens
        self.behind: list[Tensor] = []  # of each branch, those of the branches that it grows from
        self.tokens: list[Tensor] = []  # of each branch, its token ids
        self.positions: list[Tensor] = []  # and their places in a trajectory
        self.paths: dict[int, Tensor] = {}  # of each row, the packed tokens of all its branches
        self.count = 0  # packed tokens in all
        self._token_ids, self._ends = token_ids, ends
        waiting = [(list(ends), 0, torch.zeros(0, dtype=torch.long))]
        while waiting:
            waiting += self._grow(*waiting.pop())

    def _grow(self, rows: list[int], start: int, path: Tensor) -> list[tuple[list[int], int, Tensor]]:
        """Pack what the rows have in common from the token ``start`` on, behind ``path``; returns what is left."""
        stop = self._alike_until(rows, start)
        at_end = [row for row in rows if self._ends[row] == stop]
        if len(at_end) == len(rows) or (stop - start) * (len(rows) - 1) >= WORTH_A_BRANCH:
            path, start = self._branch(rows[0], start, stop, path), stop
        branches: dict[int, list[int]] = {}
        for row in rows:
            if start == self._ends[row]:
                self.paths[row] = path
            else:  # a row that ends here is a branch of its own
                branches.setdefault(-1 if row in at_end else int(self._token_ids[row, stop]), []).append(row)
        return [(branch, start, path) for branch in branches.values()]

    def _alike_until(self, rows: list[int], start: int) -> int:
        """The first place from ``start`` on where the rows differ, or one of them ends."""
        end = min(self._ends[row] for row in rows)
        tokens = self._token_ids[rows, start:end]
        differs = (tokens != tokens[0]).any(dim=0).nonzero()
        return start + int(differs[0, 0]) if len(differs) else end

    def _branch(self, row: int, start: int, stop: int, path: Tensor) -> Tensor:
        """Pack the tokens ``[start, stop)`` of a row behind ``path``; returns the path with them."""
        places = torch.arange(self.count, self.count + stop - start)
        self.own.append(places)
        self.behind.append(path)
        self.tokens.append(self._token_ids[row, start:stop])
        self.positions.append(torch.arange(start, stop))
        self.count += len(places)
        return torch.cat([path, places])


def _attention_blocks(
    own: list[Tensor], behind: list[Tensor], count: int, device: torch.device
) -> tuple[tuple[Block, ...], Tensor]:
    """``blocks`` and ``restore`` of ``Packed``, from ``own`` and ``behind`` of a ``_Tree`` of ``count`` tokens."""
    blocks, used = [], 0
    restore = torch.zeros(count, dtype=torch.long)
    for alike in _rows_alike(own, behind):
        block = _block([own[row] for row in alike], [behind[row] for row in alike], device)
        for number, row in enumerate(alike):
            start = used + number * block.queries.shape[1]
            restore[own[row]] = start + torch.arange(len(own[row]))
        used += block.queries.numel()
        blocks.append(block)
    return tuple(blocks), restore.to(device)


def _rows_alike(own: list[Tensor], behind: list[Tensor]) -> list[list[int]]:
    """Rows of attention, with and without a shared beginning apart, in lists of similar lengths."""
    lists: list[list[int]] = []
    for shares in (False, True):
        rows = [row for row, prefix in enumerate(behind) if bool(len(prefix)) == shares]
        longest = math.inf
        for row in sorted(rows, key=lambda row: -len(own[row])):
            if len(own[row]) < SHORTEST * longest:
                lists.append([])
                longest = len(own[row])
            lists[-1].append(row)
    return lists


def _block(own: list[Tensor], behind: list[Tensor], device: torch.device) -> Block:
    """Rows of these packed tokens, each with those of the beginning that it shares, if any."""
    width, before = max(map(len, own)), max(map(len, behind))
    queries = torch.zeros(len(own), width, dtype=torch.long)
    keys = torch.zeros(len(own), before + width, dtype=torch.long)
    for number, (places, prefix) in enumerate(zip(own, behind, strict=True)):
        queries[number, : len(places)] = places
        keys[number, : len(prefix)], keys[number, before : before + len(places)] = prefix, places
    begins = torch.tensor([len(prefix) for prefix in behind])
    return Block(queries.to(device), keys.to(device), begins.to(device))


def inputs(packed: Packed) -> dict[str, Any]:
    """The arguments of a model's forward pass. A mask of four dimensions is passed on to the attention as it is."""
    return {
        "input_ids": packed.token_ids,
        "position_ids": packed.positions,
        "attention_mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=packed.token_ids.device),
        "use_cache": False,
        "packed": packed,
    }


def uses_packing(model: Any) -> bool:
    """Whether ``enable_packing`` was called on the model."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == PACKED


def enable_packing(model: Any) -> None:
    """Give a model that has torch's fast attention this one, which takes packed rows, too."""
    # whoever has a model has loaded these already; --dry_run has none, and need not wait for them
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(PACKED, attention)
    AttentionMaskInterface.register(PACKED, sdpa_mask)
    model.set_attn_implementation(PACKED)


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
    """The attention that transformers calls in each layer: (b, heads, n, d) to (b, n, heads, d). With ``packed``, b is
    1, and the n tokens are those of all branches. Without, it computes what torch's does. Raises ``TypeError`` for
    packed rows and an attention with more than scores, a window and a scale."""
    if packed is None:
        is_plain = kwargs.keys() <= PLAIN and not kwargs.get("dropout")
        if is_plain and attention_mask is not None and attention_mask.shape[1] == 1:
            scaling = kwargs.get("scaling")
            if _is_decoding(query, attention_mask):
                return _one_token(query, key, value, attention_mask, scaling).transpose(1, 2), None
            if query.shape[1] > key.shape[1]:
                repeated = attention_mask.repeat(1, 1, query.shape[1] // key.shape[1], 1)
                output = _shared_heads(query, key, value, repeated, scaling)
                return output.transpose(1, 2).contiguous(), None
        found: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        return found
    unknown = [name for name, value in kwargs.items() if name not in PLAIN and value is not None]
    # such as the cap of Gemma 2's scores, which packed rows would do without
    if unknown or kwargs.get("dropout"):
        raise TypeError(f"packed rows know no attention with {', '.join(unknown) or 'dropout'}")
    window, scaling = kwargs.get("sliding_window"), kwargs.get("scaling")
    if query.device.type == "cuda":
        output = tree_attention(packed, query, key, value, window, scaling, _compiled())
        return output.transpose(1, 2).contiguous(), None
    outputs = [
        _attend(packed, number, query, key, value, window, scaling) for number in range(len(packed.blocks))
    ]
    restored = torch.cat(outputs).index_select(0, packed.restore)
    return restored[None].contiguous(), None


@cache
def _compiled() -> Callable[..., Any]:
    """FlexAttention as one kernel; without the compiler it would write out all scores."""
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return compiled


def tree_attention(
    packed: Packed,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    scaling: float | None,
    run: Callable[..., Any] = flex_attention,
) -> Tensor:
    """Attention of all branches in one row: (1, heads, N, d) to the same. ``run`` is ``flex_attention`` or what the
    compiler made of it."""
    if window not in packed.masks:
        packed.masks[window] = _block_mask(packed.until, packed.positions[0], window)
    dtype = _dtype(query)
    output: Tensor = run(
        query.to(dtype),
        key.to(dtype),
        value.to(dtype),
        block_mask=packed.masks[window],
        scale=scaling,
        enable_gqa=query.shape[1] > key.shape[1],
    )
    return output


def _block_mask(until: Tensor, positions: Tensor, window: int | None) -> BlockMask:
    """Which blocks of keys each block of queries sees, in part or as a whole, from (N,) ``until`` and ``positions``. It
    takes (N / FLEX_BLOCK) ** 2 numbers; torch's own function would write out all N ** 2."""

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key <= query) & (query < until[key])
        return seen if window is None else seen & (positions[key] > positions[query] - window)

    tokens, count = len(until), -(-len(until) // FLEX_BLOCK)
    ends = pad(until, (0, count * FLEX_BLOCK - tokens)).view(count, FLEX_BLOCK)
    starts = torch.arange(count, device=until.device)[:, None] * FLEX_BLOCK
    earlier = torch.ones(count, count, dtype=torch.bool, device=until.device).tril(-1)
    seen = earlier & (ends.amax(1) > starts)
    seen.fill_diagonal_(True)
    whole = earlier & (ends.amin(1) >= (starts + FLEX_BLOCK).clamp(max=tokens))
    if window is not None:
        whole = torch.zeros_like(whole)
    return BlockMask.from_kv_blocks(
        *_listed(seen & ~whole),
        *_listed(whole),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=sees,
        seq_lengths=(tokens, tokens),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of a bool (rows, columns): how many are set in each row, and the columns with those that are set first."""
    order = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1)[None, None].int(), order[None, None].int()


def _dtype(query: Tensor) -> torch.dtype:
    """What torch's attention computes in."""
    device = query.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype


def _attend(
    packed: Packed,
    number: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    scaling: float | None,
) -> Tensor:
    """Attention of the rows of one block: (1, heads, N, d) to (R * W, heads, d)."""
    block = packed.blocks[number]
    rows = len(block.queries)

    def pick(tensor: Tensor, index: Tensor) -> Tensor:
        """(1, heads, N, d) -> (R, heads, columns, d)."""
        chosen = tensor[0].index_select(1, index.flatten())
        return chosen.view(len(chosen), rows, -1, tensor.shape[-1]).transpose(0, 1)

    queries, keys, values = pick(query, block.queries), pick(key, block.keys), pick(value, block.keys)
    shared = query.shape[1] // key.shape[1]
    if keys.shape[2] == queries.shape[2] and window is None:  # no beginnings
        keys, values = (tensor.repeat_interleave(shared, dim=1) for tensor in (keys, values))
        output = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling)
    else:
        made = (number, window, shared, _dtype(query))
        if made not in packed.masks:
            packed.masks[made] = _added_mask(block, packed.positions[0], window, shared, _dtype(query))
        output = _shared_heads(queries, keys, values, packed.masks[made], scaling)
    return output.transpose(1, 2).flatten(0, 1)


def _added_mask(
    block: Block, positions: Tensor, window: int | None, shared: int, dtype: torch.dtype
) -> Tensor:
    """(R, 1, shared * W, P + W), to be added to the scores of ``shared`` heads at a time."""
    width, device = block.queries.shape[1], positions.device
    columns = torch.arange(block.keys.shape[1], device=device)
    own = columns - (block.keys.shape[1] - width)
    # padding sees itself, so that no row is empty
    causal = (own >= 0) & (own <= torch.arange(width, device=device)[:, None])
    seen = causal | (columns < block.begins[:, None, None, None])
    if window is not None:
        near = positions[block.keys][:, None, None] > positions[block.queries][:, None, :, None] - window
        seen = seen & near
    added = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)
    return added.repeat(1, 1, shared, 1)


def _shared_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """Attention (b, heads, n, d) under a mask (b, 1, shared * n, w), where ``shared`` heads of queries share one of
    keys. They become more queries of one head. So keys are not copied for each, and torch's kernel for CPUs is faster
    on more queries at a time."""
    rows, heads, width, _ = query.shape
    queries = query.reshape(rows, key.shape[1], heads // key.shape[1] * width, -1)
    output = scaled_dot_product_attention(queries, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(rows, heads, width, -1)


def _is_decoding(query: Tensor, mask: Tensor) -> bool:
    """Whether it is a decoding step on a CPU: one new token in each row, a mask to be added, no gradient."""
    one = query.shape[2] == 1 and query.device.type == "cpu"
    return one and mask.is_floating_point() and not torch.is_grad_enabled()


def _one_token(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """Attention of one token in each row: (b, heads, 1, d), under a mask (b, 1, 1, w). Written out, because torch's
    kernel for CPUs takes up to three times as long for one query. As there, scores are in float32, which autocast would
    round."""
    rows, heads, _, depth = query.shape
    queries = query.reshape(rows, key.shape[1], -1, depth).float()
    with torch.autocast(query.device.type, enabled=False):
        scores = torch.matmul(queries * (scaling or depth**-0.5), key.float().transpose(2, 3)) + mask
        output = torch.matmul(torch.softmax(scores, -1).to(value.dtype), value)
    return output.reshape(rows, heads, 1, -1)
