"""What others do against the collapse of off-policy updates, as algorithms from outside; see ``remedies.yaml``.

    sorl-train --config off_policy --algo benchmarks/remedies.py:grpo_dppo_0.15

Each row is PPO or GRPO with one remedy at one setting, which the end of its name gives. Remedies that are settings are
in the study: a smaller clip (``loss.clip_eps``), an early stop (``update.target_kl``) and the trust region itself. The
masks and weights are measured from the policy that sampled. Each is a small function of tensors (B, T), which the
tests compute by hand. They work on both engines; the plugins of other trainers refuse them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sorl_train.algorithms import Algorithm
from sorl_train.learner.trust_region import SHRINK, TrustRegion
from sorl_train.losses.segments import importance_ratio
from sorl_train.losses.terms import sum_over_ranks


def unclipped(ratio: Tensor, advantage: Tensor, clip: Any) -> Tensor:
    """w A: the surrogate of remedies that mask tokens in place of PPO's clip; all (N,)."""
    return ratio * advantage


def reinforce(ratio: Tensor, advantage: Tensor, clip: Any) -> Tensor:
    """A log w, whose gradient is A grad log p: for remedies whose weight has the ratio in it; all (N,)."""
    return advantage * ratio.log()


def _log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """log p - log p_old (B, T), 0 off the mask."""
    return (log_probs - old_log_probs).masked_fill(~mask, 0.0)


def _row_means(values: Tensor, mask: Tensor) -> Tensor:
    return values.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def dppo_tv(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, delta: float) -> Tensor:
    """DPPO with the binary total variation (arXiv:2602.04879; Stable-RL and verl's ``dppo_tv``, delta .15).

    0 where the probability of the sampled token has moved by more than delta in the direction in which its advantage
    pushes it, else 1: |p - p_old| > delta, and (p - p_old) A > 0. The objective is REINFORCE with the ratio up to 20.
    """
    moved = log_probs.exp() - old.exp()
    return (~((moved.abs() > delta) & (moved * advantages > 0))).to(log_probs.dtype)


def drifted(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, delta: float) -> Tensor:
    """Off-policy sequence mask (DeepSeek-V3.2, arXiv:2512.02556, section 3.1; TRL advises a delta of .5).

    0 for tokens with a negative advantage in trajectories whose mean of log p_old - log p is above delta. With GRPO a
    trajectory has one advantage, as published; with a critic its tokens differ, and those with a negative one are out.
    """
    drift = -_row_means(_log_ratio(log_probs, old, mask), mask)
    return (~((drift > delta) & (advantages < 0))).to(log_probs.dtype)


def geometric(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, bound: float) -> Tensor:
    """Geometric sequence mask (Liu, Li et al. 2025, https://richardli.xyz/rl-collapse; verl's bounds .999 to 1.001).

    0 for trajectories whose geometric mean ratio is outside [exp(-bound), exp(bound)], whatever their advantage.
    """
    inside = _row_means(_log_ratio(log_probs, old, mask), mask).abs() <= bound
    return inside.to(log_probs.dtype).expand_as(log_probs)


def second_moment(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, tau: float) -> Tensor:
    """M2PO (arXiv:2510.01161, algorithm 1, tau .04).

    Among the tokens of the micro-batch that PPO's clip could cut, (w - 1) A > 0, those with the largest squared
    log-ratios get 0, as many as it takes for the mean of the others' squares to be at most tau.
    """
    log_ratio = _log_ratio(log_probs, old, mask)
    places = (mask & (log_ratio * advantages > 0)).flatten().nonzero().squeeze(1)
    squares, order = log_ratio.flatten()[places].square().sort(stable=True)
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
    weights = torch.ones_like(log_probs).flatten()
    weights[places[order[int((means <= tau).sum()) :]]] = 0.0
    return weights.view_as(log_probs)


def vespo(
    log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, positive: Any, negative: Any
) -> Tensor:
    """VESPO (arXiv:2602.10693; TRL's settings are (2, 3) where the advantage is not negative, else (3, 2)).

    w^k exp(l (1 - w)) with (k, l), where w is the product of a trajectory's ratios.
    """
    log_w = _log_ratio(log_probs, old, mask).sum(dim=1, keepdim=True).clamp(math.log(1e-8), 20.0)
    pushed = advantages >= 0
    power = torch.where(pushed, float(positive[0]), float(negative[0]))
    rate = torch.where(pushed, float(positive[1]), float(negative[1]))
    return (power * log_w + rate * (1.0 - log_w.exp())).exp()


