"""The training configuration: ``TrainConfig``, and its sections about what is learned and how.

Defaults are the paper's values (Appendix, "Implementation Details") where it gives them. YAML files under ``configs/``
hold differences only; the command line sets any field by its dotted name. ``--help`` prints the text of every field.
The other sections are in ``rollout_settings.py``, ``model_settings.py`` and ``run_settings.py``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from sorl_env.bounds import MAX_SEED
from sorl_env.turn_format import FormatName
from sorl_train.algorithms import (
    ALGORITHMS,
    Aggregation,
    Algorithm,
    AnchorState,
    ClipBiasNorm,
    GAELevel,
    GroupBaseline,
    GroupLevel,
    KLKind,
    RatioLevel,
    Target,
)
from sorl_train.config.field import opt
from sorl_train.config.find_algorithm import find_algorithm
from sorl_train.config.model_settings import LoraConfig, SftConfig, TinyConfig
from sorl_train.config.rollout_settings import (
    CorrectionConfig,
    OverlongConfig,
    ReplayConfig,
    RolloutConfig,
)
from sorl_train.config.run_settings import (
    AlarmConfig,
    CheckpointConfig,
    ClusterConfig,
    EvalConfig,
    HardwareConfig,
    LogConfig,
)

TINY = "tiny"  # the value of ``model`` that asks for a small policy built for the task


@dataclass(frozen=True)
class LimitsConfig:
    """Limits of one trajectory. None keeps the task's own limit."""

    max_turns: int | None = opt(
        None, "turns of the policy, answer included", paper="3 tool turns, then an answer", low=1
    )
    max_prompt_tokens: int | None = opt(None, "tokens of the prompt; a longer one fails", paper="2048", low=1)
    max_new_tokens: int | None = opt(None, "tokens of one policy turn", paper="500", low=1)
    max_observation_tokens: int | None = opt(None, "tokens of one environment reply", paper="500", low=1)
    max_trajectory_tokens: int | None = opt(
        None, "tokens of prompt, turns and observations together", paper="4096", low=2
    )
    max_seconds: float | None = opt(None, "wall-clock seconds of a trajectory", above=0)
    max_reply_chars: int | None = opt(
        None,
        "characters of one tool reply; a longer one is cut before it is tokenized or stored, and its record says so. "
        "None: 16 for each token of max_observation_tokens",
        low=1,
    )


@dataclass(frozen=True)
class SearchConfig:
    """The search tool of the question-answering tasks; timeout_s and retries hold for the calls of every tool."""

    corpus: str | None = opt(
        None,
        "passages to search in this process: Search-R1's JSONL (.gz too) or an index folder; None: the task's own",
    )
    url: str | None = opt(
        None,
        "address of a retrieval server with Search-R1's /retrieve, or several with commas between them; excludes "
        "corpus. A server's access token is read from the environment variable SORL_SEARCH_TOKEN",
    )
    cache: str | None = opt(
        None,
        "SQLite file on a local disk that keeps the servers' replies between runs; None: kept in memory only",
    )
    top_k: int = opt(3, "passages that a search returns", paper="3", low=1)
    timeout_s: float = opt(
        30.0, "seconds for one tool call with its retries; then the trajectory is excluded", above=0
    )
    retries: int = opt(3, "further attempts after a failed one, within timeout_s", low=0)


