"""One collected batch into optimizer steps: micro-batches, normalization, clipping.

Its advantages come from ``scored_batch``, its mini-batches and their learning rates from ``schedule``.

The classes here are the algorithm; by themselves they train a plain torch module on one device. An engine whose
gradients live elsewhere overrides the three methods that touch them: ``_forward``, ``_backward`` and ``_apply``. What
is summed over a mini-batch is summed over its micro-batches and, where torch.distributed runs, over its ranks.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sorl_train.algorithms import Algorithm
from sorl_train.config.settings import OptimConfig, TrainConfig
from sorl_train.learner.batch import Batch
from sorl_train.learner.diagnostics import RatioDiagnostics, diagnose_ratios
from sorl_train.losses.aggregate import aggregate, loss_denominator
from sorl_train.losses.clip_bias import ClipBias, Normalization, normalization
from sorl_train.losses.kl import kl_penalty
from sorl_train.losses.log_probs import TokenStats
from sorl_train.losses.policy import LossStats, policy_loss
from sorl_train.losses.sums import sum_over_ranks
from sorl_train.losses.value import value_loss
from sorl_train.models.forward import action_stats, autocast, disable_dropout


class NonFiniteError(RuntimeError):
    """NaN or infinity in a loss, a gradient or a log-probability; ``trajectory_ids`` say where."""

    def __init__(self, what: str, trajectory_ids: tuple[str, ...]) -> None:
        shown = ", ".join(trajectory_ids[:8]) + (", .." if len(trajectory_ids) > 8 else "")
        super().__init__(f"{what} is not finite; trajectories: {shown}")
        self.what = what
        self.trajectory_ids = trajectory_ids

    def __reduce__(self) -> Any:  # it comes from other processes, too
        return type(self), (self.what, self.trajectory_ids)


PEAKS = ("grad_norm", "clip_bias_norm")


class Means:
    """Running means of metrics by name."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = defaultdict(list)

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self._values[name].append(value)

    def latest(self, name: str) -> float:
        """The value added last."""
        return self._values[name][-1]

    def result(self, prefix: str = "loss/") -> dict[str, float]:
        """The means, and the highest value of what explodes."""
        means = {prefix + name: math.fsum(values) / len(values) for name, values in self._values.items()}
        peaks = {f"{prefix}{name}_max": max(self._values[name]) for name in PEAKS if name in self._values}
        steps = {prefix + "policy_updates": float(len(self._values["lr"]))} if "lr" in self._values else {}
        return means | peaks | steps


def clip_limit(limit: float, scales: Normalization, optim: OptimConfig) -> float:
    """The limit for a gradient that ``scales`` scaled already: f clip(g) = clip(f g) with f times the limit."""
    return limit * scales.grad_scale if optim.clip_before_normalization else limit


def past_target_kl(config: TrainConfig, means: Means) -> bool:
    """True when the mini-batch trained on last has moved from the policy that sampled it by ``update.target_kl``."""
    target = config.update.target_kl
    return target is not None and means.latest("approx_kl") > target


