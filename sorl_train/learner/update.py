"""One collected batch becomes optimizer steps: micro-batches, normalization, gradient clipping.

The batch's advantages come from ``advantages``, its mini-batches and their learning rates from ``update_settings``. A
``Backend`` holds weights and gradients. Sums over a mini-batch run over its micro-batches and, where torch.distributed
runs, over its ranks.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from sorl_env.errors import UserError
from sorl_env.outside import call_outside
from sorl_train.config.settings import TrainConfig
from sorl_train.learner.backend import Backend
from sorl_train.learner.batch import Batch
from sorl_train.learner.diagnostics import RatioDiagnostics, diagnose_ratios
from sorl_train.learner.optimizer_step import Means, NonFiniteError, mean_over, on_device
from sorl_train.learner.trust_region import NoisyKLError, TrustRegion
from sorl_train.learner.update_settings import learning_rates, loss_settings, steps_of_batch
from sorl_train.losses.clip_bias import LossStats, Normalization, normalization
from sorl_train.losses.log_probs import TokenStats
from sorl_train.losses.policy import LossOutput, policy_loss
from sorl_train.losses.terms import aggregate, kl_penalty, sum_over_ranks, value_loss
from sorl_train.models.forward import disable_dropout


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


class _Totals:
    """Sums over the micro-batches of one mini-batch; log-probabilities and entropies are (B, T) on the CPU."""

    def __init__(self, shape: torch.Size) -> None:
        self.log_probs, self.entropies = torch.zeros(shape), torch.zeros(shape)
        self.losses: dict[str, float] = defaultdict(float)
        self.stats: LossStats | None = None
        self.not_finite: tuple[str, ...] = ()  # trajectories of micro-batches with a non-finite loss

    def add(self, rows: Tensor, found: TokenStats, output: LossOutput, losses: Mapping[str, Tensor]) -> None:
        """Add a micro-batch, which is the ``rows`` of the mini-batch."""
        assert found.entropy is not None
        width = found.log_probs.shape[1]
        self.log_probs[rows, :width] = found.log_probs.detach().float().cpu()
        self.entropies[rows, :width] = found.entropy.detach().float().cpu()
        for name, value in losses.items():
            self.losses[name] += float(value.detach())
        self.stats = output.stats if self.stats is None else self.stats + output.stats


class PolicyUpdate:
    """Optimizer steps of the policy.

    Attributes:
        past_target_kl: whether the newest mini-batch found the policy further than ``update.target_kl`` from the one
            that the update of its batch began with (``token_kl``).
        trust: the trust region; None: there is none.
    """

    past_target_kl = False

    def __init__(self, backend: Backend, config: TrainConfig) -> None:
        disable_dropout(backend.model)
        self.backend = backend
        self.config = config
        self.total_steps = config.update.steps * steps_of_batch(config.rollout.batch_size, config.update)
        self.loss_settings = loss_settings(config)
        self.algorithm = config.algorithm
        self.kl_coef = config.loss.kl_coef if config.loss.kl_in != "reward" else 0.0
        self.has_teacher = self.kl_coef > 0 and (
            config.loss.kl_model is not None or config.loss.kl_in == "alone"
        )
        limit = config.update.trust_kl if config.stage == "rl" else None
        make = self.algorithm.trust or TrustRegion
        self.trust = None if limit is None else make(backend.weights, limit, config.update.trust_max_scale)

    def begin_batch(self) -> None:
        """Called before the first step on a rollout batch."""
        if self.trust is not None:
            self.trust.begin()

    def steps(
        self, minis: Iterable[Batch], done: int, means: Means
    ) -> Iterator[tuple[Batch, Tensor, Tensor]]:
        """The steps on a rollout batch, up to ``update.target_kl``; ``done`` steps came before. ``end_batch`` follows.

        Yields each mini-batch after its step, with the two tensors (B, T) that ``step`` returns.
        """
        self.begin_batch()
        optim = self.config.optim
        rates = learning_rates(optim, optim.lr, optim.warmup_ratio, done, self.total_steps)
        for mini, lr in zip(minis, rates, strict=False):
            yield mini, *self.step(mini, lr, means)
            if self.past_target_kl:
                break

    def step(self, mini: Batch, lr: float, means: Means) -> tuple[Tensor, Tensor]:
        """One optimizer step on the mini-batch ``mini``, the same however it is cut into micro-batches.

        Returns log-probabilities and entropies (B, T) before the step. A mini-batch without old log-probabilities was
        sampled by the current weights, so its old ones are these.
        """
        totals = self._accumulate(mini) if self.trust is None else self._accumulate_inside(mini, self.trust)
        if totals.not_finite:
            raise NonFiniteError("the policy loss", totals.not_finite)
        assert totals.stats is not None
        limit = self.config.update.target_kl
        if limit is not None:  # as the KL is that of all ranks, all of them stop together
            self.past_target_kl = token_kl(totals.log_probs, mini) > limit
        scheduled, lr = lr, lr if self.trust is None else lr * self.trust.scale
        if self.algorithm.step_scale is not None:
            lr *= call_outside(self.algorithm.step_scale, *_hook_arguments(mini, totals.log_probs))
        names, values = totals.losses.keys(), sum_over_ranks(*totals.losses.values())
        stats = totals.stats.all_reduce()
        scales = self._normalization(stats)
        # without advantages Adam's momentum would move the weights, unseen by the trust region
        skips = self.config.update.skip_without_signal or self.trust is not None
        skips = skips and not self.has_teacher  # which every token learns from
        if not float(stats.tokens) or (skips and not float(stats.signal)):
            scales = dataclasses.replace(scales, update_scale=0.0)
        rate, clip = lr * scales.update_scale, self.config.optim.max_grad_norm
        grad_norm = _finite(self.backend.step(rate, clip, scales.grad_scale), "the policy gradient", mini)
        means.add(
            **dict(zip(names, values, strict=True)),
            grad_norm=grad_norm,
            grad_norm_normalized=grad_norm * scales.grad_scale * scales.update_scale,
            normalizer=scales.factor,
            normalized_frac=float(scales.factor < 1.0),
            clip_bias_norm=scales.norm,
            lr=scheduled,
            effective_lr=rate,
            **{f"clip_bias_{name}": value for name, value in stats.norms().items()},
            **stats.metrics(),
            **self._diagnose(mini, totals.log_probs).metrics(),
        )
        return totals.log_probs, totals.entropies

    def end_batch(self, sample: Batch, means: Means) -> None:
        """Called after the last step on a rollout batch, with the trajectories of ``final_kl_sample``, if any."""
        if self.trust is None or not len(sample):
            return
        self.backend.model.eval()
        end = partial(self.trust.end, learned=self.has_teacher or means.any("signal_frac"))
        kl = self._move_back(end, lambda: self._kl(sample))
        means.add(
            trust_kl=kl,
            trust_kl_max=self.trust.largest,
            trust_moves_back=self.trust.moves,
            trust_scale=self.trust.scale,
        )

    @torch.no_grad()
    def _kl(self, batch: Batch) -> float:
        """Mean token KL of the current policy to the one that the batch's update began with."""
        log_probs = torch.zeros(batch.loss_mask.shape)
        for rows, micro, _ in self._micro_batches(batch):
            found = self.backend.log_probs(micro, micro.loss_mask).log_probs.float().cpu()
            log_probs[rows, : found.shape[1]] = found
        return token_kl(log_probs, batch)

    def _accumulate_inside(self, mini: Batch, trust: TrustRegion) -> _Totals:
        """``_accumulate``, and again at weights that are moved back until they are inside the trust region."""
        totals: _Totals | None = None

        def measure() -> float:
            nonlocal totals
            totals = self._accumulate(mini)
            return token_kl(totals.log_probs, mini)

        self._move_back(trust.step, measure)
        assert totals is not None
        return totals

    def _move_back(self, step: Callable[[float], bool], measure: Callable[[], float]) -> float:
        """``step`` of the trust region until it moves no weights; returns the KL there."""
        try:
            while step(kl := measure()):
                self.backend.discard_gradient()
                self.backend.sync_weights()
        except NoisyKLError as error:
            raise UserError(f"update.trust_kl: {error} (hardware.dtype=float32 with engine=local)") from error
        return kl

    def _accumulate(self, mini: Batch) -> _Totals:
        """Gradients of all micro-batches, with the denominator of the whole mini-batch."""
        objective = self.config.loss
        how = mean_over(mini, objective.aggregation)
        totals = _Totals(mini.loss_mask.shape)
        entropy_coef = self._entropy_coef(mini)
        for rows, micro, last in self._micro_batches(mini):
            assert micro.advantages is not None
            learns = self._may_have_gradient(micro)
            with torch.set_grad_enabled(learns):
                found = self.backend.log_probs(micro, micro.loss_mask, entropy=True, logit_scale=True)
            assert found.entropy is not None
            old = _old_log_probs(micro, found.log_probs.detach())
            output = policy_loss(
                found.log_probs,
                old,
                micro.advantages,
                micro.loss_mask,
                micro.turn_ids,
                self.loss_settings,
                denominator=how["denominator"],
                logit_scale=found.logit_scale,
                correction=self._token_weights(micro, found.log_probs.detach()),
            )
            losses = {"policy": output.loss, "entropy": aggregate(found.entropy, micro.loss_mask, **how)}
            if entropy_coef:  # a weight of 0 would still cost the entropy's backward pass
                losses["policy"] = losses["policy"] - entropy_coef * losses["entropy"]
            if micro.ref_log_probs is not None:
                penalty = kl_penalty(found.log_probs, micro.ref_log_probs, objective.kl_type, old)
                losses["ref_kl"] = aggregate(penalty, micro.loss_mask, **how)
                if self.kl_coef:
                    losses["policy"] = losses["policy"] + self.kl_coef * losses["ref_kl"]
            if not torch.isfinite(losses["policy"]):
                totals.not_finite += micro.ids
            if learns:
                self.backend.backward(losses["policy"], last)
            totals.add(rows, found, output, losses)
        if not self._may_have_gradient(mini):  # then Adam gets gradients of zero, and not none
            for parameter in self.backend.parameters:
                parameter.grad = torch.zeros_like(parameter)
        return totals

    def _entropy_coef(self, mini: Batch) -> float:
        """The weight of the entropy bonus: 0 while the entropy is above its target, so that the bonus holds it there.

        The entropy is estimated from the sampler's log-probabilities, which need no pass before this one, nor a state.
        The rule is Skywork-OR1's (arXiv:2505.22312), with a constant weight.
        """
        coef, target = self.config.loss.entropy_coef, self.config.loss.entropy_target
        if not coef or target is None:
            return coef
        sampled = mini.rollout_log_probs[mini.loss_mask].double()
        surprise, tokens = sum_over_ranks(-float(sampled.sum()), float(len(sampled)))
        return coef if surprise < target * tokens else 0.0

    def _token_weights(self, micro: Batch, log_probs: Tensor) -> Tensor | None:
        """What each token's surrogate is multiplied by, (B, T): the correction for the sampler, and the algorithm's."""
        if self.algorithm.weight is None:
            return micro.correction
        own: Tensor = call_outside(self.algorithm.weight, *_hook_arguments(micro, log_probs)).detach()
        return own if micro.correction is None else own * micro.correction

    def _may_have_gradient(self, micro: Batch) -> bool:
        """Whether the gradient of a micro-batch can be other than zero; a group of equal rewards has no advantages.

        Its forward pass is still needed for the divergence and the figures, its backward pass, two thirds of the work,
        is not.
        """
        assert micro.advantages is not None
        if self.backend.always_backward or self.config.loss.entropy_coef:
            return True
        if self.kl_coef and micro.ref_log_probs is not None:
            return True
        return bool((micro.advantages[micro.loss_mask] != 0).any())

    def _micro_batches(self, batch: Batch) -> Iterator[tuple[Tensor, Batch, bool]]:
        return on_device(batch, self.config.update.micro_batch_size, self.backend)

    def _diagnose(self, mini: Batch, log_probs: Tensor) -> RatioDiagnostics:
        assert mini.advantages is not None
        return diagnose_ratios(
            log_probs,
            _old_log_probs(mini, log_probs),
            mini.advantages if mini.correction is None else mini.advantages * mini.correction,
            mini.loss_mask,
            mini.turn_ids,
            mini.token_classes,
            settings=self.loss_settings,
        ).all_reduce()

    def _normalization(self, stats: LossStats) -> Normalization:
        loss = self.config.loss
        norm = loss.clip_bias_norm
        if not self.algorithm.normalize:
            return Normalization(grad_scale=1.0, update_scale=1.0, norm=stats.norm(norm), factor=1.0)
        return normalization(stats, norm=norm, target=loss.clip_bias_target, delta=loss.clip_bias_delta)


