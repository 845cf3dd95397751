"""A loss function for NeMo-RL's ``grpo_train``: pass ``SorlLoss(...)`` as ``loss_fn`` in a script of your own.

It follows ``ClippedPGLossFn`` (August 2026): log-probabilities of the next tokens in, everything in ``data`` one
position longer.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sorl_train.algorithms import ALGORITHMS, Algorithm
from sorl_train.plugins.objective import clip_range, objective_of_process


class _LossType(enum.Enum):
    """NeMo-RL's ``LossType``, by value."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class SorlLoss:
    """The policy loss of an algorithm.

    Args:
        algorithm: a name of ``loss_algorithms``, or an ``Algorithm`` of your own.
        token_level_loss: the mean over all tokens of the batch; False: over each sequence, then over sequences.
        clip_eps, clip_eps_high: the clip range; None is the algorithm's own.
        options: those of ``Objective``: ``ratio``, ``clip_bias_norm``, ``clip_bias_delta``.

    Raises:
        ValueError: an unknown algorithm or option.
    """

    def __init__(
        self,
        algorithm: str | Algorithm = "so_grpo",
        *,
        token_level_loss: bool = False,
        clip_eps: float | None = None,
        clip_eps_high: float | None = None,
        **options: Any,
    ) -> None:
        row = ALGORITHMS.get(algorithm) if isinstance(algorithm, str) else algorithm
        clip = None if row is None else clip_range(row, eps=clip_eps, eps_high=clip_eps_high)
        self._options = {"algorithm": algorithm, "clip": clip, **options}
        self._token_level = token_level_loss
        self.loss_type = _loss_type(token_level_loss)
        objective_of_process(**self._options)  # a mistake shows here

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: Mapping[str, Tensor],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss of a micro-batch and its metrics.

        Args:
            next_token_logprobs: (B, T).
            data: ``token_mask``, ``advantages`` and ``prev_logprobs`` (B, T + 1), ``sample_mask`` (B,).
            global_valid_seqs, global_valid_toks: of the whole batch, over all ranks.
        """
        mask = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).bool()
        output = objective_of_process(**self._options).loss(
            next_token_logprobs,
            data["prev_logprobs"][:, 1:],
            data["advantages"][:, 1:],
            mask,
            aggregation="token_mean" if self._token_level else "trajectory_mean",
            denominator=float(global_valid_toks if self._token_level else global_valid_seqs),
        )
        stats = output.stats.metrics()
        return output.loss, {
            "loss": float(output.loss.detach()),
            "num_valid_samples": float(data["sample_mask"].sum()),
            "clip_frac": stats["clip_frac"],
            "approx_kl": stats["approx_kl"],
        }


def _loss_type(token_level: bool) -> Any:
    """NeMo-RL's own enumeration where it is installed: it compares members."""
    try:
        from nemo_rl.algorithms.loss.interfaces import LossType
    except ImportError:
        LossType = _LossType
    return LossType.TOKEN_LEVEL if token_level else LossType.SEQUENCE_LEVEL
