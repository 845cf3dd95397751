"""TRL's ``GRPOTrainer`` with the algorithms of the table, normalized steps and the trust region.

Written for and tested with TRL 1.16. What TRL's own ``GRPOConfig`` has a word for stays there: the clip range
(``epsilon``, ``epsilon_high``, ``delta``), the mean over tokens (``loss_type``), the KL term (``beta``), advantages.
Turns of TRL's tools and environments are told apart by ``tool_mask``.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl.trainer.grpo_trainer import GRPOTrainer

from sorl_train.algorithms import ALGORITHMS, Aggregation, Algorithm, RatioLevel
from sorl_train.losses.policy import ClipRange
from sorl_train.losses.terms import aggregate, kl_penalty
from sorl_train.plugins.objective import Objective, clip_range, loss_algorithms
from sorl_train.plugins.trl_trust import TrustedSteps

TRUST_FILE = "sorl_trust_region.json"  # in each checkpoint


@dataclass(frozen=True)
class SorlOptions:
    """What this project adds to TRL's ``GRPOConfig``."""

    # a name of the table without a critic (so_grpo, grpo, gspo, cispo, sapo, topr), or an ``Algorithm`` of your own
    algorithm: str | Algorithm = "so_grpo"
    # another level of the ratio: ``turn`` with ``so_grpo`` is the objective of SO-PPO with GRPO's advantages
    ratio: RatioLevel | Literal["auto"] = "auto"
    clip_bias_norm: str = "rms"  # the norm of the clipping bias
    clip_bias_delta: float = 0.003  # above this value of it steps get smaller
    trust_kl: float | None = (
        None  # limit of the trust region in mean token KL, such as 0.01; None: there is none
    )
    trust_max_scale: float = 1.0  # the trust region scales the learning rate by at most this

    def __post_init__(self) -> None:
        if isinstance(self.algorithm, str) and self.algorithm not in loss_algorithms(critic=False):
            names = ", ".join(loss_algorithms(critic=False))
            raise ValueError(
                f"algorithm {self.algorithm!r} is not one that TRL's GRPOTrainer can run, which has no critic; choose "
                f"from {names}. SorlOptions('so_grpo', ratio='turn') has the turn ratio of SO-PPO."
            )
        row = ALGORITHMS[self.algorithm] if isinstance(self.algorithm, str) else self.algorithm
        defaults = (SorlOptions.clip_bias_norm, SorlOptions.clip_bias_delta)
        if not row.normalize and (self.clip_bias_norm, self.clip_bias_delta) != defaults:
            raise ValueError(
                f"clip_bias_norm and clip_bias_delta have no effect on {self.algorithm!r}: leave them out"
            )
        if self.trust_kl is None and self.trust_max_scale != 1.0:
            raise ValueError("trust_max_scale has no effect without trust_kl: give both or none")
        if self.trust_kl is not None and not self.trust_kl > 0.0:
            raise ValueError(f"trust_kl must be above 0 or None, which turns it off, not {self.trust_kl}")
        if not self.trust_max_scale >= 1.0:
            raise ValueError(f"trust_max_scale must be at least 1, not {self.trust_max_scale}")


