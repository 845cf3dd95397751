"""Upper bounds of the memory that a run needs, from sizes alone: no weight is allocated.

P: parameters of a model, T of them trained; N data-parallel ranks; m rows in a micro-batch; L tokens of a trajectory, A
of them the policy's; n layers of width h and MLP width i; a vocabulary of V; b bytes for a number in the compute dtype.
Autograd keeps b m L n w for the blocks of a gated-MLP transformer, w = 12 h + 4 i: three tensors for each of two norms,
five in attention (flash kernels keep no L x L matrix), the residual, and four in the MLP. With gradient checkpointing
it keeps b m L n h and the w of one block that is computed again. A forward pass without gradients needs 4 h + 3 i.

On one machine (``estimate_memory``), policy and critic together need weights 4 P, gradients 4 T and Adam 8 T, always
float32; the reference 4 P; and in turns
- sampling, where all trajectories in flight count: a key-value cache of 2 n b L (kv_heads x head_dim) for each, three
  times, as it doubles while it grows; in bfloat16 also a copy of the weights. vLLM takes its own share of the GPU;
- scoring b m' (L (4 h + 3 i) + A V), with m' of update.log_prob_micro_batch_size;
- updating: what autograd keeps, and the action tokens' logits with their gradient, 2 b m A V.
The mask of packed rows, once for all layers, is m L^2 (1 + b heads / kv_heads) on a CPU; on a GPU a list of pairs of
blocks of FLEX_BLOCK tokens, 32 (m L / FLEX_BLOCK)^2 while it is made: 134 MB for 64 rows of 4,096 tokens.

With OpenRLHF (``estimate_cluster_memory``) weights and gradients are bfloat16. A rank needs for each model, in bytes:

    purpose                        ZeRO-2              ZeRO-3
    weights                        2 P                 2 P / N
    master weights, Adam           12 P / N            12 P / N
    gradients                      2 P / N, updating   2 P / N
    gradient bucket                2 BUCKET            2 BUCKET
    offloaded, in host memory      20 P / N + 2 E      18 P / N   (instead of the 12 and of the gradients)

With ``ds.grad_accum_dtype: fp32`` gradients take 2 P / N more. E is the largest weight, for which ZeRO-2 has a buffer
when it offloads. The host needs up to 24 P / N, as torch rounds pinned memory up to powers of two. Without offloading,
on GPUs that train and sample in turns, an idle model moves all but its weights to the host. The reference takes 2 P / N
with ZeRO-3 (in host memory if ``offload_reference``) and 2 P with ZeRO-2. Besides, in turns,
- ZeRO-3 gathers weights, 2 min(P, LIVE + E), and those that arrive, 2 min(P, PREFETCH + E);
- an update keeps what autograd does and 5 h for embeddings and the last norm, and the larger of two moments: the logits
  of all and of the action tokens, 2 m V (L + A); or the block that is computed again beside leaving gradients;
- a step that is not offloaded needs gradients in float32, 8 P / N (ZeRO-3: 6 P / N).

Policy and critic are compared with what DeepSpeed holds on a CPU (``tests/train/preflight/test_memory.py``).
PROCESS and VLLM_WORK are not measured, and fragmentation in the allocator comes on top.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sorl_env.task import Limits
from sorl_train.config.settings import TrainConfig
from sorl_train.losses.log_probs import CPU_CHUNK, GPU_CHUNK
from sorl_train.models.forward import compute_dtype
from sorl_train.models.packing import FLEX_BLOCK
from sorl_train.models.policy import ModelShape, model_shape
from sorl_train.openrlhf.flags import Placement
from sorl_train.rollout.sampler import KEPT_CACHE

H100 = 80_000_000_000  # bytes of its memory
# DeepSpeed's defaults, in elements
BUCKET = 500_000_000  # reduce_bucket_size
PREFETCH = 50_000_000  # stage3_prefetch_bucket_size
LIVE = 1_000_000_000 + PREFETCH  # stage3_max_reuse_distance
SUB_GROUP = 1_000_000_000  # sub_group_size: the elements of one step of ZeRO-3's optimizer
# Bytes
PROCESS = 1_000_000_000  # a process's CUDA context and communication buffers
VLLM_WORK = 2_000_000_000
CPU_CACHE = 1 << 30  # VLLM_CPU_KVCACHE_SPACE of a run on a CPU
SPARE = 2  # checkpoints beside those that are kept: the best one, and one that is being written


@dataclass(frozen=True)
class Memory:
    """Bytes.

    Attributes:
        lasting: by purpose, needed all the time on a device that trains.
        phases: what each phase adds there. Phases take turns.
        host: by purpose, in the host memory of one node, beside what a CPU run needs as a device.
        vllm: on a GPU that samples for OpenRLHF, one that trains (in the phase ``sampling``) or another one.
        cache_tokens: tokens that the key-value cache of one of OpenRLHF's vLLM engines holds.
    """

    lasting: dict[str, int]
    phases: dict[str, int]
    host: dict[str, int]
    vllm: int = 0
    cache_tokens: int = 0

    def total(self, phase: str) -> int:
        """Bytes in a phase, with what is needed in every phase."""
        return sum(self.lasting.values()) + self.phases[phase]

    @property
    def peak(self) -> str:
        """The phase that needs the most memory."""
        return max(self.phases, key=self.total)

    def lines(self, of: str = "") -> list[str]:
        """What a device needs, as text; ``of`` is said after the peak."""
        return [
            row("held all the time", self.lasting),
            *(f"{phase:<19}{gigabytes(self.total(phase)):>10}" for phase in self.phases),
            f"peak {gigabytes(self.total(self.peak))}{of}, in {self.peak!r}",
        ]


def row(name: str, parts: dict[str, int]) -> str:
    """A line with the sum and the parts that are not 0."""
    shown = ", ".join(f"{part} {gigabytes(size)}" for part, size in parts.items() if size)
    return f"{name:<19}{gigabytes(sum(parts.values())):>10}  {shown}".rstrip()


def gigabytes(size: int) -> str:
    """A size in readable form: ``1.90 GB``, ``24.1 MB``."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def checkpoint_size(config: TrainConfig, shape: ModelShape) -> int:
    """Bytes on disk of a checkpoint that a run can go on from: weights and moments in float32; with OpenRLHF the
    weights that are trained, DeepSpeed's master weights and moments, and the policy as a transformers folder."""
    critic = shape.critic_parameters if config.stage == "rl" and config.algorithm.needs_critic else 0
    if config.engine == "openrlhf":
        return 14 * (shape.parameters + critic) + 2 * shape.parameters
    return 4 * (shape.parameters + critic) + 8 * (shape.trained + critic)