class PolicyUpdate:
    """Optimizer steps of the actor."""

    def __init__(
        self, model: Any, optimizer: torch.optim.Optimizer, algorithm: Algorithm, config: TrainConfig
    ) -> None:
        if config.stage == "rl":
            disable_dropout(model)
        self.model = model
        self.optimizer = optimizer
        self.algorithm = algorithm
        self.config = config
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def step(self, mini: Batch, lr: float, means: Means) -> tuple[Tensor, Tensor]:
        """One optimizer step on ``mini``, whatever its micro-batches: loss, clipping bias, normalization, clipping.

        Returns log-probabilities and entropies (B, T) before the step. If ``mini`` comes without old
        log-probabilities, they are these.
        """
        log_probs, entropies = torch.zeros(mini.loss_mask.shape), torch.zeros(mini.loss_mask.shape)
        bias, stats, bias_gradient = self._accumulate(mini, means, log_probs, entropies)
        scales = self._normalization(bias, bias_gradient)
        if self.config.update.skip_without_signal and not float(stats.signal):
            scales = dataclasses.replace(scales, update_scale=0.0)
        grad_norm = self._apply(scales, lr, mini)
        means.add(
            grad_norm=grad_norm,
            grad_norm_normalized=grad_norm * scales.grad_scale * scales.update_scale,
            normalizer=scales.factor,
            normalized_frac=float(scales.factor < 1.0),
            clip_bias_norm=scales.norm,
            lr=lr,
            effective_lr=lr * scales.update_scale,
            **{f"clip_bias_{name}": value for name, value in bias.norms().items()},
            **stats.metrics(),
            **self._diagnose(mini, log_probs).metrics(),
        )
        return log_probs, entropies

    def _diagnose(self, mini: Batch, log_probs: Tensor) -> RatioDiagnostics:
        assert mini.advantages is not None
        return diagnose_ratios(
            log_probs,
            log_probs if mini.old_log_probs is None else mini.old_log_probs,
            mini.advantages,
            mini.loss_mask,
            mini.turn_ids,
            mini.token_classes,
            ratio_level=self.algorithm.ratio,
            clip_eps=self.config.loss.clip_eps,
            clip_eps_high=self.config.loss.clip_eps_high,
        ).all_reduce()

    def _forward(self, micro: Batch) -> TokenStats:
        """Log-probabilities, entropy and logit scale of the loss tokens, (B, T)."""
        with autocast(self.config.hardware.dtype, micro.token_ids.device):
            return action_stats(
                self.model,
                micro.token_ids,
                micro.loss_mask,
                temperature=self.config.sampler.temperature,
                entropy=True,
                logit_scale=True,
            )

    def _backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of one micro-batch; ``last`` is the mini-batch's last one."""
        loss.backward()

    def _apply(self, scales: Normalization, lr: float, mini: Batch) -> float:
        """Scale, clip, step; returns the norm of the gradient as it was accumulated."""
        grad_norm = _grad_norm(self.parameters)
        if not math.isfinite(grad_norm):
            raise NonFiniteError("the policy gradient", mini.ids)
        _scale_gradients(self.parameters, scales.grad_scale)
        limit = self.config.optim.max_grad_norm
        if limit is not None:
            nn.utils.clip_grad_norm_(self.parameters, clip_limit(limit, scales, self.config.optim))
        set_lr(self.optimizer, lr * scales.update_scale)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return grad_norm

    def _accumulate(
        self, mini: Batch, means: Means, log_probs: Tensor, entropies: Tensor
    ) -> tuple[ClipBias, LossStats, list[Tensor] | None]:
        """Gradients of all micro-batches, with the whole mini-batch's denominator; fills both (B, T) arguments in."""
        loss_config = self.config.loss
        (denominator,) = sum_over_ranks(float(loss_denominator(mini.loss_mask, loss_config.aggregation)))
        bias: ClipBias | None = None
        stats: LossStats | None = None
        bias_gradient: list[Tensor] | None = None
        total = entropy_total = kl_total = 0.0
        device = self.parameters[0].device
        micros = list(mini.micro_batches(self.config.update.micro_batch_size))
        for number, (index, micro) in enumerate(micros):
            micro = micro.to(device)
            assert micro.advantages is not None
            token_stats = self._forward(micro)
            own = token_stats.log_probs.detach()
            log_probs[index, : own.shape[1]] = own.float().cpu()
            output = policy_loss(
                token_stats.log_probs,
                own if micro.old_log_probs is None else micro.old_log_probs,
                micro.advantages,
                micro.loss_mask,
                micro.turn_ids,
                ratio_level=self.algorithm.ratio,
                clip_eps=loss_config.clip_eps,
                clip_eps_high=loss_config.clip_eps_high,
                dual_clip=loss_config.dual_clip,
                aggregation=loss_config.aggregation,
                denominator=denominator,
                logit_scale=token_stats.logit_scale,
                trajectory_norm=self._trajectory_norm(),
                delta=loss_config.clip_bias_delta,
                clip_bias_objective=self.algorithm.normalize and loss_config.clip_bias_norm == "gradient",
            )
            how = {"aggregation": loss_config.aggregation, "denominator": denominator}
            assert token_stats.entropy is not None
            entropies[index, : own.shape[1]] = token_stats.entropy.detach().float().cpu()
            entropy = aggregate(token_stats.entropy, micro.loss_mask, **how)  # type: ignore[arg-type]
            loss = output.loss
            if loss_config.entropy_coef:  # a weight of 0 would still cost the entropy's backward pass
                loss = loss - loss_config.entropy_coef * entropy
            if micro.ref_log_probs is not None:
                penalty = kl_penalty(token_stats.log_probs, micro.ref_log_probs, loss_config.kl_type)
                kl = aggregate(penalty, micro.loss_mask, **how)  # type: ignore[arg-type]
                kl_total += float(kl.detach())
                if loss_config.kl_in == "loss":
                    loss = loss + loss_config.kl_coef * kl
            if not torch.isfinite(loss):
                raise NonFiniteError("the policy loss", micro.ids)
            if output.clip_bias_objective is not None:
                bias_gradient = self._add_bias_gradient(output.clip_bias_objective, bias_gradient)
            self._backward(loss, last=number == len(micros) - 1)
            total += float(loss.detach())
            entropy_total += float(entropy.detach())
            bias = output.clip_bias if bias is None else bias + output.clip_bias
            stats = output.stats if stats is None else stats + output.stats
        assert bias is not None and stats is not None
        total, entropy_total, kl_total = sum_over_ranks(total, entropy_total, kl_total)
        means.add(policy=total, entropy=entropy_total)
        if mini.ref_log_probs is not None:
            means.add(ref_kl=kl_total)
        return bias.all_reduce(), stats.all_reduce(), bias_gradient

    def _add_bias_gradient(self, objective: Tensor, total: list[Tensor] | None) -> list[Tensor]:
        grads = torch.autograd.grad(objective, self.parameters, retain_graph=True, materialize_grads=True)
        return list(grads) if total is None else [a + b for a, b in zip(total, grads, strict=True)]

    def _trajectory_norm(self) -> Any:
        loss_config = self.config.loss
        per_trajectory = self.algorithm.normalize and loss_config.clip_bias_scope == "trajectory"
        return loss_config.clip_bias_norm if per_trajectory else None

    def _normalization(self, bias: ClipBias, bias_gradient: list[Tensor] | None) -> Normalization:
        loss_config = self.config.loss
        if not self.algorithm.normalize:
            name = "token" if loss_config.clip_bias_norm == "gradient" else loss_config.clip_bias_norm
            return Normalization(grad_scale=1.0, update_scale=1.0, norm=bias.norm(name), factor=1.0)
        norm = None if bias_gradient is None else float(torch.stack([g.norm() for g in bias_gradient]).norm())
        return normalization(
            bias,
            norm=loss_config.clip_bias_norm,
            scope=loss_config.clip_bias_scope,
            target=loss_config.clip_bias_target,
            delta=loss_config.clip_bias_delta,
            gradient_norm=norm,
        )


