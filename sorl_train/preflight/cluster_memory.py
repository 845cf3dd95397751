"""An upper bound of the memory that a run on OpenRLHF needs on each GPU and on each host, from sizes alone.

A model (policy or critic) has P parameters, and its largest weight has E elements. There are N data-parallel ranks, and
DeepSpeed's gradient bucket has B elements (5e8). Weights and gradients are bfloat16; master weights and moments are
float32. Each rank needs, in bytes:

    purpose                        ZeRO-2              ZeRO-3
    weights                        2 P                 2 P / N
    master weights, Adam           12 P / N            12 P / N
    gradients                      2 P / N, updating   2 P / N
    gradient bucket                2 B                 2 B
    offloaded, in host memory      20 P / N + 2 E      18 P / N   (instead of the 12 and of the gradients)

With ``offload_optimizer`` master weights, Adam and gradients take nothing on the GPU, and ZeRO-2 has a buffer of 2 E
instead; the host needs up to 24 P / N, because torch rounds pinned memory up to powers of two (what DeepSpeed's own
``estimate_zero3_model_states_mem_needs`` allows). Without it, on GPUs that train and sample in turns, an idle model
moves all but its weights to the host. The reference takes 2 P / N with ZeRO-3, in host memory if ``offload_reference``;
with ZeRO-2 it takes 2 P on every GPU. The trust region keeps 4 P / N in host memory.

In addition a model at work needs (m rows in a micro-batch; L tokens of a trajectory, A of them the policy's; n layers
of width h and MLP width i; a vocabulary of V):

- ZeRO-3 on several ranks: gathered weights 2 min(P, 1.05e9 + E), DeepSpeed's limits for live and prefetched ones, and
  a buffer of arriving weights, 2 min(P, 5e7 + E);
- update: what autograd keeps, 2 m L (n w + 5 h) with w = 12 h + 4 i (see ``memory.py``; 5 h for embeddings and the last
  norm). With gradient checkpointing n h replaces n w. To this the larger of two moments: the logits of the micro-batch
  and of its action tokens, 2 m V (L + A), in the forward pass and again as gradients; or one block that is computed
  again, 2 m L w, beside leaving gradients, 2 B, and arriving weights if P > 1.05e9. The critic has no logits. A step
  that is not offloaded needs the gradients in float32, 8 P / N (ZeRO-3: 6 P / N);
- scoring, m' rows: the forward pass of a block, 2 m' L (4 h + 3 i), or the logits and 2 m' L h. The reference runs in
  OpenRLHF's own worker, which converts the logits to float32: 6 m' L V. This part grows fastest.

These phases take turns: each process gives its cached memory back to the GPU when its work is done. vLLM takes
``vllm_memory`` of the GPU: its weights 2 P / tp, its own work, and the key-value cache, where a token needs
4 n (kv_heads x head_dim) / tp. On shared GPUs it sleeps while others work and keeps its weights in host memory.

Two figures are not measured: 1 GB for each process's CUDA context and communication buffers, and 2 GB for vLLM's own
work. Fragmentation in the allocator comes on top. Everything else is compared with DeepSpeed on a CPU, for both stages,
one and two ranks, with and without checkpointing (``tests/train/preflight/test_cluster_memory.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from sorl_env.task import Limits
from sorl_train.config.settings import TrainConfig
from sorl_train.losses.log_probs import CPU_CHUNK, GPU_CHUNK
from sorl_train.models.shape import ModelShape
from sorl_train.openrlhf.flags import Placement
from sorl_train.preflight.memory import action_tokens

H100 = 80_000_000_000  # bytes of its memory
# DeepSpeed's defaults, in elements
BUCKET = 500_000_000  # reduce_bucket_size
PREFETCH = 50_000_000  # stage3_prefetch_bucket_size
LIVE = 1_000_000_000 + PREFETCH  # stage3_max_reuse_distance
SUB_GROUP = 1_000_000_000  # sub_group_size: the elements of one step of ZeRO-3's optimizer
# Bytes
PROCESS = 1_000_000_000
VLLM_WORK = 2_000_000_000
CPU_CACHE = 1 << 30  # VLLM_CPU_KVCACHE_SPACE of a run on a CPU


@dataclass(frozen=True)
class ClusterMemory:
    """Bytes.

    Attributes:
        lasting: by model, needed in every phase on a GPU that trains.
        phases: what each phase adds there. Phases take turns.
        vllm: on a GPU that samples. It is one that trains (in the phase ``sampling``) or another one.
        cache_tokens: tokens that the key-value cache of one vLLM engine holds.
        host: by purpose, in the host memory of one node.
    """

    lasting: dict[str, int]
    phases: dict[str, int]
    vllm: int
    cache_tokens: int
    host: dict[str, int]

    def total(self, phase: str) -> int:
        """Bytes in a phase, with what is needed in every phase."""
        return sum(self.lasting.values()) + self.phases[phase]

    @property
    def peak(self) -> str:
        """The phase that needs the most memory."""
        return max(self.phases, key=self.total)


@dataclass(frozen=True)
class _States:
    """Bytes of a trained model on one rank: always on the GPU, on the GPU while it works, in host memory."""

    always: int = 0
    awake: int = 0
    host: int = 0


def estimate_cluster_memory(
    config: TrainConfig, shape: ModelShape, limits: Limits, *, gpu: int = H100, bucket: int = BUCKET
) -> ClusterMemory:
    """The formulas of the module's docstring, for GPUs with ``gpu`` bytes."""
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
        in_float32 = 6 * sizes.scored_rows * sizes.tokens * shape.vocabulary
        phases["scoring, reference"] = sizes.scoring(reference, in_float32)
    phases["policy update"] = of_policy.awake + sizes.update(policy, sizes.logits(sizes.rows, 4))

    ranks = place.train_gpus_per_node
    trusts = config.update.trust_kl is not None
    processes = 1 + bool(critic) + bool(reference) + place.shared
    return ClusterMemory(
        lasting={
            "policy": of_policy.always,
            "critic": of_critic.always,
            "reference": 0 if reference_in_host else reference_share,
            "processes": 0 if on_cpu else PROCESS * processes,
        },
        phases=phases,
        vllm=weights + work + cache,
        cache_tokens=cache // (4 * shape.layers * shape.key_value_width // heads),
        host={
            "policy": of_policy.host * ranks,
            "critic": of_critic.host * ranks,
            "reference": reference_share * ranks if reference_in_host else 0,
            "trust region": 4 * (policy // sizes.ranks) * ranks if trusts else 0,
            "vLLM asleep": weights * min(place.sample_gpus, cluster.gpus_per_node) if sizes.sleeps else 0,
            "a policy being saved": 2 * policy,
        },
    )


class _Sizes:
    """The sizes that the formulas share."""

    def __init__(self, config: TrainConfig, shape: ModelShape, limits: Limits, bucket: int) -> None:
        self.shape, self.bucket, self.place = shape, bucket, Placement.of(config)
        self.ranks = self.place.ranks
        self.on_cpu = config.hardware.device == "cpu"
        self.sharded = config.cluster.zero_stage == 3
        self.offloads = config.cluster.offload_optimizer and not self.on_cpu
        self.sleeps = self.place.shared and not self.on_cpu
        self.checkpointing = config.hardware.gradient_checkpointing
        update = config.update
        self.rows = self.place.micro_batch(update.micro_batch_size, update.mini_batch_size)
        self.scored_rows = self.place.micro_batch(update.log_prob_micro_batch_size, config.rollout.batch_size)
        self.tokens, self.actions = limits.max_trajectory_tokens, action_tokens(limits)
        self.largest = shape.vocabulary * shape.hidden

    def states(self, parameters: int) -> _States:
        """Weights, gradients and optimizer of a trained model; nothing for one that the algorithm does not have."""
        if not parameters:
            return _States()
        share, buffer = parameters // self.ranks, 2 * self.bucket
        weights = 2 * (share if self.sharded else parameters)
        if self.offloads:
            copies = 0 if self.sharded else 2 * self.largest
            return _States(weights + buffer + copies, 0, max(24 * share, 20 * share + copies))
        rest = 12 * share + (2 * share if self.sharded else 0)
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
        gradients = 0 if self.sharded or self.offloads else 2 * share
        # ZeRO-3 copies a bucket to scatter it; ZeRO-2 adds gradients of a micro-batch to those of the ones before
        again = 2 * min(self.bucket, parameters) if self.sharded else gradients
        again += column * shape.block_width if self.checkpointing else 0
        again += self.gathered(parameters, PREFETCH) if parameters > LIVE else 0
        step = 6 * min(share, SUB_GROUP) if self.sharded else 8 * share
        backward = gradients + self.gathered(parameters, LIVE) + column * kept + max(logits, again)
        return max(backward, 0 if self.offloads else step)
