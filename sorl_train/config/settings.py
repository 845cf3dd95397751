"""The training configuration: one documented, typed dataclass a group.

Defaults are the paper's values (Appendix, Implementation Details) where it gives one. YAML files under ``configs/``
hold differences only; the command line overrides any field by its dotted name. ``help`` metadata is what ``--help``
prints, ``paper`` is the paper's value where it differs in kind or is worth knowing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from sorl_env.bounds import MAX_SEED, MOST, Bounds
from sorl_train.algorithms import (
    ALGORITHMS,
    Aggregation,
    Algorithm,
    ClipBiasNorm,
    KLKind,
    RatioLevel,
    Scope,
    Target,
)
from sorl_train.config.find_algorithm import find_algorithm


def opt(
    default: Any,
    help: str,
    *,
    paper: str | None = None,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
) -> Any:
    """A config field with its help text, the bounds of a number and, where the paper gives one, the paper's value.

    ``low`` and ``high`` are allowed values, ``above`` is not; a whole number has no more than nine or ten digits.
    """
    if type(default) is int and high is None:
        high = MOST
    metadata: dict[str, Any] = {"help": help, "bounds": Bounds(low, high, above)}
    if paper:
        metadata["paper"] = paper
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class LimitsConfig:
    """Limits of one trajectory. None keeps the task's own limit."""

    max_turns: int | None = opt(
        None,
        "policy turns, the last one for the answer",
        paper="3 tool turns, then an answer",
        low=1,
    )
    max_prompt_tokens: int | None = opt(
        None, "first context; longer prompts are an error", paper="2048", low=1
    )
    max_new_tokens: int | None = opt(None, "tokens a turn", paper="500", low=1)
    max_observation_tokens: int | None = opt(None, "tokens of one environment reply", paper="500", low=1)
    max_trajectory_tokens: int | None = opt(
        None, "prompt, turns and observations together", paper="4096", low=2
    )
    max_seconds: float | None = opt(None, "wall-clock seconds a trajectory", above=0)
    max_reply_chars: int | None = opt(
        None,
        "characters of one tool's reply; a longer one is cut before it is tokenized or stored, and its record says so; "
        "None: 16 for each token of max_observation_tokens",
        low=1,
    )


@dataclass(frozen=True)
class SearchConfig:
    """The search tool of the question-answering tasks."""

    corpus: str | None = opt(
        None, "passages for in-process BM25 (Search-R1 JSONL, .gz too); None: the task's own"
    )
    url: str | None = opt(
        None,
        "a retrieval server speaking Search-R1's /retrieve, or several with commas between them; excludes corpus; "
        "a token it wants is read from the environment variable SORL_SEARCH_TOKEN",
    )
    cache: str | None = opt(
        None, "SQLite file on a local disk that keeps the servers' replies between runs; None: in memory only"
    )
    top_k: int = opt(3, "passages a search", paper="3", low=1)
    timeout_s: float = opt(
        30.0,
        "deadline of one tool call, retries included; then the trajectory is excluded",
        above=0,
    )
    retries: int = opt(3, "attempts after the first one, within the deadline", low=0)


@dataclass(frozen=True)
class SamplerConfig:
    """How turns are drawn."""

    temperature: float = opt(1.0, "sampling temperature in training", paper="1.0", above=0)
    top_p: float = opt(1.0, "nucleus sampling in training", paper="1.0", above=0, high=1)
    max_concurrency: int = opt(128, "trajectories in flight; each holds a row of the key-value cache", low=1)
    backend: Literal["transformers", "vllm"] = opt(
        "transformers", "transformers: any model, reproducible on a CPU; vllm: faster on a GPU", paper="vllm"
    )
    max_mismatch: float | None = opt(
        None,
        "end the run when the log-probabilities of sampler and trainer differ by more than this many nats on average, "
        "or by ten times as much in one turn; 0: never; None: 0.001 with transformers in float32, 0.1 in bfloat16, "
        "0.01 and 0.15 with vllm",
        low=0,
    )
    gpu_memory: float = opt(
        0.4, "share of the GPU that vllm takes for weights and cache", paper="0.6", low=0, high=1
    )


@dataclass(frozen=True)
class RolloutConfig:
    """What one training step collects."""

    batch_size: int = opt(512, "trajectories a step", paper="512", low=1)
    group_size: int = opt(1, "rollouts a prompt; group advantages need at least 2; divides batch_size", low=1)
    max_staleness: int = opt(
        0,
        "train on trajectories sampled this many optimizer rounds ago (0: on the newest)",
        low=0,
    )
    save_every: int = opt(
        10, "write the trajectories of every n-th step (and always the first and last)", low=1
    )


