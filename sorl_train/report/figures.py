"""The report's sections, the figures of each, and the metrics that a figure draws.

A metric that no figure draws gets a figure of its own in the page's last section, so what only some runs log, such as
the age of replayed trajectories, needs no entry here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Figure:
    """One plot over training steps.

    Attributes:
        about: what it shows or what to look for, in a sentence.
        metrics: names with their labels; only the first is shown where several groups share a plot.
        axis: ``share`` runs from 0 to 1; ``log`` interrupts a line where a value is not positive.
        marks: ``alarms`` marks the steps with a collapse alarm; ``delta`` draws ``loss.clip_bias_delta``, the norm
            above which steps are scaled down, if it is the same in all runs that normalize.
    """

    title: str
    about: str
    metrics: Mapping[str, str]
    axis: Literal["linear", "log", "share"] = "linear"
    marks: Literal["", "alarms", "delta"] = ""

    @property
    def id(self) -> str:
        """Of its element in the page."""
        return self.title.lower().replace(" ", "-").replace("/", "-")


@dataclass(frozen=True)
class Section:
    """Figures under one heading. In ``outcome`` the line of a group keeps the last value of a run that ended early:
    otherwise its median would rise when a collapsed run is stopped."""

    name: str
    title: str
    about: str
    figures: tuple[Figure, ...]


_OUTCOME = (
    Figure(
        "Success",
        "Share of questions answered correctly: greedy on held-out questions, sampled on the training batch.",
        {"eval/success": "held out, greedy", "rollout/success": "training, sampled"},
        "share",
        "alarms",
    ),
    Figure(
        "Valid turns",
        "Share of turns in the right format. It falls before a collapse.",
        {"eval/valid_turn_rate": "held out, greedy", "rollout/valid_turn_rate": "training, sampled"},
        "share",
    ),
    Figure(
        "Reward",
        "Mean and spread over the trajectories of the step.",
        {"rollout/reward_mean": "mean", "rollout/reward_std": "standard deviation"},
    ),
)
_BIAS_NORMS = ("scalar", "token", "logit")
_GRADIENT = (
    Figure(
        "Gradient norm",
        "Norm of the policy's gradient, before gradient clipping.",
        {
            "loss/grad_norm": "as computed",
            "loss/grad_norm_max": "largest of the step",
            "loss/grad_norm_normalized": "normalized",
        },
        "log",
    ),
    Figure(
        "Clipping bias",
        "The bias that clipping adds, in several norms. Above the dashed line (delta), SO scales the step down.",
        {
            "loss/clip_bias_norm": "in use",
            **{f"loss/clip_bias_{norm}": norm for norm in _BIAS_NORMS},
        },
        "log",
        "delta",
    ),
    Figure(
        "Normalization",
        "The factor on the step (1 leaves it as it is) and the share of mini-batches that were scaled down.",
        {"loss/normalizer": "mean factor", "loss/normalized_frac": "share scaled down"},
        "share",
    ),
)
_TOKEN_CLASSES = {
    "tag": "tags",
    "reasoning": "reasoning",
    "query": "queries",
    "answer": "answers",
    "other": "other",
}
_TURNS = 8  # as in sorl_train.learner.diagnostics, which is not imported because it imports torch
_CLIPPING = (
    Figure(
        "Clip fraction",
        "Share of the policy's tokens whose importance ratio was clipped.",
        {"loss/clip_frac": "clipped"},
    ),
    Figure(
        "Clip fraction by turn",
        "Share of clipped tokens in each turn; the last one includes all later turns.",
        {f"loss/clip_frac_turn{turn}": f"turn {turn + 1}" for turn in range(_TURNS)},
    ),
    Figure(
        "Clip fraction by kind of token",
        "Share of clipped tokens among tags, reasoning, queries and answers.",
        {f"loss/clip_frac_{name}": label for name, label in _TOKEN_CLASSES.items()},
    ),
)
_OFF_POLICY = (
    Figure(
        "Log ratio",
        "Quantiles over the policy's tokens of log(new probability / old probability); 0 is on policy.",
        {"loss/log_ratio_p99": "99%", "loss/log_ratio_p50": "median", "loss/log_ratio_p01": "1%"},
    ),
    Figure(
        "Effective sample size",
        "Of the importance ratios per token, turn and trajectory, as a share of all; 1 is on policy.",
        {"loss/ess_token": "token", "loss/ess_turn": "turn", "loss/ess_sequence": "sequence"},
        "share",
    ),
    Figure(
        "KL divergence",
        "How far the policy moved in the step, is from the reference model, and differs from its sampler.",
        {
            "loss/approx_kl": "from the old policy",
            "loss/ref_kl": "from the reference",
            "rollout/mismatch_kl": "sampler from trainer",
        },
    ),
    Figure(
        "Trust region",
        "How far each batch took the policy, and the furthest it was before steps were taken back.",
        {"loss/trust_kl": "KL at the end of the batch", "loss/trust_kl_max": "largest in the batch"},
        "log",
    ),
    Figure(
        "Correction for the sampler",
        "Shares of the loss that the correction's limits and its sequence mask took away; the rest keeps its weight.",
        {
            "loss/correction_cut_frac": "truncated or set to 0 by the limits",
            "loss/correction_zero_frac": "tokens of weight 0",
            "loss/correction_mask_frac": "trajectories masked",
        },
        "share",
    ),
    Figure(
        "Replay",
        "Share of past trajectories in the batch. Without any, no question came back, or none needed a past success.",
        {"rollout/replay_share": "replayed"},
        "share",
    ),
)
_POLICY = (
    Figure(
        "Advantage",
        "Mean and spread over the tokens of the loss.",
        {"loss/advantage_mean": "mean", "loss/advantage_std": "standard deviation"},
    ),
    Figure(
        "Entropy",
        "Of the policy at its own tokens, in nats. It shrinks as the policy becomes certain.",
        {"loss/entropy": "entropy"},
    ),
    Figure("Length", "Tokens that the policy samples per trajectory.", {"rollout/response_tokens": "tokens"}),
    Figure(
        "Dynamic sampling",
        "Rollouts drawn until the batch was full of groups with a signal, and those that were trained on.",
        {"rollout/dynamic_drawn": "drawn", "rollout/dynamic_kept": "kept"},
    ),
    Figure(
        "Overlong trajectories",
        "Shares of the trajectories that were punished for their length, or filtered by their stop reason.",
        {
            "rollout/overlong_punished_frac": "punished",
            "rollout/overlong_filtered_frac": "not in the loss",
        },
        "share",
    ),
)
_TIME = (
    Figure(
        "Seconds per step",
        "Wall time of each step and of its longest parts.",
        {"time/step_s": "step", "time/rollout_s": "rollout", "time/update_s": "update"},
    ),
    Figure(
        "Tokens per second",
        "Tokens that the policy samples.",
        {"time/rollout_tokens_per_s": "during rollouts", "time/tokens_per_s": "over the whole step"},
    ),
)
SECTIONS = (
    Section("outcome", "Outcome", "What the policy learned, and whether it kept it.", _OUTCOME),
    Section(
        "gradient",
        "Gradient and clipping bias",
        "An exploding norm announces a collapse. Clipping biases the gradient.",
        _GRADIENT,
    ),
    Section("clipping", "Clipping", "For which of the policy's tokens the loss clips the ratio.", _CLIPPING),
    Section(
        "off-policy",
        "Off-policy",
        "How far the policy has moved from the policy that sampled the data.",
        _OFF_POLICY,
    ),
    Section("policy", "Policy and advantages", "", _POLICY),
    Section("time", "Time", "", _TIME),
)
