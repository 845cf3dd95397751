"""Which curves the report draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

_TURNS = (
    8  # as in sorl_train.learner.diagnostics, whose import would cost a report the seconds that torch takes
)
# name, title and text of each section that has figures over training steps, in the order of the page
SECTIONS = (
    ("outcome", "Outcome", "What was learned, and whether it was kept."),
    ("gradient", "Gradient and clipping bias", "An exploding norm announces a collapse; clipping adds its bias."),
    ("clipping", "Clipping", "Which of the policy's tokens the loss clips away."),
    ("off-policy", "Off-policy", "How far the policy is from the one that sampled the data."),
    ("policy", "Policy and advantages", ""),
    ("time", "Time", ""),
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """One plot over training steps.

    Attributes:
        id: of its element in the page.
        about: what to look for, in a sentence.
        curves: metric names with what to call them; the first one is shown where several groups share a plot.
        axis: ``share`` runs from 0 to 1, ``log`` breaks a line where a value is not positive.
        section: of the page; ``more`` is the collection of all other metrics.
        delta: draw the lower bound of the clipping-bias norm, from which on it scales the step down, if all runs
            that normalize have the same.
        alarms: mark the steps at which a run raised an alarm.
        holds: a run that ended early counts on as it was last, where it is one of a group: a collapsed run that was
            stopped would otherwise lift the median by its absence.
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


FIGURES = (
    Figure(
        "success",
        "Success",
        "Greedy on held-out questions, and sampled on the training batch.",
        {"eval/success": "held out, greedy", "rollout/success": "training, sampled"},
        "share",
        "outcome",
        alarms=True,
        holds=True,
    ),
    Figure(
        "valid-turns",
        "Valid actions",
        "Share of turns in the right format; it falls before a collapse.",
        {"eval/valid_turn_rate": "held out, greedy", "rollout/valid_turn_rate": "training, sampled"},
        "share",
        "outcome",
        holds=True,
    ),
    Figure(
        "reward",
        "Reward",
        "Of the step's trajectories.",
        {"rollout/reward_mean": "mean", "rollout/reward_std": "standard deviation"},
        section="outcome",
        holds=True,
    ),
    Figure(
        "grad-norm",
        "Gradient norm",
        "Of the policy, before gradient clipping.",
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
        "In several norms; none where nothing was clipped. Above delta, the dashed line, SO scales the step down.",
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
        "A factor of 1 leaves a step as it is. Means over the step's mini-batches.",
        {"loss/normalizer": "factor", "loss/normalized_frac": "share normalized"},
        "share",
        "gradient",
    ),
    Figure(
        "clip-frac",
        "Clip fraction",
        "Share of the policy's tokens whose ratio was clipped.",
        {"loss/clip_frac": "clipped"},
        section="clipping",
    ),
    Figure(
        "clip-turn",
        "Clip fraction by turn",
        "Of the tokens of each turn; the last one counts all later turns, too.",
        {f"loss/clip_frac_turn{turn}": f"turn {turn + 1}" for turn in range(_TURNS)},
        section="clipping",
    ),
    Figure(
        "clip-class",
        "Clip fraction by kind of token",
        "Tags, reasoning, queries and answers.",
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
        "Quantiles of log(new / old) over the policy's tokens; 0 is on policy.",
        {"loss/log_ratio_p99": "99%", "loss/log_ratio_p50": "median", "loss/log_ratio_p01": "1%"},
        section="off-policy",
    ),
    Figure(
        "ess",
        "Effective sample size",
        "Of the ratios at three levels, as a share; 1 is on policy.",
        {"loss/ess_token": "token", "loss/ess_turn": "turn", "loss/ess_sequence": "sequence"},
        "share",
        "off-policy",
    ),
    Figure(
        "kl",
        "KL divergence",
        "How far the policy moved in the update, and from the reference model.",
        {
            "loss/approx_kl": "to the old policy",
            "loss/ref_kl": "to the reference",
            "rollout/mismatch_kl": "sampler to trainer",
        },
        section="off-policy",
    ),
    Figure(
        "advantage",
        "Advantage",
        "Over the tokens of the loss.",
        {"loss/advantage_mean": "mean", "loss/advantage_std": "standard deviation"},
        section="policy",
    ),
    Figure(
        "entropy",
        "Entropy",
        "Of the policy at its own tokens, in nats; it shrinks as the policy settles.",
        {"loss/entropy": "entropy"},
        section="policy",
    ),
    Figure(
        "length",
        "Length",
        "Tokens the policy samples for a trajectory.",
        {"rollout/response_tokens": "tokens"},
        section="policy",
    ),
    Figure(
        "step-time",
        "Seconds a step",
        "Wall time of each step and of its longest parts.",
        {"time/step_s": "step", "time/rollout_s": "rollout", "time/update_s": "update"},
        section="time",
    ),
    Figure(
        "tokens-per-s",
        "Tokens a second",
        "Sampled by the policy.",
        {"time/rollout_tokens_per_s": "during rollouts", "time/tokens_per_s": "over the whole step"},
        section="time",
    ),
)
