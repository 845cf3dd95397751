"""A loss for torchtitan's RL experiment, called as its ``DAPOLoss`` is (August 2026).

Sequences are packed into one row (T,), and the sampler's log-probabilities are the old ones. Tokens whose
log-probability the sampler did not report are left out of the loss, as there. Trajectories cannot be told apart in a
packed row: turns are runs of ones in the mask, which is enough for token and turn ratios, and the mean is over tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sorl_train.algorithms import ALGORITHMS, Algorithm
from sorl_train.plugins.objective import clip_range, objective_of_process, turn_ids_of


class SorlLoss:
    """The policy loss of an algorithm.

    Args:
        algorithm: a name of ``loss_algorithms`` with a ratio for each token or turn, or an ``Algorithm`` of your own.
        clip_eps, clip_eps_high: the clip range; None is the algorithm's own.
        options: those of ``Objective``: ``ratio``, ``clip_bias_norm``, ``clip_bias_delta``.

    Raises:
        ValueError: an unknown algorithm or option, or one with a ratio for each sequence.
    """

    def __init__(
        self,
        algorithm: str | Algorithm = "so_grpo",
        *,
        clip_eps: float | None = None,
        clip_eps_high: float | None = None,
        **options: Any,
    ) -> None:
        row = ALGORITHMS.get(algorithm) if isinstance(algorithm, str) else algorithm
        clip = None if row is None else clip_range(row, eps=clip_eps, eps_high=clip_eps_high)
        self._options = {"algorithm": algorithm, "clip": clip, **options}
        if objective_of_process(**self._options).algorithm.ratio == "sequence":
            raise ValueError(
                f"algorithm {algorithm!r} has a ratio for each sequence, which a packed row does not show"
            )

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        global_valid_tokens: Tensor | None = None,
        *,
        generator_logprobs: Tensor,
        advantages: Tensor,
        loss_mask: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch, divided by the tokens of the whole batch, and its metrics.

        Args:
            logits: (T, V) of the current policy, not split over ranks.
            labels: (T,) the next tokens; those outside ``loss_mask`` may be negative.
            global_valid_tokens: loss tokens of all micro-batches and ranks; None: the sum over tokens.
            generator_logprobs, advantages, loss_mask: (T,).
        """
        known = loss_mask & torch.isfinite(generator_logprobs)
        chosen = labels.masked_fill(~known, 0)
        log_probs = logits.float().log_softmax(dim=-1).gather(-1, chosen[:, None]).squeeze(-1)
        total = 1.0 if global_valid_tokens is None else max(float(global_valid_tokens), 1.0)
        output = objective_of_process(**self._options).loss(
            log_probs[None],
            generator_logprobs[None],
            advantages[None],
            known[None],
            aggregation="token_mean",
            denominator=total,
            turn_ids=turn_ids_of(loss_mask[None]),  # a token that is left out does not split its turn
        )
        share = output.stats.tokens / total
        stats = output.stats.metrics()
        return output.loss, {
            "loss/mean": output.loss.detach(),
            "loss/ratio_mean": share * stats["ratio_mean"],
            "loss/ratio_clipped_frac": share * stats["clip_frac"],
        }
