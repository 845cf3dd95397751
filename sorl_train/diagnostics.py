"""How far an update is off-policy: importance ratios at three levels, and where tokens are clipped. Pure torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sorl_train.losses import MAX_LOG_RATIO
from sorl_train.segments import RatioLevel, Segments
from sorl_train.token_classes import CLASSES

LEVELS: tuple[RatioLevel, ...] = ("token", "turn", "sequence")
TURNS = 8  # turns with a figure of their own; later ones count with the last
QUANTILES = (0.01, 0.5, 0.99)


@dataclass(frozen=True)
class RatioDiagnostics:
    """Sums over the loss tokens of a mini-batch, and quantiles of its token log-ratios.

    Attributes:
        weights: (3, 3) for token, turn, sequence: number of segments, sum of w, sum of w^2.
        by_turn: (TURNS, 2) loss tokens and clipped tokens of each turn.
        by_class: (5, 2) the same of each class of ``token_classes.CLASSES``; zero where a batch comes without them.
        quantiles: (3,) of log(pi / pi_old) at ``QUANTILES``.
        shares: over how many shares of a mini-batch (ranks) these are summed.
    """

    weights: Tensor
    by_turn: Tensor
    by_class: Tensor
    quantiles: Tensor
    shares: int = 1

    def all_reduce(self) -> RatioDiagnostics:
        """Summed over all ranks; quantiles are to be averaged, an approximation that needs no gathering."""
        if not (dist.is_available() and dist.is_initialized()):
            return self
        parts = (self.weights, self.by_turn, self.by_class, self.quantiles)
        packed = torch.cat([part.flatten() for part in parts])
        packed = packed.cuda() if dist.get_backend() == "nccl" else packed
        dist.all_reduce(packed)
        summed = packed.cpu().split([part.numel() for part in parts])
        shaped = [one.view(part.shape) for one, part in zip(summed, parts, strict=True)]
        return RatioDiagnostics(shaped[0], shaped[1], shaped[2], shaped[3], dist.get_world_size())

    def metrics(self) -> dict[str, float]:
        """``ess_LEVEL``: effective sample size (sum w)^2 / (n sum w^2), a share, 1 on policy. ``log_ratio_pNN``.
        ``clip_frac_turnK``, ``clip_frac_CLASS``: share of the tokens of a turn or class that are clipped, for those
        that occur; ``token_share_CLASS``: share of all tokens that are of the class."""
        metrics = {}
        for level, (count, total, squares) in zip(LEVELS, self.weights.tolist(), strict=True):
            metrics[f"ess_{level}"] = total**2 / (count * squares) if squares else 1.0
        for share, value in zip(QUANTILES, (self.quantiles / self.shares).tolist(), strict=True):
            metrics[f"log_ratio_p{share * 100:02.0f}"] = value
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
    ratio_level: RatioLevel,
    clip_eps: float,
    clip_eps_high: float | None = None,
) -> RatioDiagnostics:
    """Diagnostics of a mini-batch; arguments as for ``policy_loss``, ``token_classes`` as in ``Batch``."""
    weights = torch.zeros(3, 3, dtype=torch.float64)
    by_turn = torch.zeros(TURNS, 2, dtype=torch.float64)
    by_class = torch.zeros(len(CLASSES), 2, dtype=torch.float64)
    quantiles = torch.zeros(len(QUANTILES), dtype=torch.float64)
    for row, level in enumerate(LEVELS):
        segments = Segments.of(level, loss_mask, turn_ids)
        token_ratio = segments.pick(log_probs, torch.float32) - segments.pick(old_log_probs, torch.float32)
        if not len(token_ratio):
            continue
        ratio = segment_ratios(segments, token_ratio)
        filled = ratio if segments.lengths is None else ratio[segments.lengths > 0]
        weights[row] = torch.stack([torch.tensor(float(len(filled))), filled.sum(), filled.square().sum()])
        if level == "token":
            quantiles = torch.quantile(token_ratio.double(), torch.tensor(QUANTILES, dtype=torch.float64))
        if level == ratio_level:
            advantage = segments.pick(advantages, torch.float32)
            clipped = clipped_tokens(segments.spread(ratio), advantage, clip_eps, clip_eps_high)
            turn = turn_ids.flatten().index_select(0, segments.positions).clamp(max=TURNS - 1)
            by_turn = _count(turn, clipped, TURNS)
            if token_classes is not None:
                kind = token_classes.flatten().index_select(0, segments.positions).long()
                by_class = _count(kind, clipped, len(CLASSES))
    return RatioDiagnostics(weights, by_turn, by_class, quantiles)


def segment_ratios(segments: Segments, log_ratio: Tensor) -> Tensor:
    """(N,) log-ratios of the loss tokens -> (S,) importance ratios of the segments, their geometric means."""
    return (segments.total(log_ratio) / segments.sizes).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_tokens(ratio: Tensor, advantage: Tensor, clip_eps: float, clip_eps_high: float | None) -> Tensor:
    """(N,) bool: the tokens that ``policy_loss`` clips, from their ratios (N,) in the loss and advantages (N,)."""
    high = clip_eps if clip_eps_high is None else clip_eps_high
    return ((advantage > 0) & (ratio > 1.0 + high)) | ((advantage < 0) & (ratio < 1.0 - clip_eps))


def _count(bins: Tensor, clipped: Tensor, size: int) -> Tensor:
    """(size, 2): how many tokens are in each bin, and how many of them are clipped."""
    counts = torch.bincount(bins, minlength=size).double()
    return torch.stack([counts, torch.bincount(bins, weights=clipped.double(), minlength=size)], dim=1)