def estimate_memory(config: TrainConfig, shape: ModelShape, limits: Limits, device: torch.device) -> Memory:
    """What one machine needs on this device."""
    compute_bytes = compute_dtype(config.hardware.dtype, device).itemsize
    update, tokens, actions = config.update, limits.max_trajectory_tokens, _action_tokens(limits)
    is_rl = config.stage == "rl"
    critic = shape.critic_parameters if is_rl and config.algorithm.needs_critic else 0
    reference = model_shape(config.loss.kl_model) if config.loss.kl_model else shape
    trained = shape.trained + critic
    micro = min(update.micro_batch_size, update.mini_batch_size)
    critic_micro = min(update.critic_micro_batch_size, update.mini_batch_size) if critic else 0
    scored = min(update.log_prob_micro_batch_size, config.rollout.batch_size)
    kept = shape.layers * shape.block_width
    if config.hardware.gradient_checkpointing:
        kept = shape.layers * shape.hidden + shape.block_width
    sampling = 0
    if config.sampler.backend != "vllm":
        cache = 2 * shape.layers * shape.key_value_width * compute_bytes
        # an evaluation uses all rows, whatever the batch size
        sampling = 3 * config.sampler.max_concurrency * tokens * cache
        sampling += compute_bytes * shape.parameters if compute_bytes < 4 else 0
    scoring = scored * (tokens * shape.scoring_width + actions * shape.vocabulary)
    updating = micro * (tokens * kept + 2 * actions * shape.vocabulary)

    def mask(rows: int) -> int:
        if device.type == "cuda":
            return 32 * (-(-rows * tokens // FLEX_BLOCK)) ** 2
        return rows * tokens**2 * (1 + compute_bytes * (shape.heads // shape.key_value_heads))

    kept_cache = min(sampling, KEPT_CACHE)
    return Memory(
        lasting={
            "weights": 4 * (shape.parameters + critic),
            "gradients": 4 * trained,
            "optimizer": 8 * trained,
            "reference": 4 * reference.parameters if is_rl and config.loss.kl_coef > 0 else 0,
        },
        phases={
            "sampling": sampling,
            "scoring": kept_cache + compute_bytes * scoring + mask(scored),
            "updating": kept_cache
            + compute_bytes * max(updating, critic_micro * tokens * kept)
            + mask(max(micro, critic_micro)),
        },
        host={"trust region": 4 * shape.trained if update.trust_kl is not None else 0},
    )


def _action_tokens(limits: Limits) -> int:
    return min(limits.max_turns * limits.max_new_tokens, limits.max_trajectory_tokens)


def estimate_cluster_memory(
    config: TrainConfig, shape: ModelShape, limits: Limits, *, gpu: int = H100, bucket: int = BUCKET
) -> Memory:
    """What each GPU (of ``gpu`` bytes) and each host need with OpenRLHF; ``bucket`` is DeepSpeed's, in elements."""
    sizes = _Sizes(config, shape, limits, bucket)
    place, cluster, on_cpu = sizes.place, config.cluster, sizes.on_cpu
    policy = shape.parameters
    # OpenRLHF's value head has no bias
    critic = shape.critic_parameters - 1 if config.algorithm.needs_critic else 0
    reference = policy if config.loss.kl_coef > 0 else 0
    of_policy, of_critic = sizes.states(policy), sizes.states(critic)
    reference_share = 2 * reference // (sizes.ranks if sizes.sharded else 1)
    reference_in_host = sizes.sharded and cluster.offload_reference and not on_cpu

    weights = 2 * policy // cluster.vllm_tensor_parallel
    work = 0 if on_cpu else VLLM_WORK
    cache = CPU_CACHE if on_cpu else max(0, int(cluster.vllm_memory * gpu) - weights - work)
    # with fewer heads than GPUs, GPUs hold copies
    heads = min(cluster.vllm_tensor_parallel, shape.key_value_heads)

    phases = {"sampling": weights + work + cache} if place.shared else {}
    phases["scoring, policy"] = of_policy.awake + sizes.scoring(policy, sizes.logits(sizes.scored_rows, 2))
    if critic:
        phases["scoring, critic"] = of_critic.awake + sizes.scoring(critic, 0)
        phases["critic update"] = of_critic.awake + sizes.update(critic, 0)
    if reference:
        phases["scoring, reference"] = sizes.scoring(reference, sizes.logits(sizes.scored_rows, 2))
    phases["policy update"] = of_policy.awake + sizes.update(policy, sizes.logits(sizes.rows, 4))

    ranks = place.train_gpus_per_node
    trusts = config.update.trust_kl is not None
    processes = 1 + bool(critic) + bool(reference) + place.shared
    return Memory(
        lasting={
            "policy": of_policy.always,
            "critic": of_critic.always,
            "reference": 0 if reference_in_host else reference_share,
            "processes": 0 if on_cpu else PROCESS * processes,
        },
        phases=phases,
        host={
            "policy": of_policy.host * ranks,
            "critic": of_critic.host * ranks,
            "reference": reference_share * ranks if reference_in_host else 0,
            "trust region": 4 * (policy // sizes.ranks) * ranks if trusts else 0,
            "vLLM asleep": weights * min(place.sample_gpus, cluster.gpus_per_node) if sizes.sleeps else 0,
            "a policy being saved": 2 * policy,
        },
        vllm=weights + work + cache,
        cache_tokens=cache // (4 * shape.layers * shape.key_value_width // heads),
    )


@dataclass(frozen=True)
class _States:
    """Bytes of a trained model on one rank: always on the GPU, on the GPU while it works, in host memory."""

    always: int = 0
    awake: int = 0
    host: int = 0


class _Sizes:
    """The sizes that the formulas share."""

    def __init__(self, config: TrainConfig, shape: ModelShape, limits: Limits, bucket: int) -> None:
        self.shape, self.bucket, self.place = shape, bucket, Placement.of(config.cluster)
        self.ranks = self.place.ranks
        self.on_cpu = config.hardware.device == "cpu"
        self.sharded = config.cluster.zero_stage == 3
        self.offloads = config.cluster.offload_optimizer and not self.on_cpu
        self.sleeps = self.place.shared and not self.on_cpu
        self.checkpointing = config.hardware.gradient_checkpointing
        update = config.update
        self.rows = self.place.micro_batch(update.micro_batch_size, update.mini_batch_size)
        self.scored_rows = self.place.micro_batch(update.log_prob_micro_batch_size, config.rollout.batch_size)
        self.tokens, self.actions = limits.max_trajectory_tokens, _action_tokens(limits)
        self.largest = shape.vocabulary * shape.hidden
        self.gradient = 4 if config.cluster.flags.get("ds.grad_accum_dtype") == "fp32" else 2

    def states(self, parameters: int) -> _States:
        """Weights, gradients and optimizer of a trained model; nothing for one that the algorithm does not have."""
        if not parameters:
            return _States()
        share, buffer = parameters // self.ranks, 2 * self.bucket
        weights = 2 * (share if self.sharded else parameters)
        if self.offloads:
            copies = 0 if self.sharded else 2 * self.largest
            in_host = max(24 * share, (18 + self.gradient) * share + copies)
            return _States(weights + buffer + copies, 0, in_host)
        rest = 12 * share + (self.gradient * share if self.sharded else 0)
        if self.sleeps:
            return _States(weights, rest + buffer, rest)
        return _States(weights + rest + buffer)

    def gathered(self, parameters: int, limit: int) -> int:
        """Whole weights that ZeRO-3 has gathered from the ranks; a single rank gathers nothing."""
        return 2 * min(parameters, limit + self.largest) if self.sharded and self.ranks > 1 else 0

    def logits(self, rows: int, numbers: int) -> int:
        """The logits of a micro-batch and of its action tokens; or ``numbers`` bytes for each of these (with their
        gradient or without) and float32 chunks."""
        of_actions = rows * self.actions * self.shape.vocabulary
        whole = 2 * rows * self.tokens * self.shape.vocabulary + 2 * of_actions
        chunks = 4 * 4 * min(CPU_CHUNK if self.on_cpu else GPU_CHUNK, of_actions)
        return max(whole, numbers * of_actions + chunks)

    def scoring(self, parameters: int, logits: int) -> int:
        """The larger of two moments of a forward pass without gradients: inside a block, or at the logits."""
        column = 2 * self.scored_rows * self.tokens
        block = column * self.shape.scoring_width + self.gathered(parameters, PREFETCH)
        return self.gathered(parameters, LIVE) + max(block, column * self.shape.hidden + logits)

    def update(self, parameters: int, logits: int) -> int:
        """What a model needs at the largest moment of an optimizer step."""
        shape, share, column = self.shape, parameters // self.ranks, 2 * self.rows * self.tokens
        kept = 5 * shape.hidden + shape.layers * (shape.hidden if self.checkpointing else shape.block_width)
        gradients = 0 if self.sharded or self.offloads else self.gradient * share
        # ZeRO-3 copies a bucket to scatter it; ZeRO-2 adds gradients of a micro-batch to those of the ones before
        again = 2 * min(self.bucket, parameters) if self.sharded else gradients
        again += column * shape.block_width if self.checkpointing else 0
        again += self.gathered(parameters, PREFETCH) if parameters > LIVE else 0
        step = 6 * min(share, SUB_GROUP) if self.sharded else 8 * share
        backward = gradients + self.gathered(parameters, LIVE) + column * kept + max(logits, again)
        return max(backward, 0 if self.offloads else step)
