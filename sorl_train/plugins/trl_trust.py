"""The trust region of ``learner.trust_region`` inside the loop of TRL's trainer."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor

from sorl_train.learner.trust_region import TrustRegion, final_kl_sample
from sorl_train.losses.terms import sum_over_ranks
from sorl_train.models.forward import disable_dropout


class TrustedSteps:
    """Asks the trust region before each optimizer step and after the last one on a rollout batch.

    A rollout batch is what TRL generates at once. The KL is that to the policy which generated it. ``trainer`` is one
    with ``SorlMixin``; weights that are split over ranks are refused.
    """

    def __init__(self, trainer: Any, limit: float, max_scale: float) -> None:
        kind = trainer.accelerator.distributed_type
        if kind not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
            raise ValueError(
                f"the trust region needs whole weights on every rank, and {kind.value} splits them: leave trust_kl out"
            )
        self._trainer = trainer
        generated, step = self._length, trainer.args.gradient_accumulation_steps
        if generated % step and step % generated:
            raise ValueError(
                f"the trust region needs optimizer steps that end where a generation does: {generated} micro-batches "
                f"(steps_per_generation times num_iterations) do not go with gradient_accumulation_steps={step}"
            )
        disable_dropout(trainer.model)  # its noise would count as a KL
        self.region = TrustRegion(self._weights, limit, max_scale)
        self._mini_batch: list[dict[str, Any]] = []  # its micro-batches so far
        # those of the rollout batch, with old log-probabilities
        self._batch: list[tuple[dict[str, Any], Tensor]] = []
        self._began = False
        self._signal = False
        self._again = False  # a mini-batch is computed once more

    def before_micro_batch(self) -> None:
        """Begin a rollout batch where this is its first micro-batch, or the first one after a resume."""
        if self._trainer._step % self._length == 0 or not self._began:
            self.region.begin()
            self._batch, self._signal, self._began = [], False, True

    def begin_mini_batch(self) -> None:
        """Forget the micro-batches of the mini-batch before."""
        self._mini_batch = []

    def saw(self, inputs: dict[str, Any], old_log_probs: Tensor) -> None:
        """A micro-batch went through the model; its old log-probabilities are (B, T)."""
        if self._again:
            return
        self._mini_batch.append(inputs)
        if len(self._batch) < self._trainer.args.steps_per_generation:
            self._batch.append((inputs, old_log_probs))

    def keep_inside(self, model: Any) -> None:
        """While the weights are outside the region, move them back and compute the mini-batch anew."""
        steps = self._trainer.objective.steps

        while self.region.step(steps.totals().metrics()["approx_kl"]):
            self._trainer.model.zero_grad()
            steps.clear()
            self._compute_again(model)
        self._signal |= bool(steps.totals().signal)
        steps.rate = self.region.scale

    def after_step(self) -> None:
        """After the last step on a rollout batch: look at a part of it, and let the scale grow."""
        trainer = self._trainer
        if trainer._step % self._length:
            return
        region = self.region
        while region.end(kl := self._kl(), learned=self._signal):
            pass
        found = {"kl": kl, "kl_max": region.largest, "moves_back": region.moves, "scale": region.scale}
        for name, value in found.items():
            trainer._metrics["train"][f"sorl/trust_{name}"].append(value)

    @property
    def _length(self) -> int:
        """Micro-batches between two generations."""
        return int(self._trainer.args.steps_per_generation * self._trainer.num_iterations)

    def _weights(self) -> list[Tensor]:
        return [p for p in self._trainer.model.parameters() if p.requires_grad]

    def _compute_again(self, model: Any) -> None:
        trainer = self._trainer
        self._again = True
        try:
            for number, inputs in enumerate(self._mini_batch, start=1):
                is_last = number == len(self._mini_batch)
                with nullcontext() if is_last else trainer.accelerator.no_sync(model=model):
                    with trainer.compute_loss_context_manager():
                        loss = trainer.compute_loss(model, inputs)
                    trainer.accelerator.backward(loss)
        finally:
            self._again = False

    @torch.no_grad()
    def _kl(self) -> float:
        """Mean token KL, over all ranks, of some micro-batches to the policy that generated them."""
        trainer = self._trainer
        squares, tokens = 0.0, 0.0
        trainer.model.eval()
        for part in final_kl_sample(trainer.loss_mask(inputs) for inputs, _ in self._batch):
            inputs, old = self._batch[part]
            mask, log_probs, _, _ = trainer.score(trainer.model, inputs)
            log_ratio = (log_probs - old)[mask].double()
            squares += float(log_ratio.square().sum())
            tokens += len(log_ratio)
        trainer.model.train()
        squares, tokens = sum_over_ranks(squares, tokens)
        return 0.5 * squares / max(tokens, 1.0) if math.isfinite(squares) else math.inf
