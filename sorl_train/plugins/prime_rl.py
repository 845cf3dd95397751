"""prime-rl's custom loss: one sequence at a time, ``[trainer.loss] type = "custom"``.

It follows prime-rl's documented ``LossInputs`` (August 2026). prime-rl divides the sum of all losses by the tokens of
the batch, so a loss here is a sum over tokens. It hands over the sampler's log-probabilities and no others: the ratio
is that of the current policy to the sampler.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sorl_train.algorithms import ALGORITHMS
from sorl_train.plugins.objective import clip_range, objective_of_process


def loss(
    inputs: Any,
    algorithm: str = "so_grpo",
    clip_eps: float | None = None,
    clip_eps_high: float | None = None,
    **options: Any,
) -> Any:
    """The loss of one sequence: ``LossInputs`` to ``LossOutputs``.

    Args:
        inputs: ``trainer_logprobs``, ``inference_logprobs``, ``advantages``, ``loss_mask``: (T,) each;
            ``loss_weights`` (T,) or None.
        algorithm: a name of ``loss_algorithms``.
        clip_eps, clip_eps_high: the clip range; None is the algorithm's own.
        options: those of ``Objective``: ``ratio``, ``clip_bias_norm``, ``clip_bias_delta``.
    """
    from prime_rl.trainer.rl.loss import LossOutputs

    total, metrics = sequence_loss(inputs, algorithm, clip_eps, clip_eps_high, **options)
    return LossOutputs(loss=total, metrics=metrics)


def sequence_loss(
    inputs: Any,
    algorithm: str = "so_grpo",
    clip_eps: float | None = None,
    clip_eps_high: float | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``loss`` without prime-rl's type: the sum over the sequence's tokens, and the metrics."""
    row = ALGORITHMS.get(algorithm)
    clip = None if row is None else clip_range(row, eps=clip_eps, eps_high=clip_eps_high)
    objective = objective_of_process(algorithm=algorithm, clip=clip, **options)
    weights = getattr(inputs, "loss_weights", None)
    output = objective.loss(
        inputs.trainer_logprobs[None],
        inputs.inference_logprobs[None],
        inputs.advantages[None],
        inputs.loss_mask[None],
        aggregation="token_mean",
        denominator=1.0,
        correction=None if weights is None else weights[None],
    )
    stats = output.stats.metrics()
    names = ("clip_frac", "approx_kl", "ratio_mean")
    return output.loss, {name: output.loss.new_tensor(stats[name]) for name in names}
