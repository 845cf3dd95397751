"""How far off-policy an update is: importance ratios at three levels, and which tokens are clipped. Pure torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sorl_env.trajectory.token_classes import CLASSES
from sorl_train.algorithms import RatioLevel
from sorl_train.losses.policy import LossSettings
from sorl_train.losses.segments import Segments, importance_ratio

LEVELS: tuple[RatioLevel, ...] = ("token", "turn", "sequence")
TURNS = 8  # turns with metrics of their own; the last of them includes all later turns
QUANTILES = (0.01, 0.5, 0.99)


@dataclass(frozen=True)
class RatioDiagnostics:
    """Sums over the loss tokens of a mini-batch, and the log-ratios themselves, which quantiles need."""

    weights: Tensor  # (3, 3) for token, turn, sequence: number of segments, sum of w, sum of w^2
    by_turn: Tensor  # (TURNS, 2): loss tokens and clipped tokens of each turn
    by_class: Tensor  # (5, 2): the same for each of ``token_classes.CLASSES``; zero for a batch without them
    # log(pi / pi_old) of each token, its mean over each turn, and its mean over each sequence
    log_ratios: tuple[Tensor, Tensor, Tensor]

    def all_reduce(self) -> RatioDiagnostics:
        """The diagnostics of all ranks together, of which log-ratios are the most: 4 bytes a token and level."""
        if not (dist.is_available() and dist.is_initialized()):
            return self
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, self)
        return functools.reduce(RatioDiagnostics.__add__, ranks)

    def __add__(self, other: RatioDiagnostics) -> RatioDiagnostics:
        token, turn, sequence = (
            torch.cat(pair) for pair in zip(self.log_ratios, other.log_ratios, strict=True)
        )
        weights, by_turn = self.weights + other.weights, self.by_turn + other.by_turn
        return RatioDiagnostics(weights, by_turn, self.by_class + other.by_class, (token, turn, sequence))

    def metrics(self) -> dict[str, float]:
        """Metrics by name.

        ``ess_LEVEL``: effective sample size (sum w)^2 / (n sum w^2) as a share, 1 on policy. ``log_ratio_pNN``:
        quantiles of the tokens' log-ratios, ``log_ratio_pNN_LEVEL`` those of turns and sequences.
        ``clip_frac_turnK``, ``clip_frac_CLASS``: share of clipped tokens in a turn or class that occurs.
        ``token_share_CLASS``: share of all tokens that belong to the class.
        """
        metrics = {}
        for level, (count, total, squares) in zip(LEVELS, self.weights.tolist(), strict=True):
            metrics[f"ess_{level}"] = total**2 / (count * squares) if squares else 1.0
        for level, log_ratios in zip(LEVELS, self.log_ratios, strict=True):
            suffix = "" if level == "token" else f"_{level}"
            for share, value in zip(QUANTILES, quantiles(log_ratios, QUANTILES), strict=False):
                metrics[f"log_ratio_p{share * 100:02.0f}{suffix}"] = value
        for turn, (tokens, clipped) in enumerate(self.by_turn.tolist()):
            if tokens:
                metrics[f"clip_frac_turn{turn}"] = clipped / tokens
        total = float(self.by_class[:, 0].sum())
        for name, (tokens, clipped) in zip(CLASSES, self.by_class.tolist(), strict=True):
            if tokens:
                metrics[f"clip_frac_{name}"] = clipped / tokens
                metrics[f"token_share_{name}"] = tokens / total
        return metrics


@torch.no_grad()
def diagnose_ratios(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    turn_ids: Tensor,
    token_classes: Tensor | None = None,
    *,
    settings: LossSettings,
) -> RatioDiagnostics:
    """Diagnostics of a mini-batch; arguments (B, T) as for ``policy_loss``, ``token_classes`` as in ``Batch``."""
    weights = torch.zeros(3, 3, dtype=torch.float64)
    by_turn = torch.zeros(TURNS, 2, dtype=torch.float64)
    by_class = torch.zeros(len(CLASSES), 2, dtype=torch.float64)
    log_ratios = [torch.zeros(0)] * len(LEVELS)
    for row, level in enumerate(LEVELS):
        segments = Segments.of(level, loss_mask, turn_ids)
        token_log_ratio = segments.pick(log_probs).float() - segments.pick(old_log_probs).float()
        if not len(token_log_ratio):
            continue
        log_ratio = segments.mean(token_log_ratio)
        ratio = importance_ratio(log_ratio)
        filled = slice(None) if segments.lengths is None else segments.lengths > 0
        log_ratios[row], own = log_ratio[filled], ratio[filled]
        weights[row] = torch.stack([torch.tensor(float(len(own))), own.sum(), own.square().sum()])
        if level == settings.ratio_level:
            clipped = settings.clip.clips(segments.spread(ratio), segments.pick(advantages).float())
            by_turn = _count(segments.pick(turn_ids).clamp(max=TURNS - 1), clipped, TURNS)
            if token_classes is not None:
                by_class = _count(segments.pick(token_classes).long(), clipped, len(CLASSES))
    return RatioDiagnostics(weights, by_turn, by_class, (log_ratios[0], log_ratios[1], log_ratios[2]))


def quantiles(values: Tensor, shares: Sequence[float]) -> list[float]:
    """The quantile of ``values`` (N,) for each of ``shares``, linear between neighbours, in float64; [] for no values.

    The same as ``torch.quantile``, which refuses more than 2^24 values. A large batch has more tokens than that.
    """
    if not len(values):
        return []
    ordered = values.double().sort().values
    ranks = torch.tensor(shares, dtype=torch.float64) * (len(ordered) - 1)
    below = ranks.long()
    return ordered[below].lerp(ordered[ranks.ceil().long()], ranks - below).tolist()


def _count(bins: Tensor, clipped: Tensor, size: int) -> Tensor:
    """(size, 2): the tokens in each bin, and the clipped ones among them."""
    counts = torch.bincount(bins, minlength=size).double()
    return torch.stack([counts, torch.bincount(bins, weights=clipped.double(), minlength=size)], dim=1)
