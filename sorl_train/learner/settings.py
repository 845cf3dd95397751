"""What the optimizer steps take from a run's settings. Only ``update_settings`` here knows where it stands there."""

from __future__ import annotations

from dataclasses import dataclass

from sorl_train.algorithms import ClipBiasNorm, KLKind, Scope, Target
from sorl_train.config.settings import TrainConfig
from sorl_train.losses.policy import LossSettings
from sorl_train.losses.surrogates import ClipRange, clipped


@dataclass(frozen=True)
class UpdateSettings:
    """Settings of ``PolicyUpdate`` and ``CriticUpdate``.

    Attributes:
        loss: which policy loss; its ``delta`` is also the threshold of the mini-batch scope.
        normalize: whether the algorithm scales its steps by the clipping bias.
        clip_bias_norm, clip_bias_scope, clip_bias_target: how it does that (``losses.clip_bias.normalization``).
        kl_type, kl_coef: estimator and weight of the KL term in the loss; the weight is 0 when the KL is in the reward.
        entropy_coef: weight of the entropy bonus.
        value_clip: clip range of the value loss, or None.
        micro_batch_size, critic_micro_batch_size: trajectories of one forward and backward pass.
        max_grad_norm: limit of gradient clipping, or None.
        clip_before_normalization: clip the gradient before it is scaled by the clipping bias.
        skip_without_signal: no step for a mini-batch whose advantages are all 0.
        target_kl: see ``past_target_kl``.
        temperature: the sampler's, which the log-probabilities are computed at.
        dtype: precision of the forward passes, as ``hardware.dtype`` names it.
        keep_dropout: only supervised fine-tuning trains with dropout.
    """

    loss: LossSettings
    normalize: bool
    clip_bias_norm: ClipBiasNorm
    clip_bias_scope: Scope
    clip_bias_target: Target
    kl_type: KLKind
    kl_coef: float
    entropy_coef: float
    value_clip: float | None
    micro_batch_size: int
    critic_micro_batch_size: int
    max_grad_norm: float | None
    clip_before_normalization: bool
    skip_without_signal: bool
    target_kl: float | None
    temperature: float
    dtype: str
    keep_dropout: bool

    def clip_limit(self, grad_scale: float) -> float | None:
        """``max_grad_norm`` to apply to a gradient that is already multiplied by ``grad_scale``.

        With ``clip_before_normalization`` the limit is scaled as well, which equals clipping first.
        """
        if self.max_grad_norm is None or not self.clip_before_normalization:
            return self.max_grad_norm
        return self.max_grad_norm * grad_scale


def update_settings(config: TrainConfig) -> UpdateSettings:
    """The part of a run's settings that its optimizer steps need, for both engines."""
    algorithm, loss, update, optim = config.algorithm, config.loss, config.update, config.optim
    per_trajectory = algorithm.normalize and loss.clip_bias_scope == "trajectory"
    return UpdateSettings(
        loss=LossSettings(
            ratio_level=algorithm.ratio,
            surrogate=algorithm.surrogate or clipped,
            clip=ClipRange(loss.clip_eps, loss.clip_eps_high, loss.dual_clip),
            aggregation=loss.aggregation,
            trajectory_norm=loss.clip_bias_norm if per_trajectory else None,
            delta=loss.clip_bias_delta,
            clip_bias_objective=algorithm.normalize and loss.clip_bias_norm == "gradient",
        ),
        normalize=algorithm.normalize,
        clip_bias_norm=loss.clip_bias_norm,
        clip_bias_scope=loss.clip_bias_scope,
        clip_bias_target=loss.clip_bias_target,
        kl_type=loss.kl_type,
        kl_coef=loss.kl_coef if loss.kl_in == "loss" else 0.0,
        entropy_coef=loss.entropy_coef,
        value_clip=loss.value_clip,
        micro_batch_size=update.micro_batch_size,
        critic_micro_batch_size=update.critic_micro_batch_size,
        max_grad_norm=optim.max_grad_norm,
        clip_before_normalization=optim.clip_before_normalization,
        skip_without_signal=update.skip_without_signal,
        target_kl=update.target_kl,
        temperature=config.sampler.temperature,
        dtype=config.hardware.dtype,
        keep_dropout=config.stage == "sft",
    )