@dataclass(frozen=True)
class SamplerConfig:
    """How the policy's turns are sampled."""

    temperature: float = opt(1.0, "sampling temperature in training", paper="1.0", above=0)
    top_p: float = opt(1.0, "nucleus sampling in training", paper="1.0", above=0, high=1)
    max_concurrency: int = opt(128, "trajectories in flight; each holds a row of the key-value cache", low=1)
    backend: Literal["transformers", "vllm"] = opt(
        "transformers", "transformers: any model, reproducible on a CPU; vllm: faster on a GPU", paper="vllm"
    )
    max_mismatch: float | None = opt(
        None,
        "stop the run when the log-probabilities of sampler and trainer differ by more than this many nats on average, "
        "or by ten times as much in one turn; 0: never. None: 0.001 with transformers in float32 and 0.1 in bfloat16, "
        "0.01 and 0.15 with vllm",
        low=0,
    )
    gpu_memory: float = opt(
        0.4, "share of the GPU's memory for vllm: its weights and cache", paper="0.6", low=0, high=1
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
    sapo_tau_pos: float = opt(1.0, "temperature of sapo's gate for tokens with a positive advantage", above=0)
    sapo_tau_neg: float = opt(1.05, "the same for the others; a higher one closes the gate sooner", above=0)
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
    gamma: float = opt(
        1.0,
        "discount, for each token of GAE; for each turn in GAE over turns and in gigpo",
        paper="1",
        low=0,
        high=1,
    )
    gae_lambda: float = opt(1.0, "GAE lambda", paper="1", low=0, high=1)
    gae_level: GAELevel = opt(
        "token", "the step of GAE: each token, or each turn, whose tokens then share one advantage"
    )
    whiten_advantages: bool = opt(False, "normalize GAE advantages over the batch's action tokens")
    group_std: bool = opt(True, "divide group advantages by the group's standard deviation", paper="yes")
    group_baseline: GroupBaseline = opt(
        "mean",
        "what group advantages subtract: the mean of the group, or that of its other members (RLOO)",
        paper="mean",
    )
    group_level: GroupLevel = opt(
        "trajectory",
        "what group advantages compare: total rewards of trajectories, or what a turn and the later ones earn",
    )
    turn_weight: float = opt(
        1.0, "weight of a turn's own advantage beside that of its trajectory, in mt_grpo and gigpo", low=0
    )
    anchor_state: AnchorState = opt(
        "observation",
        "when two turns of gigpo started in the same state: after the same reply of the environment, or after the same "
        "replies in the same order (history)",
    )
    kl_coef: float = opt(
        0.001,
        "weight of the KL to the reference model; 0 loads no reference",
        paper="0.001",
        low=0,
    )
    kl_type: KLKind = opt(
        "k2",
        "KL estimator. Use k2 in the loss: its gradient is the KL's, while that of k3 explodes on tokens that became "
        "unlikely, and that of k1 is 0 in expectation. The reward takes k1, which is unbiased there",
    )
    kl_in: Literal["loss", "reward"] = opt("loss", "whether the KL is a term of the loss or of the reward")
    entropy_coef: float = opt(0.0, "weight of the entropy bonus", low=0)
    value_clip: float | None = opt(None, "clip range of the value loss; None: not clipped", above=0)


@dataclass(frozen=True)
class OptimConfig:
    """AdamW for policy (actor) and critic."""

    lr: float = opt(1e-6, "learning rate of the actor", paper="1e-6", above=0)
    critic_lr: float = opt(1e-5, "learning rate of the critic", paper="1e-5", above=0)
    warmup_ratio: float = opt(
        0.285, "share of optimizer steps in which the actor's rate rises", paper="0.285", low=0, high=1
    )
    critic_warmup_ratio: float = opt(0.015, "the same for the critic", paper="0.015", low=0, high=1)
    schedule: Literal["constant", "linear", "cosine"] = opt("constant", "learning rate after the warm-up")
    weight_decay: float = opt(0.0, "weight decay of AdamW", low=0)
    beta1: float = opt(0.9, "decay of AdamW's first moment", low=0, high=1)
    beta2: float = opt(0.999, "decay of AdamW's second moment", low=0, high=1)
    adam_eps: float = opt(1e-8, "epsilon of AdamW", above=0)
    max_grad_norm: float | None = opt(1.0, "largest norm of the gradient; None: it is not clipped", above=0)


@dataclass(frozen=True)
class UpdateConfig:
    """How a rollout batch becomes optimizer steps: smaller mini-batches and more epochs are more off-policy."""

    steps: int = opt(
        150, "training steps, each with one rollout batch", paper="150 (medical, 2 epochs)", low=1
    )
    mini_batch_size: int = opt(
        256, "trajectories in one optimizer step", paper="256 (128 in the off-policy study)", low=1
    )
    micro_batch_size: int = opt(64, "trajectories in one forward pass of the actor", paper="64", low=1)
    critic_micro_batch_size: int = opt(8, "the same for the critic", paper="8", low=1)
    log_prob_micro_batch_size: int = opt(128, "the same where no gradient is needed", paper="128", low=1)
    epochs: int = opt(1, "passes over each rollout batch", low=1)
    skip_without_signal: bool = opt(
        False,
        "take no optimizer step when all advantages of a mini-batch are 0; Adam would move on from its momentum alone",
    )
    target_kl: float | None = opt(
        None,
        "take no more actor steps on a batch at this mean token KL to the weights that began it; None: off",
        above=0,
    )
    trust_kl: float | None = opt(
        None,
        "trust region: weights whose mean token KL to those that began the batch exceeds this are moved back, and "
        "later steps are smaller (0.01 is a good limit); None: off",
        above=0,
    )
    trust_max_scale: float = opt(
        1.0,
        "the trust region scales the learning rate by at most this; with 1000 the rate need not be known",
        low=1,
    )
    critic_warmup_steps: int = opt(0, "train only the critic in this many first training steps", low=0)


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
    stage: Literal["rl", "sft"] = opt("rl", "rl: reinforcement learning; sft: supervised fine-tuning alone")
    engine: Literal["local", "openrlhf"] = opt(
        "local",
        "local: PyTorch on one machine; openrlhf: Ray, vLLM and DeepSpeed on many GPUs",
        paper="openrlhf",
    )
    task: str = opt("minihop", "name of a task, package.module:TASK, or path of a .py file")
    task_args: dict[str, Any] = opt({}, 'arguments of the task, if it takes any: --task_args.hops "[1, 2]"')
    model: str = opt(
        "tiny",
        "folder of a transformers model or its hub name; tiny: a small one, built and trained for the task",
    )
    critic: str | None = opt(
        None, "folder of the model that the critic starts from; None: the policy's", paper="the policy's"
    )
    format: FormatName = opt(
        "tags",
        "how turns are written. tags: blocks as in the paper; tool_calls: messages of the model's own chat template",
        paper="tags",
    )
    chat_template: bool = opt(True, "wrap the prompt in the tokenizer's chat template, if it has one")
    data: str | None = opt(
        None, "training examples: a file, a folder or hf:OWNER/NAME; None: the task's embedded ones"
    )
    eval_data: str | None = opt(None, "evaluation examples; None: the same source as data")
    split: str = opt("train", "split of the training data")
    run_dir: str | None = opt(None, "run folder; None: runs/{config or task}-{algo or sft}-s{seed}")
    seed: int = opt(0, "seed of all randomness; a CPU run repeats bit for bit", low=0, high=MAX_SEED)
    tools: list[str] | None = opt(
        None,
        "further tools beside the task's, described at the end of the prompt: mcp:URL or mcp:COMMAND names those of an "
        "MCP server that all episodes share, mcp+episode:URL or mcp+episode:COMMAND those of one that keeps state",
    )
    limits: LimitsConfig = dataclasses.field(default_factory=LimitsConfig)
    search: SearchConfig = dataclasses.field(default_factory=SearchConfig)
    sampler: SamplerConfig = dataclasses.field(default_factory=SamplerConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    replay: ReplayConfig = dataclasses.field(default_factory=ReplayConfig)
    overlong: OverlongConfig = dataclasses.field(default_factory=OverlongConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    correction: CorrectionConfig = dataclasses.field(default_factory=CorrectionConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    update: UpdateConfig = dataclasses.field(default_factory=UpdateConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    tiny: TinyConfig = dataclasses.field(default_factory=TinyConfig)
    hardware: HardwareConfig = dataclasses.field(default_factory=HardwareConfig)
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

    @property
    def critic_warmup_steps(self) -> int:
        """Training steps that train the critic alone; 0 without one, where they would train nothing."""
        return self.update.critic_warmup_steps if self.algorithm.needs_critic else 0

    @property
    def anchor_state(self) -> AnchorState | None:
        """When two turns started in the same state; None unless the algorithm compares states."""
        return self.loss.anchor_state if self.algorithm.advantage == "state_group" else None
