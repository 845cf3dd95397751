"""The clipping bias, its norms, and the normalization they trigger. Pure torch.

With ``c_t = 1[clipped] w_t A_t`` on the loss tokens, B trajectories in the mini-batch and ``n = |y|`` loss tokens
in each, the paper's clipping bias is C = E[(1/n) sum_t c_t] (eq:Cturn_def), a signed scalar; its lemma lives in
log-probability space and its figure shows the norm of a gradient. So the norm is a named choice:

==============  ==================================================================================================
``scalar``      abs of the mean over trajectories of (1/n) sum c_t: eq:Cturn_def to the letter; signs cancel
``trajectory``  L2 over trajectories of (1/n) sum c_t
``token``       L2 over all tokens of c_t
``token_mean``  mean over trajectories of the L2 over their tokens
``logit``       as ``token``, each term times ||d log p(y_t) / d logits||_2 = sqrt(1 - 2 p_y + sum p^2)
``gradient``    L2 norm of the parameter gradient of C; the caller runs that backward and passes the norm
==============  ==================================================================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor

ClipBiasNorm = Literal["scalar", "trajectory", "token", "token_mean", "logit", "gradient"]
Scope = Literal["mini_batch", "trajectory"]
Target = Literal["gradient", "update"]

SumsT = TypeVar("SumsT", bound="Sums")


def check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError naming ``value``, the choices and the nearest one."""
    if value not in choices:
        import difflib

        near = difflib.get_close_matches(value, choices, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown {what} {value!r}; choose from {', '.join(choices)}.{hint}")


@dataclass(frozen=True)
class Sums:
    """Scalars that add up over micro-batches (``+``) and over ranks (``all_reduce``): 0-d detached tensors."""

    def __add__(self: SumsT, other: SumsT) -> SumsT:
        return type(self)(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def all_reduce(self: SumsT, group: dist.ProcessGroup | None = None) -> SumsT:
        """The sum over all ranks of ``group``; itself when torch.distributed is not initialised."""
        if not (dist.is_available() and dist.is_initialized()):
            return self
        packed = torch.stack([getattr(self, f.name) for f in fields(self)])
        dist.all_reduce(packed, group=group)
        return type(self)(*packed.unbind())


@dataclass(frozen=True)
class ClipBias(Sums):
    """What the norms of the clipping bias need of a micro-batch, as sums.

    Attributes:
        trajectories: number of trajectories with at least one loss token.
        clipped: number of clipped tokens.
        mean_sum: sum over trajectories of m_i = (1/n) sum_t c_t.
        mean_square_sum: sum over trajectories of m_i^2.
        square_sum: sum over tokens of c_t^2.
        l2_sum: sum over trajectories of sqrt(sum_t c_t^2).
        logit_square_sum: sum over tokens of (c_t logit_scale_t)^2; NaN when no ``logit_scale`` was given.
        factor_sum: sum over trajectories of the trajectory scope's weights f_i; each is 1 in the other scope.
    """

    trajectories: Tensor
    clipped: Tensor
    mean_sum: Tensor
    mean_square_sum: Tensor
    square_sum: Tensor
    l2_sum: Tensor
    logit_square_sum: Tensor
    factor_sum: Tensor

    def norm(self, name: ClipBiasNorm, gradient_norm: float | None = None) -> float:
        """The norm ``name`` of the whole mini-batch, once its micro-batches and ranks are summed.

        ``gradient`` is ``gradient_norm``, which is only needed when something was clipped.
        """
        check_choice("clip_bias_norm", name, get_args(ClipBiasNorm))
        if name == "gradient":
            if float(self.clipped) == 0.0:
                return 0.0
            if gradient_norm is None:
                raise ValueError(
                    "clip_bias_norm 'gradient' needs gradient_norm: the L2 norm of the parameter gradient of "
                    "clip_bias_objective, summed over the mini-batch"
                )
            return float(gradient_norm)
        if name == "logit" and math.isnan(float(self.logit_square_sum)):
            raise ValueError("clip_bias_norm 'logit' needs policy_loss(..., logit_scale=...)")
        return self.norms()[name]

    def norms(self) -> dict[str, float]:
        """Every norm that needs no second backward, by name; ``logit`` only when ``logit_scale`` was given."""
        count = max(float(self.trajectories), 1.0)
        norms = {
            "scalar": abs(float(self.mean_sum)) / count,
            "trajectory": math.sqrt(float(self.mean_square_sum)),
            "token": math.sqrt(float(self.square_sum)),
            "token_mean": float(self.l2_sum) / count,
        }
        logit = float(self.logit_square_sum)
        return norms if math.isnan(logit) else {**norms, "logit": math.sqrt(logit)}


@dataclass(frozen=True)
class Normalization:
    """What the trainer multiplies: the gradient before clipping, and the optimizer's step (its learning rate).

    ``norm`` is the clipping bias norm of the mini-batch; ``factor`` the (mean) 1 / max(norm, delta).
    """

    grad_scale: float
    update_scale: float
    norm: float
    factor: float


def clip_bias_factor(
    clip_bias: ClipBias, norm: ClipBiasNorm, delta: float = 1.0, gradient_norm: float | None = None
) -> float:
    """1 / max(||C||, delta), eq:ST_PPO_mc and eq:GRPO_MC. The paper's delta is 1."""
    return 1.0 / max(clip_bias.norm(norm, gradient_norm), delta)


def normalization(
    clip_bias: ClipBias,
    *,
    norm: ClipBiasNorm = "token",
    scope: Scope = "mini_batch",
    target: Target = "update",
    delta: float = 1.0,
    gradient_norm: float | None = None,
) -> Normalization:
    """Scales of one optimizer step.

    Args:
        clip_bias: of the whole mini-batch: summed over its micro-batches and ranks.
        scope: ``mini_batch``, one factor f (eq:ST_PPO_mc); ``trajectory``, a factor f_i each, which the loss
            already carries ("reweights each sampled generation according to its clipping bias").
        target: ``gradient``, f multiplies the gradient; ``update``, f multiplies the optimizer's step. The two are
            one and the same for plain SGD; Adam divides a constant scale of the gradient out again.
            In the trajectory scope ``update`` divides the mean of f_i out of the gradient and puts it on the step.
    """
    check_choice("scope", scope, get_args(Scope))
    check_choice("target", target, get_args(Target))
    check_scope(norm, scope)
    value = clip_bias.norm(norm, gradient_norm)
    if scope == "mini_batch":
        factor = 1.0 / max(value, delta)
        grad_scale, update_scale = (factor, 1.0) if target == "gradient" else (1.0, factor)
    else:
        count = float(clip_bias.trajectories)
        factor = float(clip_bias.factor_sum) / count if count else 1.0
        grad_scale, update_scale = (1.0, 1.0) if target == "gradient" else (1.0 / factor, factor)
    return Normalization(grad_scale, update_scale, value, factor)


def check_scope(norm: str, scope: str) -> None:
    """Raises ValueError for a norm that the scope cannot have."""
    if scope == "trajectory" and norm == "gradient":
        raise ValueError(
            "clip_bias_norm 'gradient' with scope 'trajectory' would take a backward for each trajectory; "
            "use scope 'mini_batch', or norm 'logit', which is exact in logit space"
        )
