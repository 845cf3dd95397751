"""The training configuration: ``TrainConfig``, and its sections about what is learned and how.

Defaults are the paper's values (Appendix, "Implementation Details") where it gives them. YAML files under ``configs/``
hold differences only; the command line sets any field by its dotted name. ``--help all`` explains every
field. The other sections are in ``run_settings.py``.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Strict
from pydantic.dataclasses import dataclass

from sorl_env.errors import MAX_SEED
from sorl_env.turns.format import FormatName
from sorl_train.algorithms import (
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
from sorl_train.config.find_algorithm import find_algorithm
from sorl_train.config.run_settings import (
    CRITIC,
    CRITIC_OR_STATES,
    GROUPS,
    LOCAL,
    NORMALIZED,
    PLACE,
    PPO_CLIP,
    RESUMABLE,
    SAPO_GATE,
    SECTION_RULES,
    STATES,
    STEPS,
    TOTAL_REWARDS,
    TRAINED,
    TURNS,
    AlarmConfig,
    Bool,
    CheckpointConfig,
    ClusterConfig,
    CorrectionConfig,
    EvalConfig,
    Float,
    HardwareConfig,
    Int,
    LocalOnly,
    LogConfig,
    LoraConfig,
    NonNegativeFloat,
    NonNegativeInt,
    OverlongConfig,
    PositiveFloat,
    PositiveInt,
    ReplayConfig,
    RolloutConfig,
    Section,
    SftConfig,
    Share,
    Texts,
    TinyConfig,
    UserKeys,
    needs,
)

TINY = "tiny"  # the value of ``model`` that asks for a small policy built for the task


@dataclass(frozen=True, config=SECTION_RULES)
class LimitsConfig:
    """Limits of one trajectory. None keeps the task's own limit."""

    max_turns: PositiveInt | None = None
    """Turns of the policy, answer included. Paper: 3 tool turns, then an answer."""
    max_prompt_tokens: PositiveInt | None = None
    """Tokens of the prompt; a longer one fails. Paper: 2048."""
    max_new_tokens: PositiveInt | None = None
    """Tokens of one policy turn. Paper: 500."""
    max_observation_tokens: PositiveInt | None = None
    """Tokens of one environment reply. Paper: 500."""
    max_trajectory_tokens: Annotated[Int, Ge(2)] | None = None
    """Tokens of prompt, turns and observations together. Paper: 4096."""
    max_seconds: PositiveFloat | None = None
    """Wall-clock seconds of a trajectory."""
    max_reply_chars: PositiveInt | None = None
    """Characters of one tool reply; a longer one is cut before it is tokenized or stored, and its record says
    so. None: 16 for each token of max_observation_tokens."""


@dataclass(frozen=True, config=SECTION_RULES)
class SearchConfig:
    """The search tool of the question-answering tasks; timeout_s and retries hold for the calls of every tool."""

    corpus: Annotated[str | None, TRAINED] = None
    """Passages to search in this process; Search-R1's JSONL (.gz too) or an index folder. None: the task's own."""
    url: Annotated[str | None, RESUMABLE, TRAINED] = None
    """Address of a retrieval server; it has Search-R1's /retrieve. Several have commas between them. Excludes
    corpus. A server's access token is read from the environment variable SORL_SEARCH_TOKEN."""
    cache: Annotated[str | None, RESUMABLE] = None
    """SQLite file on a local disk that keeps the servers' replies between runs; None: kept in memory only."""
    top_k: PositiveInt = 3
    """Passages that a search returns. Paper: 3."""
    timeout_s: Annotated[PositiveFloat, RESUMABLE] = 30.0
    """Seconds for one tool call with its retries; then the trajectory is excluded."""
    retries: Annotated[NonNegativeInt, RESUMABLE] = 3
    """Further attempts after a failed one, within timeout_s."""


