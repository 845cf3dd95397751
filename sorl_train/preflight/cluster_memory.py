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
    buffers, in host memory        DeepSpeed's allowance: up to 24 P / N with what is offloaded
    trust region, in host memory   4 P / N             4 P / N    (the policy)

With ``offload_optimizer`` master weights, Adam and gradients take nothing on the GPU, and ZeRO-2 has a buffer of 2 E
instead. Without it, on GPUs that train and sample in turns, an idle model moves all but its weights to the host. The
reference takes 2 P / N with ZeRO-3, in host memory if ``offload_reference``; with ZeRO-2 it takes 2 P on every GPU,
whatever ``offload_reference`` says.

In addition a model at work needs (m rows in a micro-batch; L tokens of a trajectory, A of them the policy's; n layers
of width h and MLP width i; a vocabulary of V):

- ZeRO-3 on several ranks: gathered weights 2 min(P, 1.05e9 + E), DeepSpeed's limits for live and prefetched ones; and
  a buffer of arriving weights, 2 min(P, 5e7 + E);
- update: what autograd keeps, 2 m L (n w + 5 h) with w = 12 h + 4 i (see ``memory.py``; 5 h for embeddings and the last
  norm). With gradient checkpointing n h replaces n w. To this the larger of two moments: the logits of the whole
  micro-batch and of its action tokens, 2 m V (L + A), in the forward pass and again as gradients; or one block that is
  computed again, 2 m L w, beside leaving gradients, 2 B, and arriving weights if P > 1.05e9. The critic has no logits;
- step, not offloaded: the gradients once more and in float32, 8 P / N (ZeRO-3: 6 P / N);
- scoring, m' rows: the forward pass of a block, 2 m' L (4 h + 3 i), or the logits and 2 m' L h. The reference runs in
  OpenRLHF's own worker, which converts the logits to float32: 6 m' L V. This part grows fastest;
- new weights for vLLM: a gathered weight and its copy, 4 E, beside vLLM's weights.

These phases take turns: each process gives its cached memory back to the GPU when its work is done.

vLLM takes ``vllm_memory`` of the GPU: its weights 2 P / tp, its own work, and the key-value cache, where a token needs
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
from sorl_train.preflight.memory import FLOAT32, action_tokens

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

Parts = dict[str, int]


@dataclass(frozen=True)
class VllmMemory:
    """Bytes of vLLM on one GPU, and the tokens that the cache of one engine can hold."""

    weights: int
    work: int
    cache: int
    tokens: int

    @property
    def total(self) -> int:
        """All bytes on one GPU."""
        return self.weights + self.work + self.cache


@dataclass(frozen=True)
class ClusterMemory:
    """Bytes by purpose.

    Attributes:
        lasting: needed in every phase, on a GPU that trains.
        phases: what each phase adds there. Phases take turns.
        vllm: on a GPU that samples. It is one that trains (in the phase ``sampling``) or another one.
        host: in the host memory of one node.
    """

    lasting: Parts
    phases: dict[str, Parts]
    vllm: VllmMemory
    host: Parts

    def total(self, phase: str) -> int:
        """Bytes in a phase, with what is needed in every phase."""
        return sum(self.lasting.values()) + sum(self.phases[phase].values())

    @property
    def peak(self) -> str:
        """The phase that needs the most memory."""
        return max(self.phases, key=self.total)


@dataclass(frozen=True)
class _States:
    """Bytes of a trained model on one rank: always on the GPU, on the GPU while it works, in host memory."""

    always: int
    awake: int
    host: int


def estimate_cluster_memory(
    config: TrainConfig, shape: ModelShape, limits: Limits, *, gpu: int = H100, bucket: int = BUCKET
) -> ClusterMemory:
    """The formulas of the module's docstring, for GPUs with ``gpu`` bytes."""
    return _Estimate(config, shape, limits, gpu, bucket).result()