@dataclass(frozen=True)
class LossConfig:
    """The objective. ``algo`` chooses the ratio level, the normalization and the kind of advantage."""

    ratio: Literal["auto", RatioLevel] = opt(
        "auto", "which tokens share an importance ratio; auto: as the algorithm has it"
    )
    clip_eps: float = opt(0.2, "PPO clip range", paper="0.2", above=0)
    clip_eps_high: float | None = opt(None, "upper clip range, if it differs from clip_eps", above=0)
    dual_clip: float | None = opt(
        None,
        "upper bound of the ratio for tokens with a negative advantage (Dual-Clip PPO), above 1; None: off",
        above=1,
    )
    aggregation: Aggregation = opt(
        "trajectory_mean",
        "mean over each trajectory's tokens and then over trajectories, or mean over all tokens",
        paper="trajectory_mean",
    )
    clip_bias_norm: ClipBiasNorm = opt(
        "rms",
        "norm of the clipping bias that is compared with clip_bias_delta",
        paper="L2; the paper does not say of which quantity",
    )
    clip_bias_scope: Scope = opt(
        "mini_batch",
        "one factor for the whole mini-batch (the paper's equation) or one for each trajectory (the paper's text)",
        paper="mini_batch",
    )
    clip_bias_target: Target = opt(
        "update",
        "scale the gradient (the paper's equation) or the optimizer's step (the paper's text)",
        paper="gradient",
    )
    clip_bias_delta: float = opt(
        0.003,
        "threshold: above it the step is multiplied by delta / norm",
        paper="1 for the token norm, about 0.003 as rms",
        above=0,
    )
    gamma: float = opt(1.0, "discount", paper="1", low=0, high=1)
    gae_lambda: float = opt(1.0, "GAE lambda", paper="1", low=0, high=1)
    whiten_advantages: bool = opt(False, "normalize GAE advantages over the batch's action tokens")
    group_std: bool = opt(True, "divide group advantages by the group's standard deviation", paper="yes")
    kl_coef: float = opt(
        0.001,
        "weight of the KL to the reference model; 0 loads no reference",
        paper="0.001",
        low=0,
    )
    kl_type: KLKind = opt(
        "k2",
        "KL estimator. Use k2 in the loss: its gradient is the KL's, while that of k3 explodes on tokens that became "
        "unlikely. Use k1 in the reward, where it is unbiased",
    )
    kl_in: Literal["loss", "reward"] = opt("loss", "whether the KL is a term of the loss or of the reward")
    entropy_coef: float = opt(0.0, "weight of the entropy bonus", low=0)
    value_clip: float | None = opt(None, "clip range of the value loss; None: not clipped", above=0)


@dataclass(frozen=True)
class OptimConfig:
    """AdamW for actor and critic."""

    lr: float = opt(1e-6, "actor learning rate", paper="1e-6", above=0)
    critic_lr: float = opt(1e-5, "critic learning rate", paper="1e-5", above=0)
    warmup_ratio: float = opt(
        0.285,
        "share of all optimizer steps in which the actor's learning rate rises",
        paper="0.285",
        low=0,
        high=1,
    )
    critic_warmup_ratio: float = opt(0.015, "the same for the critic", paper="0.015", low=0, high=1)
    schedule: Literal["constant", "linear", "cosine"] = opt("constant", "after the warm-up")
    weight_decay: float = opt(0.0, "AdamW weight decay", low=0)
    beta1: float = opt(0.9, "AdamW", low=0, high=1)
    beta2: float = opt(0.999, "AdamW", low=0, high=1)
    adam_eps: float = opt(1e-8, "AdamW", above=0)
    max_grad_norm: float | None = opt(1.0, "gradient clipping; None: off", above=0)
    clip_before_normalization: bool = opt(
        False, "clip the gradient before it is scaled by the clipping bias, not after", paper="not said"
    )