def truncated_sequence(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """min(w, 8) with the product w of a trajectory's ratios: the weight that VCPO is published with."""
    w = importance_ratio(_log_ratio(log_probs, old, mask).sum(dim=1, keepdim=True))
    return w.clamp(max=8.0).expand_as(log_probs)


def effective_size(
    log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, power: float
) -> float:
    """VCPO (arXiv:2602.17616, section 3.2): (ESS / B)^power, where ESS = (sum w)^2 / sum w^2 over B trajectories.

    w is the product of a trajectory's ratios, not truncated. The power is 1/2 for AdamW. The paper divides ESS / B by
    its on-policy value, which is 1 where sampler and trainer agree. Its baseline, which needs the gradient's norm for
    each trajectory, is not built.
    """
    present = mask.any(dim=1)
    w = importance_ratio(_log_ratio(log_probs, old, mask).sum(dim=1)[present].double())
    total, squares, count = sum_over_ranks(float(w.sum()), float(w.square().sum()), float(len(w)))
    return float((total**2 / (squares * count)) ** power) if count else 1.0


class BackAlone(TrustRegion):
    """Goes back, and leaves the learning rate as it is."""

    def go_back(self, kl: float) -> None:
        scale = self.scale
        super().go_back(kl)
        self.scale = scale


class ShrinkAlone(TrustRegion):
    """Shrinks the learning rate by as much as the trust region does, and leaves the weights where they are."""

    def step(self, kl: Any) -> bool:
        self.largest = max(self.largest, kl)
        if kl > self.limit:
            self.scale *= min(max(math.sqrt(self.target / kl), SHRINK[0]), SHRINK[1])
        return False


class KLAdaptive(TrustRegion):
    """The learning rate of rsl_rl and skrl, which follows the KL: after each step / 1.5 above twice the desired KL, and
    * 1.5 below half of it, between a hundredth and ten times the rate that it began with.

    It is measured before a step, so nothing changes before a batch's first step nor after its last. As with the trust
    region, a mini-batch without advantages takes no step.
    """

    def begin(self) -> None:
        self.largest, self._moved = 0.0, False

    def step(self, kl: Any) -> bool:
        self.largest = max(self.largest, kl)
        if self._moved and kl > 2.0 * self.limit:
            self.scale = max(0.01, self.scale / 1.5)
        elif self._moved and 0.0 < kl < 0.5 * self.limit:
            self.scale = min(10.0, self.scale * 1.5)
        self._moved = True
        return False

    def end(self, kl: Any, *, learned: bool = True) -> bool:
        before = self.scale
        self.step(kl)
        if learned:
            self.scale = before
        return False


_CISPO = {"loss.clip_eps_high": 19.0}  # REINFORCE with the ratio, a constant up to 20
# name, setting at which it was published first, to what the row has beside PPO's or GRPO's
REMEDIES: Mapping[str, Mapping[str, Any]] = {
    **{
        f"{name}_{limit:g}": {"trust": kind, "defaults": {"update.trust_kl": limit}}
        for name, kind in {"back": BackAlone, "shrink": ShrinkAlone, "kl_adaptive": KLAdaptive}.items()
        for limit in (0.01, 0.03, 0.003)
    },
    **{
        f"dppo_{delta:g}": {
            "surrogate": "cispo",
            "weight": functools.partial(dppo_tv, delta=delta),
            "defaults": _CISPO,
        }
        for delta in (0.15, 0.05, 0.02)
    },
    **{
        f"drifted_{delta:g}": {"weight": functools.partial(drifted, delta=delta)}
        for delta in (0.5, 0.05, 0.005)
    },
    **{
        f"geometric_{bound:g}": {"weight": functools.partial(geometric, bound=bound)}
        for bound in (0.001, 0.01, 0.1)
    },
    **{
        f"m2po_{tau:g}": {
            "surrogate": unclipped,
            "weight": functools.partial(second_moment, tau=tau),
        }
        for tau in (0.04, 0.01, 0.0025)
    },
    **{
        f"vespo_{name}": {
            "surrogate": reinforce,
            "weight": functools.partial(vespo, positive=positive, negative=negative),
            "defaults": {"loss.aggregation": "token_mean"},
        }
        for name, positive, negative in (
            ("23", (2, 3), (3, 2)),
            ("46", (4, 6), (6, 4)),
            ("11", (1, 1), (1, 1)),
        )
    },
    "vcpo": {
        "surrogate": reinforce,
        "weight": truncated_sequence,
        "step_scale": functools.partial(effective_size, power=0.5),
    },
    "vcpo_clipped": {"step_scale": functools.partial(effective_size, power=0.5)},
    "vcpo_clipped_2": {"step_scale": functools.partial(effective_size, power=2.0)},
}
for _kind, _advantage in {"ppo": "gae", "grpo": "group"}.items():
    for _name, _options in REMEDIES.items():
        globals()[f"{_kind}_{_name}"] = Algorithm("token", _advantage, about=f"{_kind}, {_name}", **_options)  # type: ignore[arg-type]
