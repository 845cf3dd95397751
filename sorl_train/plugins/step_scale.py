"""The clipping bias of a mini-batch in a trainer that is not ours, and the scale of the step that follows. Pure torch.

The trainer cuts a mini-batch into micro-batches and ranks as it likes: each call of the loss adds its sums, and the
optimizer's step takes them all. The scale goes on the learning rate for that one step, through the hooks that every
torch optimizer has. That is where ``learner.optimizer_step`` puts it too: after Adam, which would undo a constant scale
of the gradient, and after the trainer's clipping of the gradient.
"""

from __future__ import annotations

import logging
import math
from typing import Any, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from sorl_train.algorithms import ClipBiasNorm, check_choice
from sorl_train.losses.clip_bias import LossStats
from sorl_train.losses.policy import LossOutput
from sorl_train.losses.terms import sum_over_ranks

logger = logging.getLogger(__name__)


class StepScale:
    """Adds up the statistics of a mini-batch's losses, and scales the optimizer's step by them.

    The scale is delta / max(||C||, delta) of an algorithm that is normalized, times ``rate``. It is 0, which is no
    step, for a mini-batch without loss tokens, and for one whose ratios are not finite, which is logged.

    Args:
        normalize: whether the algorithm is normalized.
        norm: a norm of ``losses.clip_bias`` that needs log-probabilities only.
        delta: threshold of that norm.
        skip_without_signal: the scale is also 0 when all advantages are 0.
        relative: divide the norm by the root mean square of the mini-batch's advantages, for trainers that hand over
            advantages in a unit of their own. Of the norms only ``rms`` can be divided so.

    Attributes:
        rate: another factor of the step, such as that of a trust region.
        metrics: of the last mini-batch whose scale was asked for, by name.

    Raises:
        ValueError: for a norm that is not available here, or a delta that is not positive.
    """

    def __init__(
        self,
        normalize: bool,
        norm: str,
        delta: float,
        *,
        skip_without_signal: bool = False,
        relative: bool = False,
    ) -> None:
        # ``logit`` needs the distribution at each token, which a policy loss is not given
        check_choice(
            "clip_bias_norm", norm, tuple(name for name in get_args(ClipBiasNorm) if name != "logit")
        )
        if relative and norm != "rms":
            raise ValueError(f"clip_bias_norm {norm!r} cannot be relative to the advantages: take 'rms'")
        if not delta > 0.0:
            raise ValueError(f"clip_bias_delta, the threshold of that norm, must be positive, not {delta}")
        self.relative = relative
        self.normalize = normalize
        self.norm: Any = norm
        self.delta = delta
        self.skip_without_signal = skip_without_signal
        self.rate = 1.0
        self.metrics: dict[str, float] = {}
        self._stats: LossStats | None = None
        self._square = 0.0  # sum over tokens of the squared advantages
        self._scale: float | None = None
        self._taken = False  # a step was taken on what was added
        self._kept: list[tuple[dict[str, Any], Any]] = []

    @property
    def pending(self) -> bool:
        """Whether losses were added that no optimizer step has taken yet."""
        return self._stats is not None and not self._taken

    def add(self, output: LossOutput, advantage_square: float = 0.0) -> None:
        """Add a micro-batch; the first one after a step begins a new mini-batch.

        ``advantage_square`` is the sum over its loss tokens of the squared advantages, which ``relative`` needs.
        """
        if self._taken:
            self.clear()
        self._stats = output.stats if self._stats is None else self._stats + output.stats
        self._square += advantage_square
        self._scale = None

    def clear(self) -> None:
        """Forget what was added, such as a mini-batch that the trainer took no step on."""
        self._stats = self._scale = None
        self._square = 0.0
        self._taken = False

    def totals(self) -> LossStats:
        """The sums of what was added, over all ranks: every rank has to ask at the same time.

        Raises RuntimeError if nothing was added.
        """
        if self._stats is None:
            raise RuntimeError("no loss was added since the last optimizer step")
        return self._stats.all_reduce()

    def scale(self) -> float:
        """What the next step is multiplied by, over all ranks; 1 when no loss was added."""
        if self._stats is None:
            return 1.0
        if self._scale is None:
            self._scale = self._find_scale()
        return self._scale * self.rate

    def _find_scale(self) -> float:
        stats = self.totals()
        norm = stats.norm(self.norm)
        if self.relative:
            (square,) = sum_over_ranks(self._square)
            norm = norm / math.sqrt(square / max(float(stats.tokens), 1.0)) if square else 0.0
        factor = self.delta / max(norm, self.delta) if self.normalize else 1.0
        if not math.isfinite(norm + float(stats.log_ratio_square_sum)):
            logger.warning("the ratios of a mini-batch are not finite: no step is taken on it")
            factor = 0.0
        elif not float(stats.tokens) or (self.skip_without_signal and not float(stats.signal)):
            factor = 0.0
        self.metrics = {"normalizer": factor, "clip_bias_norm": norm, **stats.metrics()}
        return factor

    def attach(self, *optimizers: torch.optim.Optimizer) -> list[RemovableHandle]:
        """Scale every step of these optimizers, until the handles are removed.

        Optimizers that share a mini-batch all take its scale. A trainer that may leave a step out has to call ``clear``
        where a mini-batch begins.
        """
        return [
            handle
            for optimizer in optimizers
            for handle in (
                optimizer.register_step_pre_hook(self._before),
                optimizer.register_step_post_hook(self._after),
            )
        ]

    def attach_everywhere(self) -> list[RemovableHandle]:
        """Scale the first step that any torch optimizer of this process takes after a loss was added.

        For trainers that hide their optimizer from a loss. A critic's optimizer is left alone as long as its steps do
        not come between a policy loss and the policy's step.
        """

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if self.pending:
                self._before(optimizer, args, kwargs)

        def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if self._stats is not None:
                self._after(optimizer, args, kwargs)

        return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()  # of a step that failed
        scale = self.scale()
        if scale == 1.0:
            return
        for group in optimizer.param_groups:
            # no step: at a rate of 0 a gradient that is not finite would still reach the weights, and Adam's state
            for parameter in group["params"] if scale == 0.0 else ():
                parameter.grad = None
            rate = group["lr"]
            # a rate in a tensor is read by compiled steps, so it has to stay the same tensor
            self._kept.append((group, rate.clone() if isinstance(rate, Tensor) else rate))
            group["lr"] = rate.mul_(scale) if isinstance(rate, Tensor) else rate * scale

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._restore()
        self._taken = self._stats is not None

    def _restore(self) -> None:
        for group, rate in self._kept:
            group["lr"] = group["lr"].copy_(rate) if isinstance(rate, Tensor) else rate
        self._kept = []