class _Estimate:
    """The sizes that the formulas share."""

    def __init__(self, config: TrainConfig, shape: ModelShape, limits: Limits, gpu: int, bucket: int) -> None:
        self.config, self.shape, self.gpu, self.bucket = config, shape, gpu, bucket
        self.cluster, self.place = config.cluster, Placement.of(config)
        self.ranks = self.place.ranks
        self.on_cpu = config.hardware.device == "cpu"
        self.sharded = self.cluster.zero_stage == 3
        self.offloads = self.cluster.offload_optimizer and not self.on_cpu
        self.sleeps = self.place.shared and not self.on_cpu
        self.gathers = self.sharded and self.ranks > 1
        self.rows = self.place.micro_batch(config.update.micro_batch_size, config.update.mini_batch_size)
        self.scored_rows = self.place.micro_batch(
            config.update.log_prob_micro_batch_size, config.rollout.batch_size
        )
        self.tokens, self.actions = limits.max_trajectory_tokens, action_tokens(limits)
        self.policy = shape.parameters
        # OpenRLHF's value head has no bias
        self.critic = shape.critic_parameters - 1 if config.algorithm.needs_critic else 0
        self.reference = shape.parameters if config.loss.kl_coef > 0 else 0
        self.largest = shape.vocabulary * shape.hidden

    def result(self) -> ClusterMemory:
        policy, critic = self.states(self.policy), self.states(self.critic)
        vllm = self.vllm()
        processes = 1 + bool(self.critic) + bool(self.reference) + self.place.shared
        phases: dict[str, Parts] = {}
        if self.place.shared:
            phases["sampling"] = {"vLLM": vllm.total}
        scored_logits = self.logits(self.scored_rows, gradients=False)
        phases["scoring, policy"] = self.at_work(policy, self.policy, logits=scored_logits)
        if self.critic:
            phases["scoring, critic"] = self.at_work(critic, self.critic, logits=0)
        if self.reference:
            phases["scoring, reference"] = self.forward(
                self.reference, self.scored_rows, 6 * self.scored_rows * self.tokens * self.shape.vocabulary
            )
        if self.critic:
            phases["critic update"] = self.update(critic, self.critic, logits=0)
        phases["policy update"] = self.update(
            policy, self.policy, logits=self.logits(self.rows, gradients=True)
        )
        phases["weights to vLLM"] = {
            "vLLM's weights": vllm.weights if self.place.shared else 0,
            "a weight and its copy": (4 if self.sharded else 2) * self.largest,
        }
        lasting = {
            "policy": policy.always,
            "critic": critic.always,
            "reference": self.reference_gpu(),
            "processes": 0 if self.on_cpu else PROCESS * processes,
        }
        return ClusterMemory(lasting, phases, vllm, self.host(policy, critic, vllm))

    # -- states --------------------------------------------------------------------------------------------------

    def states(self, parameters: int) -> _States:
        """Weights, gradients and optimizer of a trained model; zero for one that the algorithm does not have."""
        if not parameters:
            return _States(0, 0, 0)
        share = parameters // self.ranks
        weights = 2 * (share if self.sharded else parameters)
        buffer = 2 * self.bucket
        if self.offloads:
            copies = 0 if self.sharded else 2 * self.largest
            return _States(weights + buffer + copies, 0, (18 if self.sharded else 20) * share + copies)
        rest = 12 * share + (2 * share if self.sharded else 0)
        if self.sleeps:
            return _States(weights, rest + buffer, rest)
        return _States(weights + rest + buffer, 0, 0)

    def buffers(self, parameters: int, states: _States) -> int:
        """What the host may need beyond the offloaded states: torch rounds pinned memory up to powers of two.

        DeepSpeed's own estimates (``estimate_zero3_model_states_mem_needs``) allow 1.5 times 16 bytes a parameter.
        """
        return max(0, 24 * (parameters // self.ranks) - states.host) if self.offloads else 0

    def reference_gpu(self) -> int:
        """The reference on the GPU of one rank."""
        if not self.sharded:
            return 2 * self.reference
        return 0 if self.reference_host() else 2 * self.reference // self.ranks

    def reference_host(self) -> int:
        """The reference in host memory, for one rank."""
        offloads = self.sharded and self.cluster.offload_reference and not self.on_cpu
        return 2 * self.reference // self.ranks if offloads else 0

    def host(self, policy: _States, critic: _States, vllm: VllmMemory) -> Parts:
        """Host memory of one node. On the first node a whole policy is gathered to be saved."""
        ranks = self.place.train_gpus_per_node
        samplers = min(self.place.sample_gpus, self.cluster.gpus_per_node)
        trusts = self.config.update.trust_kl is not None
        return {
            "policy": policy.host * ranks,
            "critic": critic.host * ranks,
            "pinned buffers": (self.buffers(self.policy, policy) + self.buffers(self.critic, critic)) * ranks,
            "reference": self.reference_host() * ranks,
            "trust region": FLOAT32 * (self.policy // self.ranks) * ranks if trusts else 0,
            "vLLM asleep": vllm.weights * samplers if self.sleeps else 0,
            "a policy being saved": 2 * self.policy,
        }

    # -- work ----------------------------------------------------------------------------------------------------

    def at_work(self, states: _States, parameters: int, *, logits: int) -> Parts:
        """What a model needs to score a micro-batch."""
        return {"woken up": states.awake} | self.forward(parameters, self.scored_rows, logits)

    def update(self, states: _States, parameters: int, *, logits: int) -> Parts:
        """What a model needs at the largest moment of an optimizer step."""
        shape, share, columns = self.shape, parameters // self.ranks, 2 * self.rows * self.tokens
        checkpointing = self.config.hardware.gradient_checkpointing
        block = columns * shape.block_width
        kept = columns * 5 * shape.hidden
        kept += shape.layers * (columns * shape.hidden if checkpointing else block)
        gradients = 0 if self.sharded or self.offloads else 2 * share
        # ZeRO-3 copies a bucket to scatter it; ZeRO-2 adds gradients of a micro-batch to those of the ones before
        leaving = 2 * min(self.bucket, parameters) if self.sharded else gradients
        arriving = self.arriving(parameters)
        again = (block if checkpointing else 0) + leaving + (arriving if parameters > LIVE else 0)
        at_work = {"gradients": gradients, "gathered weights": self.gathered(parameters)}
        moments = [
            at_work | {"arriving weights": arriving, "activations": columns * shape.scoring_width},
            at_work | {"activations": kept, "logits": logits},
            at_work | {"activations": kept, "a block again, transfers": again},
        ]
        if not self.offloads:
            step = 6 * min(share, SUB_GROUP) if self.sharded else 8 * share
            moments.append({"gradients in float32": step})
        return {"woken up": states.awake} | max(moments, key=lambda parts: sum(parts.values()))

    def gathered(self, parameters: int, limit: int = LIVE) -> int:
        """Whole weights that ZeRO-3 has gathered from the ranks; a single rank gathers nothing."""
        return 2 * min(parameters, limit + self.largest) if self.gathers else 0

    def arriving(self, parameters: int) -> int:
        """The buffer from which gathered weights are copied."""
        return self.gathered(parameters, PREFETCH)

    def forward(self, parameters: int, rows: int, logits: int) -> Parts:
        """The larger of two moments of a forward pass without gradients: inside a block, or at the logits."""
        hidden = 2 * rows * self.tokens * self.shape.hidden
        block = 2 * rows * self.tokens * self.shape.scoring_width
        parts = {"gathered weights": self.gathered(parameters)}
        arriving = self.arriving(parameters)
        if hidden + logits >= block + arriving:
            return parts | {"logits": hidden + logits}
        return parts | {"arriving weights": arriving, "activations": block}

    def logits(self, rows: int, *, gradients: bool) -> int:
        """The logits of a micro-batch and of its action tokens; or these, their gradient and float32 chunks."""
        of_actions = rows * self.actions * self.shape.vocabulary
        whole = 2 * rows * self.tokens * self.shape.vocabulary + 2 * of_actions
        chunks = 4 * 4 * min(CPU_CHUNK if self.on_cpu else GPU_CHUNK, of_actions)
        return max(whole, (4 if gradients else 2) * of_actions + chunks)

    # -- sampling ------------------------------------------------------------------------------------------------

    def vllm(self) -> VllmMemory:
        parallel = self.cluster.vllm_tensor_parallel
        weights = 2 * self.policy // parallel
        work = 0 if self.on_cpu else VLLM_WORK
        share = int(self.cluster.vllm_memory * self.gpu)
        cache = CPU_CACHE if self.on_cpu else max(0, share - weights - work)
        heads = min(parallel, self.shape.key_value_heads)  # with fewer heads than GPUs, GPUs hold copies
        token = 4 * self.shape.layers * self.shape.key_value_width // heads
        return VllmMemory(weights, work, cache, cache // token)
