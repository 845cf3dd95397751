"""A trust region that takes bad steps back, for any algorithm.

A copy of the weights that begin a rollout batch is kept. Each mini-batch's forward pass, which is computed anyway,
tells how far the policy is from the one of that copy: D, the mean token KL. Where D is above the limit, the weights w
go back along the line to the copy w0, w <- w0 + t (w - w0), the learning rate's scale shrinks by t, and the mini-batch
is computed anew. Near w0 the KL grows with the square of the distance, so t = sqrt(limit / (2 D)) leads to half of the
limit. After the batch's last step a part of the batch is looked at once more. The scale grows again after batches that
stay far inside the region; slowly, because a batch of easy questions hardly moves at a rate that ruins the next one.

Before the first step of a batch, and where weights went all the way back, D is the noise of two passes over the same
weights. A limit that is lost in this noise would shrink the scale for steps that never went too far, so the run ends.
Everything here is elementwise in the weights: each rank moves its own shard, by a factor that all ranks know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from sorl_env.errors import UserError
from sorl_train.learner.backend import HeldWeights
from sorl_train.learner.batch import Batch
from sorl_train.losses.terms import sum_over_ranks

MOST_MOVES = 4  # moves back towards the copy before one that goes all the way
FINAL_KL_STRIDE = 4  # the KL after a batch's last step is that of every fourth trajectory
SHRINK = (0.1, 0.7)  # bounds of the factor by which the scale shrinks when steps are taken back
GROWTH = 1.5  # most that the scale grows by after a batch
MEMORY = 0.7  # decay per batch of the running maximum KL, which decides how far the scale grows


def token_kl(log_probs: Tensor, batch: Batch) -> float:
    """The mean token KL to the policy that the update of the batch began with, over the loss tokens of all ranks.

    The estimate is mean(log_ratio^2) / 2, as in ``loss/approx_kl``. Infinite where a log-probability is not finite, and
    0 without tokens.

    ``log_probs`` (B, T) are those of the current weights.
    """
    began = batch.began_log_probs
    if began is None:  # these very weights began the batch
        return 0.0
    mask = batch.loss_mask.cpu()
    log_ratio = (log_probs.cpu() - began.cpu())[mask].double()
    squares, tokens = sum_over_ranks(float(log_ratio.square().sum()), float(len(log_ratio)))
    return 0.5 * squares / max(tokens, 1.0) if math.isfinite(squares) else math.inf


def final_kl_sample(loss_masks: Iterable[Tensor]) -> list[int]:
    """The parts of a batch on which the KL after its last step is measured: every fourth part with loss tokens.

    They are chosen before the batch is divided over ranks. At least one is chosen if any part has loss tokens.

    ``loss_masks`` are bool, that of each trajectory (T,), or of each micro-batch of another trainer.
    """
    return [part for part, mask in enumerate(loss_masks) if bool(mask.any())][::FINAL_KL_STRIDE]


class TrustRegion:
    """Where the weights of one rollout batch began, how far they may go, and the scale of their learning rate.

    Args:
        limit: the largest mean token KL.
        max_scale: the largest scale; above 1 the configured learning rate is only where the search begins.

    Attributes:
        scale: what learning rates are multiplied by.
        recent_max_kl: the running maximum KL of the batches, at most the limit. Checkpoints keep it and ``scale``.
        moves: how often weights were moved back in this batch.
        largest: the largest KL seen in this batch.
    """

    def __init__(self, limit: float, max_scale: float) -> None:
        self.limit = limit
        self.target = limit / 2
        self.max_scale = max_scale
        self.scale, self.recent_max_kl = 1.0, 0.0
        self.moves, self.largest = 0, 0.0
        self._start: list[Tensor] = []
        self._moved = False  # whether the weights may have, since the batch began

    def begin(self, weights: Sequence[Tensor]) -> None:
        """Copy the weights that begin a batch, each of its own shape, to host memory, for steps to be taken back."""
        self.moves, self.largest, self._moved = 0, 0.0, False
        if not self._start:  # kept over batches, because pinned memory is slow to get
            self._start = [
                torch.empty_like(w, device="cpu", pin_memory=w.is_cuda, requires_grad=False) for w in weights
            ]
        for start, now in zip(self._start, weights, strict=True):
            start.copy_(now.detach())

    def pull_back_until_inside(self, held: HeldWeights, measure: Callable[[], float]) -> float:
        """Move the weights back until they are inside the region; returns their KL there.

        ``measure`` computes the KL at the current weights, and may add up a gradient, which a move back discards. The
        first call after ``begin`` comes before the first step.

        Raises UserError if the KL was above half of the limit at the weights that began the batch.
        """
        kl = measure()
        if not self._moved:
            self._check_noise(kl)
        self._moved = True  # by the step that comes next
        for move in range(MOST_MOVES + 1):
            self.largest = max(self.largest, kl)
            if kl <= self.limit:
                break
            self.go_back(held.weights(), kl, move)
            held.discard_gradient()
            held.sync_weights()
            kl = measure()
        else:
            self._check_noise(kl)
        return kl

    def _check_noise(self, kl: float) -> None:
        """Refuse a limit of which rounding alone takes more than half: the scale could then only shrink. Values that
        are not finite are left to the loss, which names them."""
        if self.target < kl < math.inf:
            raise UserError(
                f"update.trust_kl={self.limit:g} is too small for the precision of this run: at the weights that began "
                f"a batch, which had not moved, the mean token KL was {kl:.2g} instead of 0. That is rounding, for "
                "which the trust region would shrink the learning rate until nothing is learned. Use a limit of at "
                f"least {10 * kl:.1g}, ten times as much, or compute in float32 (hardware.dtype=float32 with "
                "engine=local, bf16=False in TRL)"
            )

    @torch.no_grad()
    def go_back(self, weights: Sequence[Tensor], kl: float, move: int) -> None:
        """Move weights, each of its own shape, to where the batch began, in part; the last ``move`` goes all the way.

        Only the first move shrinks the scale: further ones mean that earlier steps had already left the region.
        """
        share = math.sqrt(self.target / kl) if move < MOST_MOVES else 0.0
        if move == 0:
            self.scale *= min(max(share, SHRINK[0]), SHRINK[1])
        self.moves += 1
        for now, start in zip(weights, self._start, strict=True):
            start = start.to(now.device)
            # a share of 0 also where ``now`` is not finite, of which nothing must stay
            now.copy_(torch.lerp(start, now, share) if share else start)

    def end(self) -> None:
        """Raise the scale after a batch that learned something, while the recent maximum KL is below the target."""
        self.recent_max_kl = min(self.limit, max(self.largest, MEMORY * self.recent_max_kl))
        if 0.0 < self.recent_max_kl < self.target:
            self.scale = min(
                self.max_scale, self.scale * min(GROWTH, math.sqrt(self.target / self.recent_max_kl))
            )

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "recent": self.recent_max_kl}

    def load(self, state: Mapping[str, float]) -> None:
        """Go on from a ``state``."""
        self.scale, self.recent_max_kl = state["scale"], state["recent"]
