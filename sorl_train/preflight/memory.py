"""An upper bound of the memory that a training run needs, from sizes alone: no weight is allocated.

With P parameters of the policy (T of them trained), C of the critic's, b bytes a number in the compute dtype (4 or 2),
L tokens a trajectory, A of them the policy's, m rows a micro-batch, n layers of width h and MLP width i, V words:

- weights 4 (P + C), gradients 4 (T + C), Adam 8 (T + C), reference 4 P: master weights are float32 always;
- key-value cache 2 n b L (kv_heads x head_dim) for each row in flight, held while sampling. It doubles as it grows,
  and the old half lives until it is copied, so up to 3 times what L tokens need. vLLM takes its own share of the GPU
  (sampler.gpu_memory), which comes on top of this estimate;
- activations b m L n (12 h + 4 i): a block of a gated-MLP transformer keeps three tensors for each of its two norms,
  five in attention (the flash kernels keep no L x L matrix), the residual, and four in its MLP. With gradient
  checkpointing b m L (n h + 12 h + 4 i): the input of each block, and one block computed again;
- logits 2 b m A V: of action tokens only, and their gradient;
- scoring without gradients b m' (L (4 h + 3 i) + A V), m' = update.log_prob_micro_batch_size.

Sampling, scoring and updating take turns, so the peak is the lasting part and the largest of the three; beside scoring
and updating a small cache is kept. Every trajectory is taken at its full length: real runs stay below.
"""

from __future__ import annotations

from dataclasses import dataclass

from sorl_env.task import Limits
from sorl_train.config.settings import TrainConfig
from sorl_train.models.shape import ModelShape, block_width, scoring_width
from sorl_train.rollout.sampler import KEPT_CACHE

FLOAT32 = 4


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by purpose; ``sampling``, ``scoring`` and ``updating`` are never held together."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    sampling: int
    scoring: int
    updating: int

    @property
    def lasting(self) -> int:
        """Held all the time."""
        return self.weights + self.gradients + self.optimizer + self.reference

    @property
    def peak(self) -> int:
        """The most that is held at once, without the interpreter and its libraries."""
        kept_cache = min(self.sampling, KEPT_CACHE)
        return self.lasting + max(self.sampling, kept_cache + max(self.scoring, self.updating))


def estimate_memory(
    config: TrainConfig, shape: ModelShape, limits: Limits, compute_bytes: int
) -> MemoryEstimate:
    """See the module's text for the formulas; ``compute_bytes`` is 4 for float32 and 2 for bfloat16."""
    critic = shape.backbone_parameters + shape.hidden + 1 if config.algorithm.needs_critic else 0
    trained = shape.trained + critic
    rows = config.sampler.max_concurrency  # all of them in evaluation, whatever the batch size
    tokens = limits.max_trajectory_tokens
    actions = min(limits.max_turns * limits.max_new_tokens, tokens)
    cache_token = 2 * shape.layers * shape.key_value_width * compute_bytes
    micro = min(config.update.micro_batch_size, config.update.mini_batch_size)
    scored = min(config.update.log_prob_micro_batch_size, config.rollout.batch_size)
    sampling = 0 if config.sampler.backend == "vllm" else 3 * rows * tokens * cache_token
    return MemoryEstimate(
        weights=FLOAT32 * (shape.parameters + critic),
        gradients=FLOAT32 * trained,
        optimizer=2 * FLOAT32 * trained,
        reference=FLOAT32 * shape.parameters if config.loss.kl_coef > 0 else 0,
        sampling=sampling,
        scoring=compute_bytes * scored * (tokens * scoring_width(shape) + actions * shape.vocabulary),
        updating=max(
            compute_bytes * micro * (tokens * kept_width(config, shape) + 2 * actions * shape.vocabulary),
            _critic_update(config, shape, tokens, compute_bytes) if critic else 0,
        ),
    )


def _critic_update(config: TrainConfig, shape: ModelShape, tokens: int, compute_bytes: int) -> int:
    rows = min(config.update.critic_micro_batch_size, config.update.mini_batch_size)
    return compute_bytes * rows * tokens * kept_width(config, shape)


def kept_width(config: TrainConfig, shape: ModelShape) -> int:
    """Numbers that a token leaves behind for the backward pass, a block that is computed again included."""
    if config.hardware.gradient_checkpointing:
        return shape.layers * shape.hidden + block_width(shape)
    return shape.layers * block_width(shape)


def gigabytes(size: int) -> str:
    """A size for people: ``1.90 GB``, ``24.1 MB``."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
