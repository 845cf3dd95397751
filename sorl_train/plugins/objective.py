"""An algorithm of the table as a policy loss for a trainer that is not ours. Imports torch and nothing heavier.

Advantages come from the trainer, so an algorithm is what remains of its row without them: the level of the importance
ratio, the surrogate, and whether steps are normalized. A trainer knows which tokens the policy wrote, but most do not
know turns: here a turn is a run of ones in the mask. Two turns with no token of the environment between them are taken
for one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from sorl_train.algorithms import ALGORITHMS, Aggregation, Algorithm, RatioLevel, check_choice
from sorl_train.losses.policy import SURROGATES, ClipRange, LossOutput, LossSettings, policy_loss
from sorl_train.losses.segments import Segments, importance_ratio
from sorl_train.plugins.step_scale import StepScale

# What these rows change lies in the advantages alone, and how a trainer gets the same from its own.
_ADVANTAGES_ONLY: Mapping[str, str] = {
    "rloo": "take 'grpo', with the trainer's leave-one-out advantages",
    "mt_grpo": "it needs the reward of each turn, which the trainer would have to compare",
    "gigpo": "it needs the states that turns started in, which the trainer would have to compare",
}


def loss_algorithms(*, critic: bool = True) -> list[str]:
    """Names of the table's algorithms that a policy loss alone makes; without ``critic`` those that train none."""
    names = [name for name in ALGORITHMS if name not in _ADVANTAGES_ONLY]
    return [name for name in names if critic or not ALGORITHMS[name].needs_critic]


def turn_ids_of(mask: Tensor) -> Tensor:
    """Turn ids from the runs of ones in a mask (B, T) of the policy's tokens; -1 off the mask::

    mask     = [0  1  1  0  0  1  1]
    turn_ids = [-1 0  0 -1 -1  1  1]
    """
    mask = mask.bool()
    starts = mask.clone()
    starts[:, 1:] &= ~mask[:, :-1]
    return torch.where(mask, starts.cumsum(dim=1) - 1, -1)


def clip_range(algorithm: Algorithm, **given: float | None) -> ClipRange:
    """The clip range of an algorithm: ``given`` fields of ``ClipRange`` first, then what its row publishes."""
    published = {
        "eps": "loss.clip_eps",
        "eps_high": "loss.clip_eps_high",
        "tau_pos": "loss.sapo_tau_pos",
        "tau_neg": "loss.sapo_tau_neg",
    }
    fields: dict[str, Any] = {
        field: algorithm.defaults[name] for field, name in published.items() if name in algorithm.defaults
    }
    return ClipRange(**(fields | {name: value for name, value in given.items() if value is not None}))


class Objective:
    """The policy loss of one algorithm, and the scale of the optimizer's steps that goes with it.

    Args:
        algorithm: a name of ``loss_algorithms``, or an ``Algorithm`` of your own.
        ratio: another level of the importance ratio; ``auto`` keeps the algorithm's own.
        clip: the clip range; None is ``clip_range(algorithm)``.
        clip_bias_norm, clip_bias_delta, skip_without_signal, relative: see ``StepScale``.

    Attributes:
        algorithm: the row, with the level of the ratio that is used.
        steps: what scales the optimizer's steps.

    Raises:
        ValueError: an unknown name or choice, or an algorithm that the loss alone does not make.
    """

    def __init__(
        self,
        algorithm: str | Algorithm,
        *,
        ratio: RatioLevel | Literal["auto"] = "auto",
        clip: ClipRange | None = None,
        clip_bias_norm: str = "rms",
        clip_bias_delta: float = 0.003,
        skip_without_signal: bool = False,
        relative: bool = False,
    ) -> None:
        row = _row(algorithm)
        check_choice("ratio level", ratio, ("auto", *get_args(RatioLevel)))
        self.algorithm = row if ratio == "auto" else dataclasses.replace(row, ratio=ratio)
        self.clip = clip or clip_range(row)
        self.steps = StepScale(
            row.normalize,
            clip_bias_norm,
            clip_bias_delta,
            skip_without_signal=skip_without_signal,
            relative=relative,
        )

    def loss(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        aggregation: Aggregation,
        denominator: float,
        correction: Tensor | None = None,
        turn_ids: Tensor | None = None,
    ) -> LossOutput:
        """The loss of one micro-batch, whose clipping bias counts towards the next optimizer step, unless no gradient
        is computed, as in an evaluation.

        Arguments, (B, T) each, and errors are those of ``policy_loss``. ``mask``, bool or 0 and 1, has the tokens that
        enter the loss; None as ``turn_ids`` takes its runs of ones; ``aggregation`` and ``denominator`` are the
        trainer's mean.
        """
        surrogate = self.algorithm.surrogate
        function = surrogate if callable(surrogate) else SURROGATES[surrogate]
        settings = LossSettings(self.algorithm.ratio, function, self.clip, aggregation)
        output = policy_loss(
            log_probs,
            old_log_probs,
            advantages,
            mask.bool(),
            turn_ids_of(mask) if turn_ids is None else turn_ids,
            settings,
            denominator=denominator,
            correction=correction,
        )
        if log_probs.requires_grad:
            square = advantages[mask.bool()].square().sum() if self.steps.relative else 0.0
            self.steps.add(output, float(square))
        return output

    def ratios(self, log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
        """(B, T): the importance ratio of each token's segment, with its gradient; 1 off the mask."""
        mask = mask.bool()
        segments = Segments.of(self.algorithm.ratio, mask, turn_ids_of(mask))
        log_ratio = segments.pick(log_probs) - segments.pick(old_log_probs.detach())
        ratio = importance_ratio(segments.spread_mean(log_ratio))
        ones = torch.ones_like(log_probs)
        return ones.flatten().index_copy(0, segments.positions, ratio).view_as(log_probs)


def objective_of_process(**options: Any) -> Objective:
    """The objective with these options of ``Objective``, one for each process, whose steps are scaled everywhere.

    For trainers that know a loss by name or by function: their worker processes make it at the first call.
    """
    key = repr(sorted(options.items()))
    if key not in _OBJECTIVES:
        _OBJECTIVES[key] = Objective(**options)
        if _OBJECTIVES[key].algorithm.normalize:
            _OBJECTIVES[key].steps.attach_everywhere()
    return _OBJECTIVES[key]


_OBJECTIVES: dict[str, Objective] = {}


def _row(algorithm: str | Algorithm) -> Algorithm:
    if isinstance(algorithm, Algorithm):
        if algorithm.hooks:
            raise ValueError(
                f"the algorithm's {' and '.join(algorithm.hooks)} belong to the update, which the trainer has its own "
                "of: train with sorl-train, or leave them out"
            )
        return algorithm
    if algorithm in _ADVANTAGES_ONLY:
        raise ValueError(
            f"algorithm {algorithm!r} differs from 'grpo' in its advantages only, which a policy loss does not "
            f"compute: {_ADVANTAGES_ONLY[algorithm]}"
        )
    check_choice("algorithm", algorithm, tuple(loss_algorithms()))
    return ALGORITHMS[algorithm]