@dataclass(frozen=True, config=SECTION_RULES)
class SamplerConfig:
    """How the policy's turns are sampled."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature in training. Paper: 1.0."""
    top_p: Annotated[PositiveFloat, Le(1)] = 1.0
    """Nucleus sampling in training. Paper: 1.0."""
    max_concurrency: Annotated[PositiveInt, LOCAL] = 128
    """Trajectories in flight; each holds a row of the key-value cache."""
    backend: Annotated[Literal["transformers", "vllm"], LOCAL, PLACE] = "transformers"
    """transformers: any model, reproducible on a CPU; vllm: faster on a GPU. Paper: vllm."""
    max_mismatch: NonNegativeFloat | None = None
    """Stop the run when the log-probabilities of sampler and trainer differ by more than this many nats on
    average, or by ten times as much in one turn; 0: never. None: 0.001 with transformers in float32 and 0.1
    in bfloat16, 0.01 and 0.15 with vllm."""
    gpu_memory: Annotated[Share, needs("sampler.backend", "vllm"), LOCAL] = 0.4
    """Share of the GPU's memory for vllm: its weights and cache. Paper: 0.6."""


@dataclass(frozen=True, config=SECTION_RULES)
class LossConfig:
    """The objective. ``algo`` chooses the ratio level, the normalization and the kind of advantage."""

    ratio: Literal["auto", RatioLevel] = "auto"
    """Which tokens share an importance ratio; auto: as the algorithm has it."""
    clip_eps: Annotated[PositiveFloat, Lt(1)] = 0.2
    """PPO clip range: the lower bound of the ratio is 1 - clip_eps. Paper: 0.2."""
    clip_eps_high: PositiveFloat | None = None
    """Upper clip range, if it differs from clip_eps."""
    dual_clip: Annotated[Annotated[Float, Gt(1)] | None, PPO_CLIP] = None
    """Upper bound of the ratio for tokens with a negative advantage (Dual-Clip PPO), above 1; None: off."""
    sapo_tau_pos: Annotated[PositiveFloat, SAPO_GATE] = 1.0
    """Temperature of sapo's gate for tokens with a positive advantage."""
    sapo_tau_neg: Annotated[PositiveFloat, SAPO_GATE] = 1.05
    """The same for the others; a higher one closes the gate sooner."""
    aggregation: Aggregation = "trajectory_mean"
    """Mean over each trajectory's tokens and then over trajectories, or mean over all tokens. Paper:
    trajectory_mean."""
    clip_bias_norm: Annotated[ClipBiasNorm, NORMALIZED] = "rms"
    """Norm of the clipping bias that is compared with clip_bias_delta. Paper: L2; the paper does not say of
    which quantity."""
    clip_bias_target: Annotated[Target, NORMALIZED] = "update"
    """Scale the gradient (the paper's equation) or the optimizer's step (the paper's text). Paper: gradient."""
    clip_bias_delta: Annotated[PositiveFloat, NORMALIZED] = 0.003
    """Threshold: above it the step is multiplied by delta / norm. Paper: 1 for the token norm, about 0.003 as rms."""
    gamma: Annotated[Share, CRITIC_OR_STATES] = 1.0
    """Discount, for each token of GAE; for each turn in GAE over turns and in gigpo. Paper: 1."""
    gae_lambda: Annotated[Share, CRITIC] = 1.0
    """GAE lambda. Paper: 1."""
    gae_level: Annotated[GAELevel, CRITIC] = "token"
    """The step of GAE: each token, or each turn, whose tokens then share one advantage."""
    whiten_advantages: Annotated[Bool, CRITIC] = False
    """Normalize GAE advantages over the batch's action tokens."""
    group_std: Annotated[Bool, GROUPS] = True
    """Divide group advantages by the group's standard deviation. Paper: yes."""
    group_baseline: Annotated[GroupBaseline, GROUPS] = "mean"
    """What group advantages subtract: the mean of the group, or that of its other members (RLOO). Paper: mean."""
    group_level: Annotated[GroupLevel, TOTAL_REWARDS] = "trajectory"
    """What group advantages compare: total rewards of trajectories, or what a turn and the later ones earn."""
    turn_weight: Annotated[NonNegativeFloat, TURNS] = 1.0
    """Weight of a turn's own advantage beside that of its trajectory, in mt_grpo and gigpo."""
    anchor_state: Annotated[AnchorState, STATES] = "observation"
    """When two turns of gigpo started in the same state: after the same reply of the environment, or after
    the same replies in the same order (history)."""
    kl_coef: Annotated[NonNegativeFloat, STEPS] = 0.001
    """Weight of the KL to the reference model; 0 loads no reference. Paper: 0.001."""
    kl_type: Annotated[KLKind, needs("loss.kl_coef")] = "k2"
    """KL estimator. In the loss use k2, whose gradient is the KL's: that of k3 explodes on tokens that became unlikely,
    and that of k1 is 0 in expectation. k3_unbiased weighs k3 by the ratio, as DeepSeek-V3.2 does. In the reward use k1,
    which is unbiased there."""
    kl_in: Annotated[
        Literal["loss", "reward", "alone"],
        needs("loss.kl_coef"),
        LocalOnly(("loss", "reward"), ""),
    ] = "loss"
    """Whether the KL is a term of the loss or of the reward, or the whole loss, whatever the rewards (alone)."""
    kl_model: Annotated[str | None, needs("loss.kl_coef"), LOCAL] = None
    """Model that the KL is measured to: a better one with the same tokenizer is a teacher, for on-policy
    distillation, with a kl_coef of about 1. None: the policy that the run begins with."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    entropy_target: Annotated[PositiveFloat | None, needs("loss.entropy_coef")] = None
    """Give the bonus only to mini-batches sampled with a mean token entropy below this; None: to all."""
    value_clip: Annotated[PositiveFloat | None, CRITIC] = None
    """Clip range of the value loss; None: not clipped."""


@dataclass(frozen=True, config=SECTION_RULES)
class OptimConfig:
    """AdamW for policy (actor) and critic."""

    lr: Annotated[PositiveFloat, STEPS] = 1e-6
    """Learning rate of the actor. Paper: 1e-6."""
    critic_lr: Annotated[PositiveFloat, CRITIC] = 1e-5
    """Learning rate of the critic. Paper: 1e-5."""
    warmup_ratio: Share = 0.285
    """Share of optimizer steps in which the actor's rate rises. Paper: 0.285."""
    critic_warmup_ratio: Annotated[Share, CRITIC] = 0.015
    """The same for the critic. Paper: 0.015."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of AdamW."""
    beta1: Annotated[NonNegativeFloat, Lt(1)] = 0.9
    """Decay of AdamW's first moment."""
    beta2: Annotated[NonNegativeFloat, Lt(1)] = 0.999
    """Decay of AdamW's second moment."""
    adam_eps: PositiveFloat = 1e-8
    """Epsilon of AdamW."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Largest norm of the gradient; None: it is not clipped."""