@dataclass(frozen=True)
class UpdateConfig:
    """How a collected batch becomes optimizer steps: smaller mini-batches and more epochs are more off-policy."""

    steps: int = opt(150, "training steps (one rollout batch each)", paper="150 (medical, 2 epochs)", low=1)
    mini_batch_size: int = opt(
        256,
        "trajectories an optimizer step",
        paper="256 (128 in the off-policy study)",
        low=1,
    )
    micro_batch_size: int = opt(64, "trajectories a forward pass of the actor", paper="64", low=1)
    critic_micro_batch_size: int = opt(8, "the same for the critic", paper="8", low=1)
    log_prob_micro_batch_size: int = opt(128, "the same where no gradient is needed", paper="128", low=1)
    epochs: int = opt(1, "passes over each rollout batch", low=1)
    skip_without_signal: bool = opt(
        False, "no step where a mini-batch has no advantage: Adam's momentum would go on without a gradient"
    )
    target_kl: float | None = opt(
        None,
        "no more actor steps on a rollout batch once loss/approx_kl is above this; None: off",
        above=0,
    )
    critic_warmup_steps: int = opt(0, "first steps that train only the critic", low=0)


@dataclass(frozen=True)
class ModelConfig:
    """How the policy is loaded."""

    dtype: Literal["auto", "float32", "bfloat16"] = opt(
        "auto", "of forward passes, weights stay in float32; auto: bfloat16 on a GPU"
    )
    device: str = opt("auto", "auto, cpu, cuda, cuda:1")
    gradient_checkpointing: bool = opt(False, "trade time for memory", paper="on")
    chat_template: bool = opt(True, "wrap the prompt in the tokenizer's chat template if it has one")
    critic: str | None = opt(None, "folder the critic starts from; None: the policy's", paper="the policy's")
    lora_rank: int = opt(
        0, "LoRA through peft: rank of the adapters; 0 trains all weights", low=0, high=65536
    )
    lora_alpha: int = opt(32, "LoRA scale", low=1)
    threads: int = opt(0, "CPU threads of torch; 0 leaves torch's own choice", low=0, high=1024)
    tiny: dict[str, Any] = opt({}, "model: tiny only: hidden_size, num_layers, num_heads")


@dataclass(frozen=True)
class ClusterConfig:
    """Where ``engine: openrlhf`` puts things; the local engine reads none of it."""

    nodes: int = opt(1, "nodes", low=1)
    gpus_per_node: int = opt(8, "GPUs of each node, for training and sampling together", paper="8", low=1)
    vllm_engines: int = opt(2, "vLLM engines", low=1)
    vllm_tensor_parallel: int = opt(4, "GPUs of one vLLM engine", paper="4", low=1)
    vllm_memory: float = opt(0.6, "share of a GPU's memory that vLLM takes", paper="0.6", above=0, high=1)
    zero_stage: int = opt(
        3, "DeepSpeed ZeRO: 2 shards optimizer and gradients, 3 the weights too", low=2, high=3
    )
    offload_optimizer: bool = opt(True, "keep the optimizer's state in the memory of the host", paper="yes")
    offload_reference: bool = opt(True, "keep the reference model in the memory of the host", paper="yes")
    async_rollout: bool = opt(
        False,
        "sample the next batch while training; vLLM then has GPUs of its own, max_staleness is at least 1",
    )
    partial_rollout: bool = opt(False, "with async_rollout: go on sampling through a weight update")
    deadline_s: float = opt(
        3600.0,
        "without any step, checkpoint or start-up progress for this long the run is ended with an error",
        above=0,
    )
    flags: dict[str, Any] = opt(
        {},
        "more flags for OpenRLHF, as {ds.overlap_comm: true}; docs/scaling_out.md names those that are allowed",
    )


@dataclass(frozen=True)
class SftConfig:
    """Supervised fine-tuning on demonstrations: ``--stage sft``, and the cold start of ``model: tiny``."""

    demos: str | None = opt(
        None, "trajectories or chat messages as JSONL/Parquet; None: the task's scripted expert"
    )
    num_demos: int = opt(4000, "demonstrations drawn from the expert", low=1)
    steps: int = opt(300, "optimizer steps", low=1)
    batch_size: int = opt(24, "demonstrations a step", low=1)
    micro_batch_size: int = opt(24, "demonstrations a forward pass", low=1)
    lr: float = opt(1e-5, "peak learning rate, cosine to a tenth", above=0)
    warmup_ratio: float = opt(0.05, "share of steps with a rising rate", low=0, high=1)
    max_grad_norm: float = opt(1.0, "gradient clipping", above=0)


@dataclass(frozen=True)
class EvalConfig:
    """Greedy evaluation during training."""

    every: int = opt(10, "steps between evaluations; 0: only before and after training", low=0)
    split: str = opt("test", "split of the data evaluated on")
    num_examples: int = opt(256, "examples of each evaluation during training (a seeded sample)", low=1)
    num_examples_final: int = opt(1000, "examples of the first and last evaluation", low=1)
    patience: int = opt(
        0,
        "end the run after so many evaluations in a row below half of the best one; 0: never",
        low=0,
    )
    temperature: float = opt(0.0, "0 is greedy", low=0)
    search_off: bool = opt(False, "at the end evaluate once more with the search tool returning nothing")