class CriticUpdate:
    """Optimizer steps of the critic."""

    def __init__(self, critic: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig) -> None:
        disable_dropout(critic)
        self.critic = critic
        self.optimizer = optimizer
        self.config = config
        self.parameters = list(critic.parameters())

    def step(self, mini: Batch, lr: float, means: Means) -> None:
        """One optimizer step towards the returns."""
        loss_config = self.config.loss
        (denominator,) = sum_over_ranks(float(loss_denominator(mini.loss_mask, loss_config.aggregation)))
        total = 0.0
        device = self.parameters[0].device
        micros = list(mini.micro_batches(self.config.update.critic_micro_batch_size))
        for number, (_, micro) in enumerate(micros):
            micro = micro.to(device)
            assert micro.returns is not None
            loss = value_loss(
                self._forward(micro),
                micro.returns,
                micro.loss_mask,
                old_values=micro.values,
                clip_eps=loss_config.value_clip,
                aggregation=loss_config.aggregation,
                denominator=denominator,
            ).loss
            if not torch.isfinite(loss):
                raise NonFiniteError("the value loss", micro.ids)
            self._backward(loss, last=number == len(micros) - 1)
            total += float(loss.detach())
        (total,) = sum_over_ranks(total)
        means.add(value=total, critic_grad_norm=self._apply(lr, mini))

    def _forward(self, micro: Batch) -> Tensor:
        """Values (B, T)."""
        with autocast(self.config.hardware.dtype, micro.token_ids.device):
            values: Tensor = self.critic(micro.token_ids)
        return values

    def _backward(self, loss: Tensor, last: bool) -> None:
        """As ``PolicyUpdate._backward``."""
        loss.backward()

    def _apply(self, lr: float, mini: Batch) -> float:
        """Clip and step; returns the norm of the gradient."""
        grad_norm = _grad_norm(self.parameters)
        if not math.isfinite(grad_norm):
            raise NonFiniteError("the critic's gradient", mini.ids)
        if self.config.optim.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.config.optim.max_grad_norm)
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return grad_norm


def _grad_norm(parameters: Sequence[Tensor]) -> float:
    return float(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


def _scale_gradients(parameters: Sequence[Tensor], scale: float) -> None:
    if scale != 1.0:
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], scale)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The same rate for every group of parameters."""
    for group in optimizer.param_groups:
        group["lr"] = lr