@dataclass(frozen=True, config=SECTION_RULES)
class UpdateConfig:
    """How a rollout batch becomes optimizer steps: smaller mini-batches and more epochs are more off-policy."""

    steps: Annotated[PositiveInt, RESUMABLE, STEPS] = 150
    """Training steps, each with one rollout batch. Paper: 150 (medical, 2 epochs)."""
    mini_batch_size: Annotated[PositiveInt, STEPS] = 256
    """Trajectories in one optimizer step. Paper: 256 (128 in the off-policy study)."""
    micro_batch_size: PositiveInt = 64
    """Trajectories in one forward pass of the actor. Paper: 64."""
    critic_micro_batch_size: Annotated[PositiveInt, CRITIC, LOCAL] = 8
    """The same for the critic. Paper: 8."""
    log_prob_micro_batch_size: PositiveInt = 128
    """The same where no gradient is needed. Paper: 128."""
    epochs: Annotated[PositiveInt, STEPS] = 1
    """Passes over each rollout batch."""
    skip_without_signal: Bool = False
    """Take no optimizer step when all advantages of a mini-batch are 0; Adam would move on from its momentum alone."""
    target_kl: PositiveFloat | None = None
    """Take one more actor step on a batch at this mean token KL to the weights that began it, then none; None: off."""
    trust_kl: Annotated[PositiveFloat | None, STEPS] = None
    """Trust region: limit of a batch's token KL. It is the mean since the batch began; weights beyond it are moved
    back, and later steps are smaller (0.01 is a good limit). None: off."""
    trust_max_scale: Annotated[Float, Ge(1), needs("update.trust_kl")] = 1.0
    """Upper bound of the learning-rate multiplier; 1000 lets the trust region find the rate."""
    critic_warmup_steps: Annotated[NonNegativeInt, CRITIC] = 0
    """Train only the critic in this many first training steps."""


