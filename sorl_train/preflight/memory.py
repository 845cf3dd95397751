"""An upper bound of the memory that a training run needs, from sizes alone: no weight is allocated.

Sizes: P parameters of the policy, T of them trained, C of the critic; b bytes for an element in the compute dtype (4 or
2); L tokens of a trajectory, A of them the policy's; m rows in a micro-batch; n layers of width h and MLP width i; a
vocabulary of V. Each part of the estimate, in bytes:

- weights 4 (P + C), gradients 4 (T + C), Adam 8 (T + C), reference 4 P: master weights are always float32;
- the trust region's copy of the policy, 4 T, in host memory;
- key-value cache 2 n b L (kv_heads x head_dim) for each row in flight, while sampling. It doubles as it grows, and the
  old half stays until it is copied, so it takes up to 3 times what L tokens need. In bfloat16, a copy of the weights
  beside it, 2 P. vLLM takes its own share of the GPU (sampler.gpu_memory), in addition to this estimate;
- activations b m L n (12 h + 4 i): a block of a gated-MLP transformer keeps three tensors for each of its two norms,
  five in attention (flash kernels keep no L x L matrix), the residual, and four in its MLP. With gradient
  checkpointing b m L (n h + 12 h + 4 i): the input of each block, and one block that is computed again;
- logits 2 b m A V: those of action tokens, and their gradient;
- scoring without gradients b m' (L (4 h + 3 i) + A V), where m' is update.log_prob_micro_batch_size.

Sampling, scoring and updating take turns, so the peak is what lasts plus the largest of the three. A small cache is
kept during scoring and updating. Every trajectory counts with its full length: real runs stay below the estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from sorl_env.task import Limits
from sorl_train.config.settings import TrainConfig
from sorl_train.models.shape import ModelShape
from sorl_train.rollout.sampler import KEPT_CACHE

FLOAT32 = 4


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by purpose. Only one of ``sampling``, ``scoring`` and ``updating`` is needed at a time; ``trust_region`` is
    in host memory."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    sampling: int
    scoring: int
    updating: int
    trust_region: int

    @property
    def lasting(self) -> int:
        """What is needed all the time."""
        return self.weights + self.gradients + self.optimizer + self.reference

    @property
    def peak(self) -> int:
        """The most that the device needs at once, without the interpreter and its libraries, or ``trust_region``."""
        kept_cache = min(self.sampling, KEPT_CACHE)
        return self.lasting + max(self.sampling, kept_cache + max(self.scoring, self.updating))


def estimate_memory(
    config: TrainConfig, shape: ModelShape, limits: Limits, compute_bytes: int
) -> MemoryEstimate:
    """The formulas of the module's docstring; ``compute_bytes`` is 4 for float32 and 2 for bfloat16."""
    critic = shape.critic_parameters if config.algorithm.needs_critic else 0
    trained = shape.trained + critic
    rows = config.sampler.max_concurrency  # an evaluation uses all of them, whatever the batch size
    tokens, actions = limits.max_trajectory_tokens, action_tokens(limits)
    cache_token = 2 * shape.layers * shape.key_value_width * compute_bytes
    update = config.update
    micro = min(update.micro_batch_size, update.mini_batch_size)
    critic_micro = min(update.critic_micro_batch_size, update.mini_batch_size) if critic else 0
    scored = min(update.log_prob_micro_batch_size, config.rollout.batch_size)
    weights_copy = compute_bytes * shape.parameters if compute_bytes < FLOAT32 else 0
    sampling = 0 if config.sampler.backend == "vllm" else 3 * rows * tokens * cache_token + weights_copy
    kept = kept_width(shape, config.hardware.gradient_checkpointing)
    return MemoryEstimate(
        weights=FLOAT32 * (shape.parameters + critic),
        gradients=FLOAT32 * trained,
        optimizer=2 * FLOAT32 * trained,
        reference=FLOAT32 * shape.parameters if config.loss.kl_coef > 0 else 0,
        sampling=sampling,
        scoring=compute_bytes * scored * (tokens * shape.scoring_width + actions * shape.vocabulary),
        updating=compute_bytes
        * max(micro * (tokens * kept + 2 * actions * shape.vocabulary), critic_micro * tokens * kept),
        trust_region=FLOAT32 * shape.trained if update.trust_kl is not None else 0,
    )


def action_tokens(limits: Limits) -> int:
    """The most tokens of one trajectory that the policy can write."""
    return min(limits.max_turns * limits.max_new_tokens, limits.max_trajectory_tokens)


def kept_width(shape: ModelShape, gradient_checkpointing: bool) -> int:
    """Elements kept for each token until the backward pass, with those of a block that is computed again."""
    if gradient_checkpointing:
        return shape.layers * shape.hidden + shape.block_width
    return shape.layers * shape.block_width


def gigabytes(size: int) -> str:
    """A size in readable form: ``1.90 GB``, ``24.1 MB``."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
