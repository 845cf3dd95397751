"""Trajectories in one row without padding, in which what several of them begin with is computed once.

Everything in a transformer but its attention treats tokens alone. So the tokens of a batch lie one after another, each
with its own position, and only attention sees trajectories. The trajectories form a tree: a prompt, often a first
search and its results, and then what is a trajectory's own. Attention has a row for each branch, with its own tokens as
queries, and those of the branches that it grows from and its own as keys::

    four trajectories   P P P A A S D, P P P A A S E E, P P P B, Q C C C
    packed              P P P  A A S  D  E E  B  Q C C C

What follows a trajectory's last loss token is left out, and so are trajectories without one: nothing asks for them. The
result is that of padded rows, up to rounding. Models whose attention this cannot express keep padded rows:
``rollout/model_check.py`` finds out when a model is loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SAVES = 0.9  # rows are packed where that leaves at most this share of the padded tokens
WORTH_A_BRANCH = 8  # tokens that a common beginning must save
SHORTEST = 0.8  # rows of attention are padded to one length down to this share of it


@dataclass(frozen=True)
class Block:
    """R rows of attention of similar lengths, at most W tokens behind a beginning of at most P that others share.

    Attributes:
        queries: (R, W) the packed tokens of each row, padded with 0.
        keys: (R, P + W) those that the row may attend to: its beginning, then its own.
        mask: (R, 1, W, P + W) bool, which it does attend to; None without such beginnings, where it is causal.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class Packed:
    """N packed tokens of B trajectories.

    Attributes:
        token_ids, positions: (1, N).
        where: (B, T) the packed token whose state scores token t + 1; 0 where nothing asks for it.
        blocks: what attention sees, each packed token once among the queries.
        restore: (N,) the place of each packed token in the flattened ``queries`` of all blocks.
    """

    token_ids: Tensor
    positions: Tensor
    where: Tensor
    blocks: tuple[Block, ...]
    restore: Tensor


def pack(token_ids: Tensor, mask: Tensor) -> Packed | None:
    """Pack the tokens that the masked ones depend on; None where that saves little, or where nothing is masked.

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
    return Packed(
        torch.cat(tree.tokens)[None].to(device),
        torch.cat(tree.positions)[None].to(device),
        where.to(device),
        blocks,
        restore,
    )


class _Tree:
    """What the rows of ``token_ids`` (B, L) have in common at their beginning, each such branch packed once.

    Attributes:
        own, behind: of each branch, its packed tokens, and those of the branches that it grows from.
        tokens, positions: of each branch, its token ids and their places in a trajectory.
        paths: of each row, the packed tokens of all its branches.
        count: packed tokens in all.
    """

    def __init__(self, token_ids: Tensor, ends: dict[int, int]) -> None:
        self.own: list[Tensor] = []
        self.behind: list[Tensor] = []
        self.tokens: list[Tensor] = []
        self.positions: list[Tensor] = []
        self.paths: dict[int, Tensor] = {}
        self.count = 0
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
    seen = torch.zeros(len(own), 1, width, before + width, dtype=torch.bool)
    # padding sees itself, so that no row is empty
    seen[..., before:] = torch.ones(width, width, dtype=torch.bool).tril()
    for number, (places, prefix) in enumerate(zip(own, behind, strict=True)):
        queries[number, : len(places)] = places
        keys[number, : len(prefix)], keys[number, before : before + len(places)] = prefix, places
        seen[number, ..., : len(prefix)] = True
    return Block(queries.to(device), keys.to(device), seen.to(device) if before else None)


def inputs(packed: Packed) -> dict[str, Any]:
    """The arguments of a model's forward pass. A mask of four dimensions is passed on to the attention as it is."""
    return {
        "input_ids": packed.token_ids,
        "position_ids": packed.positions,
        "attention_mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=packed.token_ids.device),
        "use_cache": False,
        "packed": packed,
    }
