"""The figures of the report: which metrics they show, and what to look for in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

_TURNS = 8  # as in sorl_train.learner.diagnostics, which is not imported because it imports torch
# name, title and text of each section of figures, in the order of the page
SECTIONS = (
    ("outcome", "Outcome", "What the policy learned, and whether it kept it."),
    ("gradient", "Gradient and clipping bias", "An exploding norm announces a collapse. Clipping biases the gradient."),
    ("clipping", "Clipping", "For which of the policy's tokens the loss clips the ratio."),
    ("off-policy", "Off-policy", "How far the policy has moved from the policy that sampled the data."),
    ("policy", "Policy and advantages", ""),
    ("time", "Time", ""),
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """One plot over training steps.

    Attributes:
        id: of its element in the page.
        about: what it shows or what to look for, in a sentence.
        curves: metric names with their labels; only the first is shown where several groups share a plot.
        axis: ``share`` runs from 0 to 1; ``log`` interrupts a line where a value is not positive.
        section: of the page; ``more`` collects all other metrics.
        delta: draw ``loss.clip_bias_delta``, the norm above which steps are scaled down, if it is the same in all runs
            that normalize.
        alarms: mark the steps with a collapse alarm.
        holds: in a group, keep the last value of a run that ended early. Otherwise the median would rise when a
            collapsed run is stopped.
        optional: of something that most runs do not use, so the page does not say that it is missing.
    """

    id: str
    title: str
    about: str
    curves: Mapping[str, str]
    axis: Literal["linear", "log", "share"] = "linear"
    section: str = "more"
    delta: bool = False
    alarms: bool = False
    holds: bool = False
    optional: bool = False


FIGURES = (
    Figure(
        "success",
        "Success",
        "Share of questions answered correctly: greedy on held-out questions, sampled on the training batch.",
        {"eval/success": "held out, greedy", "rollout/success": "training, sampled"},
        "share",
        "outcome",
        alarms=True,
        holds=True,
    ),
    Figure(
        "valid-turns",
        "Valid turns",
        "Share of turns in the right format. It falls before a collapse.",
        {"eval/valid_turn_rate": "held out, greedy", "rollout/valid_turn_rate": "training, sampled"},
        "share",
        "outcome",
        holds=True,
    ),
    Figure(
        "reward",
        "Reward",
        "Mean and spread over the trajectories of the step.",
        {"rollout/reward_mean": "mean", "rollout/reward_std": "standard deviation"},
        section="outcome",
        holds=True,
    ),
    Figure(
        "grad-norm",
        "Gradient norm",
        "Norm of the policy's gradient, before gradient clipping.",
        {
            "loss/grad_norm": "as computed",
            "loss/grad_norm_max": "largest of the step",
            "loss/grad_norm_normalized": "normalized",
        },
        "log",
        "gradient",
    ),
    Figure(
        "clip-bias",
        "Clipping bias",
        "The bias that clipping adds, in several norms. Above the dashed line (delta), SO scales the step down.",
        {
            "loss/clip_bias_norm": "in use",
            "loss/clip_bias_scalar": "scalar",
            "loss/clip_bias_trajectory": "trajectory",
            "loss/clip_bias_token": "token",
            "loss/clip_bias_token_mean": "token mean",
            "loss/clip_bias_logit": "logit",
        },
        "log",
        "gradient",
        delta=True,
    ),
    Figure(
        "normalizer",
        "Normalization",
        "The factor on the step (1 leaves it as it is) and the share of mini-batches that were scaled down.",
        {"loss/normalizer": "mean factor", "loss/normalized_frac": "share scaled down"},
        "share",
        "gradient",
    ),
    Figure(
        "clip-frac",
        "Clip fraction",
        "Share of the policy's tokens whose importance ratio was clipped.",
        {"loss/clip_frac": "clipped"},
        section="clipping",
    ),
    Figure(
        "clip-turn",
        "Clip fraction by turn",
        "Share of clipped tokens in each turn; the last one includes all later turns.",
        {f"loss/clip_frac_turn{turn}": f"turn {turn + 1}" for turn in range(_TURNS)},
        section="clipping",
    ),
    Figure(
        "clip-class",
        "Clip fraction by kind of token",
        "Share of clipped tokens among tags, reasoning, queries and answers.",
        {
            "loss/clip_frac_tag": "tags",
            "loss/clip_frac_reasoning": "reasoning",
            "loss/clip_frac_query": "queries",
            "loss/clip_frac_answer": "answers",
            "loss/clip_frac_other": "other",
        },
        section="clipping",
    ),
    Figure(
        "log-ratio",
        "Log ratio",
        "Quantiles over the policy's tokens of log(new probability / old probability); 0 is on policy.",
        {"loss/log_ratio_p99": "99%", "loss/log_ratio_p50": "median", "loss/log_ratio_p01": "1%"},
        section="off-policy",
    ),
    Figure(
        "ess",
        "Effective sample size",
        "Of the importance ratios per token, turn and trajectory, as a share of all; 1 is on policy.",
        {"loss/ess_token": "token", "loss/ess_turn": "turn", "loss/ess_sequence": "sequence"},
        "share",
        "off-policy",
    ),
    Figure(
        "kl",
        "KL divergence",
        "How far the policy moved in the step, is from the reference model, and differs from its sampler.",
        {
            "loss/approx_kl": "from the old policy",
            "loss/ref_kl": "from the reference",
            "rollout/mismatch_kl": "sampler from trainer",
        },
        section="off-policy",
    ),
    Figure(
        "trust-kl",
        "Trust region",
        "How far each batch took the policy, and the furthest it was before steps were taken back.",
        {"loss/trust_kl": "KL at the end of the batch", "loss/trust_kl_max": "largest in the batch"},
        "log",
        "off-policy",
        optional=True,
    ),
    Figure(
        "trust-scale",
        "Trust region: scale of the learning rate",
        "It shrinks where steps are taken back, and grows after batches that end near where they began.",
        {"loss/trust_scale": "scale"},
        "log",
        "off-policy",
        optional=True,
    ),
    Figure(
        "trust-moves",
        "Trust region: moves back",
        "How often weights were moved back towards those that began the batch.",
        {"loss/trust_moves_back": "moves"},
        section="off-policy",
        optional=True,
    ),
    Figure(
        "correction",
        "Correction for the sampler: what was cut",
        "Shares of the loss that the correction's limits and its sequence mask took away; the rest keeps its weight.",
        {
            "loss/correction_cut_frac": "truncated or set to 0 by the limits",
            "loss/correction_zero_frac": "tokens of weight 0",
            "loss/correction_mask_frac": "trajectories masked",
        },
        "share",
        "off-policy",
        optional=True,
    ),
    Figure(
        "correction-weight",
        "Correction for the sampler: mean weight",
        "Mean over the tokens of the loss; 1 where sampler and trainer agree.",
        {"loss/correction_mean": "mean weight"},
        section="off-policy",
        optional=True,
    ),
    Figure(
        "replay",
        "Replay",
        "Share of past trajectories in the batch. Without any, no question came back, or none needed a past success.",
        {"rollout/replay_share": "replayed"},
        "share",
        "off-policy",
        optional=True,
    ),
    Figure(
        "replay-age",
        "Replay: age",
        "Training steps between the weights that sampled the replayed trajectories and those that learn from them.",
        {"rollout/replay_age_mean": "mean", "rollout/replay_age_max": "oldest"},
        section="off-policy",
        optional=True,
    ),
    Figure(
        "replay-size",
        "Replay: trajectories in the buffer",
        "Kept for later steps; the oldest are dropped at replay.size and at replay.max_age.",
        {"rollout/replay_size": "trajectories"},
        section="off-policy",
        optional=True,
    ),
    Figure(
        "advantage",
        "Advantage",
        "Mean and spread over the tokens of the loss.",
        {"loss/advantage_mean": "mean", "loss/advantage_std": "standard deviation"},
        section="policy",
    ),
    Figure(
        "entropy",
        "Entropy",
        "Of the policy at its own tokens, in nats. It shrinks as the policy becomes certain.",
        {"loss/entropy": "entropy"},
        section="policy",
    ),
    Figure(
        "length",
        "Length",
        "Tokens that the policy samples per trajectory.",
        {"rollout/response_tokens": "tokens"},
        section="policy",
    ),
    Figure(
        "dynamic",
        "Dynamic sampling",
        "Rollouts drawn until the batch was full of groups with a signal, and those that were trained on.",
        {"rollout/dynamic_drawn": "drawn", "rollout/dynamic_kept": "kept"},
        section="policy",
        optional=True,
    ),
    Figure(
        "overlong",
        "Overlong trajectories",
        "Shares of the trajectories that were punished for their length, or filtered by their stop reason.",
        {
            "rollout/overlong_punished_frac": "punished",
            "rollout/overlong_filtered_frac": "not in the loss",
        },
        "share",
        "policy",
        optional=True,
    ),
    Figure(
        "overlong-reward",
        "Overlong reward",
        "What the punishment of long trajectories added to the reward, on average.",
        {"reward/overlong": "reward"},
        section="policy",
        optional=True,
    ),
    Figure(
        "step-time",
        "Seconds per step",
        "Wall time of each step and of its longest parts.",
        {"time/step_s": "step", "time/rollout_s": "rollout", "time/update_s": "update"},
        section="time",
    ),
    Figure(
        "tokens-per-s",
        "Tokens per second",
        "Tokens that the policy samples.",
        {"time/rollout_tokens_per_s": "during rollouts", "time/tokens_per_s": "over the whole step"},
        section="time",
    ),
)
