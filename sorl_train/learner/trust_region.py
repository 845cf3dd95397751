"""A trust region that takes bad steps back, for any algorithm and any torch optimizer. This file needs only torch.

A copy of the weights that begin a batch is kept. Each mini-batch's forward pass, which is computed anyway, tells how
far the policy is from the one of that copy: D, the mean KL. Where D is above the limit, the weights w go back along
the line to the copy w0, w <- w0 + t (w - w0), the learning rate's scale shrinks by t, and the mini-batch is computed
anew. Near w0 the KL grows with the square of the distance, so t = sqrt(limit / (2 D)) leads to half of the limit.
After the batch's last step a part of the batch is looked at once more. The scale grows again after batches that stay
far inside the region; slowly, because a batch of easy questions hardly moves at a rate that ruins the next one.

In a loop of your own, with ``old`` the log-probabilities of the policy that begins the batch::

    region = TrustRegion(optimizer, limit=0.01)
    for batch in batches:
        region.begin()
        for mini in batch.mini_batches():
            new = log_probs(mini)
            while region.step((new - mini.old).square().mean() / 2):
                new = log_probs(mini)  # weights were moved back
            loss(new, mini).backward()
            optimizer.step()
            optimizer.zero_grad()
        while region.end((log_probs(batch) - batch.old).square().mean() / 2):
            pass

At the weights that begin a batch D is the noise of two passes over the same weights. A limit that is lost in this noise
would shrink the scale for steps that never went too far, so ``step`` refuses it.

Everything here is elementwise in the weights: each rank moves its own shard, by a factor that all ranks know. So each
rank has to call with the KL over all ranks; ranks with different ones are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

MOST_MOVES = 4  # moves back towards the copy before one that goes all the way
FINAL_KL_STRIDE = 4  # the KL after a batch's last step is that of every fourth trajectory
SHRINK = (0.1, 0.7)  # bounds of the factor by which the scale shrinks when steps are taken back
GROWTH = 1.5  # most that the scale grows by after a batch
MEMORY = 0.7  # decay per batch of the running maximum KL, which decides how far the scale grows


class NoisyKLError(ValueError):
    """The KL was above half of the limit at weights that had not moved."""


def final_kl_sample(loss_masks: Iterable[Tensor]) -> list[int]:
    """The parts of a batch on which the KL after its last step is measured: every fourth part with loss tokens.

    They are chosen before the batch is divided over ranks. At least one is chosen if any part has loss tokens.

    ``loss_masks`` are bool, that of each trajectory (T,), or of each micro-batch of another trainer.
    """
    return [part for part, mask in enumerate(loss_masks) if bool(mask.any())][::FINAL_KL_STRIDE]


class TrustRegion:
    """Where the weights of one batch began, how far they may go, and the scale of their learning rate.

    Args:
        held: the optimizer, whose trainable parameters are kept near and whose steps are scaled. Or, for a trainer that
            scales steps itself, a function that returns the weights to move, of any shape, as this rank holds them.
        limit: the largest mean KL.
        max_scale: the largest scale; above 1 the configured learning rate is only where the search begins.
        model: the module, where FSDP2 (``fully_shard``) holds its weights: what it has gathered is gathered anew after
            a move.

    Attributes:
        scale: what learning rates are multiplied by.
        recent_max_kl: the running maximum KL of the batches, at most the limit.
        moves: how often weights were moved back in this batch.
        largest: the largest KL seen in this batch.
    """

    def __init__(
        self,
        held: torch.optim.Optimizer | Callable[[], Sequence[Tensor]],
        limit: float,
        max_scale: float = 1.0,
        *,
        model: nn.Module | None = None,
    ) -> None:
        if not (limit > 0.0 and max_scale >= 1.0):
            raise ValueError(
                f"limit must be above 0 and max_scale at least 1, not limit={limit}, max_scale={max_scale}"
            )
        self.limit = limit
        self.target = limit / 2
        self.max_scale = max_scale
        self.scale, self.recent_max_kl = 1.0, 0.0
        self.moves, self.largest = 0, 0.0
        self._held = held
        self._model = model
        self._start: list[Tensor] = []
        self._in_a_row = 0  # moves since the last step
        self._rates: list[tuple[dict[str, Any], Any]] = []  # of the optimizer, while it takes a scaled step
        if isinstance(held, torch.optim.Optimizer):
            held.register_step_pre_hook(self._before_step)
            held.register_step_post_hook(self._after_step)

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the weights that begin a batch to host memory, for steps to be taken back."""
        self.moves, self.largest, self._in_a_row = 0, 0.0, 0
        weights = self._weights()
        if [w.shape for w in self._start] != [w.shape for w in weights]:
            # kept over batches, because pinned memory is slow to get
            self._start = [
                torch.empty_like(w, device="cpu", pin_memory=w.is_cuda, requires_grad=False) for w in weights
            ]
        for start, now in zip(self._start, weights, strict=True):
            start.copy_(now)

    def step(self, kl: float | Tensor) -> bool:
        """Take in ``kl``, the mean KL (scalar) of the current weights to those that began the batch; moves them back if
        it is too large.

        Call it between two optimizer steps, best with the forward pass of the next mini-batch. Returns True if weights
        were moved: then compute the pass anew, without the gradient of the old one, and call again. After a few moves,
        the last of which goes all the way to the batch's beginning, it returns False.

        Raises NoisyKLError if the KL is above half of the limit at the weights that began the batch.
        """
        kl = float(kl.detach() if isinstance(kl, Tensor) else kl)
        kl = kl if math.isfinite(kl) else math.inf
        highest, lowest = _largest_of_ranks(kl, -kl)
        if highest != -lowest:
            raise RuntimeError(
                f"the KL differs between ranks, up to {highest:.6g} here {kl:.6g}: average it first"
            )
        if self.target < kl < math.inf and not self._has_moved():
            raise NoisyKLError(
                f"a limit of {self.limit:g} is too small for the precision of this run: at the weights that began "
                f"a batch, which had not moved, the mean KL was {kl:.2g} instead of 0. If that is rounding, for which "
                "the trust region would shrink the learning rate until nothing is learned, use a limit of at least "
                f"{10 * kl:.1g}, ten times as much, or compute in float32"
            )
        if self._in_a_row > MOST_MOVES:  # these are the weights that began the batch
            self._in_a_row = 0
            return False
        self.largest = max(self.largest, kl)
        if kl <= self.limit:
            self._in_a_row = 0
            return False
        self.go_back(kl)
        return True

    def end(self, kl: float | Tensor, *, learned: bool = True) -> bool:
        """``step`` after the batch's last optimizer step, with the KL (scalar) on a part of the batch.

        Raises the scale while the recent maximum KL is below half of the limit, unless the batch had nothing to learn
        from. Returns True if weights were moved: then measure the KL and call again.
        """
        if self.step(kl):
            return True
        if learned:
            self.recent_max_kl = min(self.limit, max(self.largest, MEMORY * self.recent_max_kl))
            if 0.0 < self.recent_max_kl < self.target:
                growth = min(GROWTH, math.sqrt(self.target / self.recent_max_kl))
                self.scale = min(self.max_scale, self.scale * growth)
        return False

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint between two batches keeps."""
        return {"scale": self.scale, "recent": self.recent_max_kl}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a ``state_dict``."""
        self.scale, self.recent_max_kl = state["scale"], state["recent"]

    def _weights(self) -> list[Tensor]:
        """The weights as this rank holds them, each of its own shape."""
        if isinstance(self._held, torch.optim.Optimizer):
            groups = self._held.param_groups
            weights: Sequence[Tensor] = [p for group in groups for p in group["params"] if p.requires_grad]
        else:
            weights = self._held()
        if self._model is None and any(hasattr(w, "to_local") for w in weights):
            raise ValueError("the weights are split over ranks as DTensors: give TrustRegion model=, too")
        return [w.to_local() if hasattr(w, "to_local") else w for w in weights]

    @torch.no_grad()
    def go_back(self, kl: float) -> None:
        """Move weights to where the batch began, in part; the last of several moves goes all the way.

        Only the first one shrinks the scale: further ones mean that earlier steps had already left the region.
        """
        share = math.sqrt(self.target / kl) if self._in_a_row < MOST_MOVES else 0.0
        if self._in_a_row == 0:
            self.scale *= min(max(share, SHRINK[0]), SHRINK[1])
        self._in_a_row += 1
        self.moves += 1
        for now, start in zip(self._weights(), self._start, strict=True):
            start = start.to(now.device)
            # a share of 0 also where ``now`` is not finite, of which nothing must stay
            now.copy_(torch.lerp(start, now, share) if share else start)
        for module in self._model.modules() if self._model is not None else ():
            reshard: Any = getattr(module, "reshard", None)  # FSDP2's
            if reshard is not None:
                reshard()

    @torch.no_grad()
    def _has_moved(self) -> bool:
        """Whether a weight of any rank is not where the batch began."""
        pairs = zip(self._weights(), self._start, strict=True)
        moved = any(not torch.equal(now, start.to(now.device)) for now, start in pairs)
        return bool(_largest_of_ranks(float(moved))[0])

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._rates = [(group, group["lr"]) for group in optimizer.param_groups]
        for group, rate in self._rates:
            group["lr"] = rate * self.scale

    def _after_step(self, *_: Any) -> None:
        for group, rate in self._rates:
            group["lr"] = rate
        self._in_a_row = 0


def _largest_of_ranks(*values: float) -> Sequence[float]:
    """The largest of each value over all ranks, where torch.distributed runs."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return values
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    packed = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(packed, dist.ReduceOp.MAX)
    found: list[float] = packed.tolist()
    return found