@dataclass(frozen=True)
class AlarmConfig:
    """A detector that sees a collapse coming: limits of signals, and what to do beyond them.

    ``strain`` warns early and is the one to set; the others are means over three steps, for what is sudden.
    """

    action: Literal["off", "warn", "stop", "roll_back"] = opt(
        "warn",
        "warn: say so and write events.jsonl; stop: also save and end; roll_back: also go on from the last good "
        "checkpoint at a lower learning rate",
    )
    strain: float = opt(
        0.07,
        "root mean square of the tokens' log-ratios to the old policy, averaged over the last 50 steps or so, a step "
        "counting as at most 0.3; raise it for runs that are meant to be far off-policy",
        above=0,
    )
    ratio_tail: float = opt(0.5, "the same over three steps, uncapped", above=0)
    invalid_turns: float = opt(0.25, "share of valid turns below the best so far, over three steps", above=0)
    grad_norm: float = opt(
        15.0,
        "highest gradient norm, over the highest of the first steps, over three steps",
        above=0,
    )
    entropy: float = opt(
        2.0, "log of the entropy over that of the first steps, up or down, over three steps", above=0
    )
    roll_back_lr: float = opt(0.5, "factor on the learning rates after each roll_back", above=0, high=1)


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints hold all that an exact resume needs."""

    every: int = opt(10, "steps between checkpoints; 0: only at the end and on Ctrl-C", low=0)
    keep: int = opt(2, "newest checkpoints kept, besides the best one", low=1)


@dataclass(frozen=True)
class LogConfig:
    """Where metrics go besides metrics.jsonl."""

    tensorboard: bool = opt(True, "write TensorBoard events")
    wandb: str | None = opt(None, "Weights & Biases project; needs the wandb package")


def _about_algorithms() -> str:
    critic, group = (
        ", ".join(name for name, algorithm in ALGORITHMS.items() if algorithm.needs_critic is wanted)
        for wanted in (True, False)
    )
    return (
        f"{critic} train a critic; {group} need rollout.group_size >= 2. For an algorithm of your own give the path of "
        "a .py file or package.module:NAME"
    )


@dataclass(frozen=True)
class TrainConfig:
    """Train a tool-using language-model agent with SO-PPO, SO-GRPO or an algorithm they are compared with."""

    algo: str = opt("so_ppo", _about_algorithms())
    stage: Literal["rl", "sft"] = opt("rl", "rl: reinforcement learning; sft: supervised cold start only")
    engine: Literal["local", "openrlhf"] = opt(
        "local",
        "local: PyTorch on one machine; openrlhf: Ray, vLLM and DeepSpeed on many GPUs",
        paper="openrlhf",
    )
    task: str = opt("minihop", "a task's name, package.module:TASK, or a path to a .py file")
    task_args: dict[str, Any] = opt({}, "knobs of tasks that take some, such as task_args.hops=[1,2]")
    model: str = opt("tiny", "a transformers folder or hub name; tiny: built and cold-started for the task")
    data: str | None = opt(
        None, "training examples: a file, a folder, hf:owner/name; None: the task's embedded ones"
    )
    eval_data: str | None = opt(None, "evaluation examples; None: as data")
    split: str = opt("train", "split of data trained on")
    run_dir: str | None = opt(None, "run folder; None: runs/{config or task}-{algo or sft}-s{seed}")
    seed: int = opt(0, "one seed reproduces a CPU run bit for bit", low=0, high=MAX_SEED)
    limits: LimitsConfig = dataclasses.field(default_factory=LimitsConfig)
    search: SearchConfig = dataclasses.field(default_factory=SearchConfig)
    sampler: SamplerConfig = dataclasses.field(default_factory=SamplerConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    update: UpdateConfig = dataclasses.field(default_factory=UpdateConfig)
    hardware: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)
    sft: SftConfig = dataclasses.field(default_factory=SftConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    alarm: AlarmConfig = dataclasses.field(default_factory=AlarmConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)

    @property
    def algorithm(self) -> Algorithm:
        """What ``algo`` names, at the ratio level that ``loss.ratio`` asks for. Raises as ``find_algorithm`` does."""
        return find_algorithm(self.algo, self.loss.ratio)


TINY = "tiny"
