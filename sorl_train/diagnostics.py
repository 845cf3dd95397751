"""How far an update is off-policy: importance ratios at three levels, and where tokens are clipped. Pure torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sorl_train.losses import MAX_LOG_RATIO
from sorl_train.segments import RatioLevel, Segments

LEVELS: tuple[RatioLevel, ...] = ("token", "turn", "sequence")
TURNS = 8  # turns with a figure of their own; later ones count with the last
QUANTILES = (0.01, 0.5, 0.99)


@dataclass(frozen=True)
class RatioDiagnostics:
    """Sums over the loss tokens of a mini-batch, and quantiles of its token log-ratios.

    Attributes:
        weights: (3, 3) for token, turn, sequence: number of segments, sum of w, sum of w^2.
        by_turn: (TURNS, 2) loss tokens and clipped tokens of each turn.
        quantiles: (3,) of log(pi / pi_old) at ``QUANTILES``.
        shares: over how many shares of a mini-batch (ranks) these are summed.
    """

    weights: Tensor
    by_turn: Tensor
    quantiles: Tensor
    shares: int = 1

    def all_reduce(self) -> RatioDiagnostics:
        """Summed over all ranks; quantiles are to be averaged, an approximation that needs no gathering."""
        if not (dist.is_available() and dist.is_initialized()):
            return self
        packed = torch.cat([self.weights.flatten(), self.by_turn.flatten(), self.quantiles])
        packed = packed.cuda() if dist.get_backend() == "nccl" else packed
        dist.all_reduce(packed)
        weights, by_turn, quantiles = packed.cpu().split([9, 2 * TURNS, len(QUANTILES)])
        return RatioDiagnostics(weights.view(3, 3), by_turn.view(TURNS, 2), quantiles, dist.get_world_size())

    def metrics(self) -> dict[str, float]:
        """``ess_LEVEL``: effective sample size (sum w)^2 / (n sum w^2), a share, 1 on policy. ``log_ratio_pNN``.
        ``clip_frac_turnK``: share of the turn's tokens that are clipped, for turns that occur."""
        metrics = {}
        for level, (count, total, squares) in zip(LEVELS, self.weights.tolist(), strict=True):
            metrics[f"ess_{level}"] = total**2 / (count * squares) if squares else 1.0
        for share, value in zip(QUANTILES, (self.quantiles / self.shares).tolist(), strict=True):
            metrics[f"log_ratio_p{share * 100:02.0f}"] = value
        for turn, (tokens, clipped) in enumerate(self.by_turn.tolist()):
            if tokens:
                metrics[f"clip_frac_turn{turn}"] = clipped / tokens
        return metrics


@torch.no_grad()
def diagnose_ratios(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    turn_ids: Tensor,
    *,
    ratio_level: RatioLevel,
    clip_eps: float,
    clip_eps_high: float | None = None,
) -> RatioDiagnostics:
    """Diagnostics of a mini-batch; all arguments as for ``policy_loss``."""
    weights = torch.zeros(3, 3, dtype=torch.float64)
    by_turn = torch.zeros(TURNS, 2, dtype=torch.float64)
    quantiles = torch.zeros(len(QUANTILES), dtype=torch.float64)
    high = clip_eps if clip_eps_high is None else clip_eps_high
    for row, level in enumerate(LEVELS):
        segments = Segments.of(level, loss_mask, turn_ids)
        token_ratio = segments.pick(log_probs, torch.float32) - segments.pick(old_log_probs, torch.float32)
        if not len(token_ratio):
            continue
        ratio = (segments.total(token_ratio) / segments.sizes).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        filled = ratio if segments.lengths is None else ratio[segments.lengths > 0]
        weights[row] = torch.stack([torch.tensor(float(len(filled))), filled.sum(), filled.square().sum()])
        if level == "token":
            quantiles = torch.quantile(token_ratio.double(), torch.tensor(QUANTILES, dtype=torch.float64))
        if level == ratio_level:
            advantage = segments.pick(advantages, torch.float32)
            spread = segments.spread(ratio)
            clipped = ((advantage > 0) & (spread > 1.0 + high)) | (
                (advantage < 0) & (spread < 1.0 - clip_eps)
            )
            turn = turn_ids.flatten().index_select(0, segments.positions).clamp(max=TURNS - 1)
            by_turn[:, 0] = torch.bincount(turn, minlength=TURNS)
            by_turn[:, 1] = torch.bincount(turn, weights=clipped.double(), minlength=TURNS)
    return RatioDiagnostics(weights, by_turn, quantiles)