class SorlMixin:
    """The policy loss, the scale of the step and the trust region; put it before ``GRPOTrainer`` or a subclass of it.

    Raises:
        ValueError: an option of TRL that this loss does not know, or a way of running that the trust region does not.
    """

    def __init__(self, *args: Any, sorl: SorlOptions | None = None, **kwargs: Any) -> None:
        self.sorl = sorl or SorlOptions()
        super().__init__(*args, **kwargs)
        trainer: Any = self
        _refuse_unknown_options(trainer)
        self.objective = Objective(
            self.sorl.algorithm,
            ratio=self.sorl.ratio,
            clip=_clip_range(trainer, self.sorl.algorithm),
            clip_bias_norm=self.sorl.clip_bias_norm,
            clip_bias_delta=self.sorl.clip_bias_delta,
            skip_without_signal=self.sorl.trust_kl is not None,
        )
        self._trust = None
        if self.sorl.trust_kl is not None:
            self._trust = TrustedSteps(trainer, self.sorl.trust_kl, self.sorl.trust_max_scale)
        self._hooked: Any = None
        trainer.add_callback(_MiniBatch(trainer))

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's optimizer, whose steps are scaled."""
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if optimizer is not self._hooked:
            self.objective.steps.attach(optimizer)
            self._hooked = optimizer
        return optimizer

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """A micro-batch's loss, a scalar, and its gradient; the last one of a mini-batch also asks the trust region."""
        if self._trust is None:
            return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        self._trust.before_micro_batch()
        loss: Tensor = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if self.accelerator.sync_gradients:  # type: ignore[attr-defined]
            self._trust.keep_inside(model)
        return loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        trainer: Any = self
        mode = "train" if trainer.model.training else "eval"
        mask, log_probs, entropy, aux_loss = self.score(model, inputs)
        old = inputs.get("old_per_token_logps")
        old = log_probs.detach() if old is None else old
        advantages = inputs["advantages"]
        if advantages.ndim == 1:
            advantages = advantages[:, None]
        correction = inputs.get("importance_sampling_ratio")
        mean, denominator = _mean(trainer, mask, inputs, mode)
        output = self.objective.loss(
            log_probs,
            old,
            advantages.expand_as(log_probs),
            mask,
            aggregation=mean,
            denominator=denominator,
            correction=None if correction is None else correction.expand_as(log_probs),
        )
        if self._trust is not None and mode == "train":
            self._trust.saw(inputs, old)
        loss, metrics = output.loss, trainer._metrics[mode]
        if trainer.beta != 0.0:
            penalty = kl_penalty(log_probs, inputs["ref_per_token_logps"], "k3")
            if trainer.args.use_bias_correction_kl:
                penalty = penalty * self.objective.ratios(log_probs, old, mask)
            kl = aggregate(penalty, mask, aggregation=mean, denominator=denominator)
            loss = loss + trainer.beta * kl
            metrics["kl"].append(_gathered_mean(trainer, penalty, mask))
        micro_batches = trainer.current_gradient_accumulation_steps if mode == "train" else 1
        if trainer.entropy_coef != 0.0:
            entropy_mean = aggregate(entropy, mask, aggregation="token_mean")
            loss = loss - trainer.entropy_coef * entropy_mean / micro_batches
        if trainer.aux_loss_enabled:
            loss = loss + trainer.router_aux_loss_coef * aux_loss / micro_batches
            metrics["aux_loss"].append(trainer.accelerator.gather_for_metrics(aux_loss).mean().item())
        metrics["entropy"].append(_gathered_mean(trainer, entropy, mask))
        return loss

    def score(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Mask of the policy's tokens, their log-probabilities and entropies, (B, T) each, and the router's loss."""
        trainer: Any = self
        completion = inputs["completion_ids"]
        forward = inspect.signature(trainer._get_per_token_logps_and_entropies).parameters
        log_probs, entropy, aux_loss = trainer._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], completion], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            completion.size(1),
            compute_entropy=True,
            compute_aux_loss=trainer.aux_loss_enabled,
            **{name: inputs[name] for name in forward if name in inputs},  # such as images
        )
        return self.loss_mask(inputs), log_probs, entropy, aux_loss

    def loss_mask(self, inputs: dict[str, Any]) -> Tensor:
        """Mask (B, T) of the policy's tokens, without those of completions that TRL leaves out of the loss."""
        mask: Tensor = inputs["completion_mask"]
        return (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).bool()

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
        trainer: Any = self
        if self._trust is not None and trainer.args.should_save:
            folder = Path(trainer._get_output_dir(trial=None)) / f"checkpoint-{trainer.state.global_step}"
            (folder / TRUST_FILE).write_text(json.dumps(self._trust.region.state_dict()), encoding="utf-8")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if self._trust is not None and checkpoint is not None:
            path = Path(checkpoint) / TRUST_FILE
            if path.is_file():  # the run may have been started without a trust region
                self._trust.region.load_state_dict(json.loads(path.read_text(encoding="utf-8")))


class SorlGRPOTrainer(SorlMixin, GRPOTrainer):
    """``GRPOTrainer`` with one more argument, ``sorl=SorlOptions(...)``."""


class _MiniBatch(TrainerCallback):
    """Where mini-batches begin and end in the trainer's loop."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The mini-batch before may have been left out, as float16 does with gradients that overflow."""
        self._trainer.objective.steps.clear()
        if self._trainer._trust is not None:
            self._trainer._trust.begin_mini_batch()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Record what the step was; ask the trust region after the last one of a rollout batch."""
        trainer, steps = self._trainer, self._trainer.objective.steps
        if steps.pending:
            if trainer.accelerator.optimizer_step_was_skipped:
                return
            raise RuntimeError(
                "the optimizer took a step that was not scaled by the clipping bias: it was not made by the trainer. "
                "With DeepSpeed, remove the section 'optimizer' from its config."
            )
        for name, value in steps.metrics.items():
            trainer._metrics["train"][f"sorl/{name}"].append(value)
        if trainer._trust is not None:
            trainer._trust.after_step()


def _refuse_unknown_options(trainer: Any) -> None:
    """Options of TRL that change its own loss, which is not the one that runs."""
    args = trainer.args
    unknown = {
        "use_liger_kernel": args.use_liger_kernel,
        "top_entropy_quantile": trainer.top_entropy_quantile < 1.0,
        "off_policy_mask_threshold": trainer.off_policy_mask_threshold is not None,
        "use_adaptive_entropy": trainer.use_adaptive_entropy,
    }
    for name in (name for name, is_set in unknown.items() if is_set):
        value = getattr(args, name)
        raise ValueError(f"{name}={value} changes TRL's own loss, which this trainer replaces: leave it out")
    if trainer.importance_sampling_level != "token":
        raise ValueError(
            f"importance_sampling_level={trainer.importance_sampling_level!r} has no effect here: the algorithm has "
            "its level, gspo the sequence's, and SorlOptions(ratio=...) changes it"
        )
    if trainer.loss_type not in _MEANS:
        raise ValueError(
            f"loss_type={trainer.loss_type!r}: here it only chooses the mean over tokens, one of "
            f"{', '.join(_MEANS)}; the objective is SorlOptions(algorithm=...)"
        )


# The mean that each loss_type of TRL takes.
_MEANS: dict[str, Aggregation] = {
    "grpo": "trajectory_mean",
    "bnpo": "token_mean",
    "dr_grpo": "token_mean",
    "dapo": "token_mean",
}


def _mean(trainer: Any, mask: Tensor, inputs: dict[str, Any], mode: str) -> tuple[Aggregation, float]:
    """TRL's mean and its denominator for one micro-batch, whose gradients TRL adds up, and averages over ranks."""
    micro_batches = trainer.current_gradient_accumulation_steps if mode == "train" else 1
    if trainer.loss_type == "grpo":
        total = float(len(mask) * micro_batches)
    elif trainer.loss_type == "bnpo":
        total = max(float(mask.sum()), 1.0) * micro_batches
    elif trainer.loss_type == "dr_grpo":
        total = float(len(mask) * trainer.max_completion_length * micro_batches)
    else:  # dapo: the tokens of what was generated at once, of which a mini-batch is a part
        total = max(float(inputs["num_items_in_batch"]), 1.0) / trainer.accelerator.num_processes
        if mode == "train":
            total = total * micro_batches / trainer.args.steps_per_generation
    return _MEANS[trainer.loss_type], total


def _clip_range(trainer: Any, algorithm: str | Algorithm) -> ClipRange:
    """TRL's clip range. As in TRL, ``epsilon_high`` is for CISPO the largest weight itself, not its distance from 1."""
    args = trainer.args
    row = ALGORITHMS[algorithm] if isinstance(algorithm, str) else algorithm
    high = args.epsilon_high
    if high is not None and row.surrogate_name == "cispo":
        high = high - 1.0
    return clip_range(
        row,
        eps=args.epsilon,
        eps_high=high,
        dual=args.delta,
        tau_pos=args.sapo_temperature_pos,
        tau_neg=args.sapo_temperature_neg,
    )


def _gathered_mean(trainer: Any, values: Tensor, mask: Tensor) -> float:
    """Mean of ``values`` (B, T) over the tokens of all ranks."""
    sums = torch.stack([values.detach().masked_fill(~mask, 0.0).sum(), mask.sum().to(values.dtype)])
    total, count = trainer.accelerator.reduce(sums, reduction="sum").tolist()
    return float(total / max(count, 1.0))