class CriticUpdate:
    """Optimizer steps of the critic."""

    def __init__(self, backend: Backend, config: TrainConfig) -> None:
        disable_dropout(backend.model)
        self.backend = backend
        self.config = config
        self.total_steps = config.update.steps * steps_of_batch(config.rollout.batch_size, config.update)

    def steps(self, minis: Iterable[Batch], done: int, means: Means) -> Iterator[Batch]:
        """The steps on a rollout batch; ``done`` steps came before. Yields each mini-batch after its step."""
        optim = self.config.optim
        rates = learning_rates(optim, optim.critic_lr, optim.critic_warmup_ratio, done, self.total_steps)
        for mini, lr in zip(minis, rates, strict=False):
            self.step(mini, lr, means)
            yield mini

    def step(self, mini: Batch, lr: float, means: Means) -> None:
        """One optimizer step towards the returns. Without loss tokens no step is taken: Adam's momentum would still
        move the weights."""
        how = mean_over(mini, self.config.loss.aggregation)
        if not how["denominator"]:  # on any rank
            return
        total, clip = 0.0, self.config.loss.value_clip
        for _, micro, last in on_device(mini, self.config.update.critic_micro_batch_size, self.backend):
            assert micro.returns is not None
            values = self.backend.values(micro, micro.loss_mask)
            loss = value_loss(
                values, micro.returns, micro.loss_mask, old_values=micro.values, clip_eps=clip, **how
            )
            if not torch.isfinite(loss):
                raise NonFiniteError("the value loss", micro.ids)
            self.backend.backward(loss, last)
            total += float(loss.detach())
        (total,) = sum_over_ranks(total)
        grad_norm = self.backend.step(lr, self.config.optim.max_grad_norm)
        means.add(value=total, critic_grad_norm=_finite(grad_norm, "the critic's gradient", mini))


def _finite(grad_norm: float, what: str, mini: Batch) -> float:
    if not math.isfinite(grad_norm):
        raise NonFiniteError(what, mini.ids)
    return grad_norm


def _hook_arguments(batch: Batch, log_probs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What ``Algorithm.weight`` and ``step_scale`` are called with, (B, T) each."""
    assert batch.advantages is not None
    return log_probs, _old_log_probs(batch, log_probs), batch.advantages, batch.loss_mask


def _old_log_probs(batch: Batch, current: Tensor) -> Tensor:
    """The batch's old log-probabilities, or the current ones if it has none: then the current weights sampled it."""
    return current if batch.old_log_probs is None else batch.old_log_probs