@dataclass(frozen=True, config=SECTION_RULES)
class TrainConfig:
    """Train a tool-using language-model agent with SO-PPO, SO-GRPO or an algorithm they are compared with."""

    algo: Annotated[str, TRAINED] = "so_ppo"
    """Algorithm; for one of your own the path of a .py file, or package.module:NAME."""
    stage: Annotated[Literal["rl", "sft"], TRAINED, LocalOnly(("rl",), "")] = "rl"
    """rl: reinforcement learning; sft: supervised fine-tuning alone."""
    engine: Annotated[Literal["local", "openrlhf"], PLACE] = "local"
    """local: PyTorch on one machine; openrlhf: Ray, vLLM and DeepSpeed on many GPUs. Paper: openrlhf."""
    task: Annotated[str, TRAINED] = "minihop"
    """Name, package.module:TASK, or a path."""
    task_args: UserKeys = field(default_factory=dict)
    """Arguments of the task, if it takes any: --task_args.hops "[1, 2]"."""
    model: Annotated[str, TRAINED] = "tiny"
    """Folder or hub name of a transformers model; tiny: a small one, built and trained for the task."""
    critic: Annotated[str | None, CRITIC] = None
    """Folder of the model that the critic starts from; None: the policy's. Paper: the policy's."""
    format: FormatName = "tags"
    """How turns are written. tags: blocks as in the paper; tool_calls: messages of the model's own chat
    template. Paper: tags."""
    chat_template: Bool = True
    """Wrap the prompt in the tokenizer's chat template, if it has one."""
    data: Annotated[str | None, TRAINED] = None
    """Training examples: file, folder or hf:OWNER/NAME; None: the task's embedded ones."""
    eval_data: str | None = None
    """Evaluation examples; None: the same source as data."""
    split: str = "train"
    """Split of the training data."""
    run_dir: Annotated[str | None, RESUMABLE, PLACE] = None
    """Run folder; None: runs/{config or task}-{algo or sft}-s{seed}."""
    seed: Annotated[int, Strict(), Ge(0), Le(MAX_SEED), TRAINED] = 0
    """Seed of all randomness; a CPU run repeats bit for bit."""
    tools: Texts | None = None
    """Further tools, described at the end of the prompt: mcp:URL or mcp:COMMAND names those of an MCP server that all
    episodes share, mcp+episode:URL or mcp+episode:COMMAND those of one that keeps state."""
    limits: Section[LimitsConfig] = LimitsConfig()
    search: Section[SearchConfig] = SearchConfig()
    sampler: Section[SamplerConfig] = SamplerConfig()
    rollout: Section[RolloutConfig] = RolloutConfig()
    replay: Section[ReplayConfig] = ReplayConfig()
    overlong: Section[OverlongConfig] = OverlongConfig()
    loss: Section[LossConfig] = LossConfig()
    correction: Section[CorrectionConfig] = CorrectionConfig()
    optim: Section[OptimConfig] = OptimConfig()
    update: Section[UpdateConfig] = UpdateConfig()
    lora: Section[LoraConfig] = LoraConfig()
    tiny: Section[TinyConfig] = TinyConfig()
    hardware: Section[HardwareConfig] = HardwareConfig()
    cluster: Annotated[Section[ClusterConfig], needs("engine", "openrlhf")] = ClusterConfig()
    sft: Section[SftConfig] = SftConfig()
    eval: Section[EvalConfig] = EvalConfig()
    alarm: Section[AlarmConfig] = AlarmConfig()
    checkpoint: Section[CheckpointConfig] = CheckpointConfig()
    log: Section[LogConfig] = LogConfig()

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
