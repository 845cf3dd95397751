"""Metrics of a batch of trajectories. All engines use these names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from sorl_env.rewards import normalize_answer
from sorl_env.task import Example
from sorl_env.tool import ToolCall
from sorl_env.trajectory import StopReason, Trajectory

_ANYWHERE = {"yes", "no", "maybe"}
_SEARCH = "search"  # the name of every search tool, in process or over HTTP


def is_success(trajectory: Trajectory) -> bool:
    """Whether the rewards add up to 1 or more: the tasks here give 1 for a right answer."""
    return trajectory.reward >= 1.0 - 1e-9


def success_rate(trajectories: Sequence[Trajectory]) -> float:
    """Share of successes among the trajectories that are not excluded: an outage says nothing about the policy."""
    counted = [is_success(t) for t in trajectories if not t.excluded]
    return fmean(counted) if counted else 0.0


def valid_turn_rate(trajectories: Sequence[Trajectory]) -> float:
    """Share of turns without a format error."""
    valid = [turn.format_error is None for t in trajectories if not t.excluded for turn in t.turns]
    return fmean(valid) if valid else 0.0


def rollout_metrics(
    trajectories: Sequence[Trajectory], answers: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """``rollout/``, ``reward/`` and ``tool/`` metrics of one step's trajectories. When all trajectories are excluded,
    metrics such as the success rate are missing: an outage is not a success rate of 0. ``answers`` has, for each
    example id, those to look for in retrieved passages (``answers_of``)."""
    counted = [t for t in trajectories if not t.excluded]
    calls = [call for t in trajectories for call in _calls(t)]
    metrics = {
        "rollout/excluded_rate": 1.0 - len(counted) / len(trajectories),
        "tool/calls": float(len(calls)),
        "tool/error_rate": _mean([not call.ok for call in calls]),
        "tool/retry_rate": _mean([call.attempts > 1 for call in calls]),
        "tool/no_hits_rate": _mean([call.hits == 0 for call in calls if call.hits is not None]),
    }
    if counted:
        metrics |= {
            "rollout/success": success_rate(counted),
            "rollout/valid_turn_rate": valid_turn_rate(counted),
            "rollout/num_turns": _mean([len(t.turns) for t in counted]),
            "rollout/turns": float(sum(len(t.turns) for t in counted)),
            "rollout/response_tokens": _mean([t.num_action_tokens for t in counted]),
            "rollout/observation_tokens": _mean([_observation_tokens(t) for t in counted]),
            "rollout/trajectory_tokens": _mean([len(t.token_ids) for t in counted]),
            "rollout/reward_mean": _mean([t.reward for t in counted]),
            "rollout/reward_std": float(np.std([t.reward for t in counted])),
        }
    for reason in StopReason:
        metrics[f"rollout/stop_{reason.value}"] = fmean(t.stop_reason is reason for t in trajectories)
    for name in sorted({name for t in counted for name in t.reward_items}):
        metrics[f"reward/{name}"] = fmean(t.reward_items.get(name, 0.0) for t in counted)
    return metrics | _search_metrics(trajectories, answers)


def _search_metrics(
    trajectories: Sequence[Trajectory], answers: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Of a step's searches the share whose query was asked before, by any trajectory, whatever its case and spaces.
    Of the trajectories that have answers to look for and searched, the share that found one."""
    searches = [[call for call in _calls(t) if call.tool == _SEARCH] for t in trajectories]
    queries = [" ".join(call.argument.split()).lower() for calls in searches for call in calls]
    if not queries:
        return {}
    metrics = {"tool/duplicate_query_rate": 1.0 - len(set(queries)) / len(queries)}
    found = []
    for trajectory, calls in zip(trajectories, searches, strict=True):
        # an excluded trajectory's queries count, but not which answers they found
        wanted = () if trajectory.excluded else answers.get(trajectory.example_id, ())
        if calls and wanted:
            found.append(any(holds_answer(call.reply, wanted) for call in calls if call.ok))
    if found:
        metrics["tool/answer_in_top_k"] = sum(found) / len(found)
    return metrics


def answers_of(examples: Sequence[Example]) -> dict[str, tuple[str, ...]]:
    """For each example id, the golden answers that can be looked for in passages: for multiple choice the texts of the
    right options, and never yes, no or maybe, which many texts contain. The policy does not see them."""
    answers: dict[str, tuple[str, ...]] = {}
    for example in examples:  # the data may have a question twice
        texts = ((example.options or {}).get(answer, answer) for answer in example.golden_answers)
        wanted = tuple(text for text in texts if normalize_answer(text) not in _ANYWHERE)
        answers[example.id] = answers.get(example.id, ()) + wanted
    return answers


def holds_answer(text: str, answers: Sequence[str]) -> bool:
    """Whether a text contains one of the answers as whole words, both normalized as for exact match."""
    padded = f" {normalize_answer(text)} "
    return any(words and f" {words} " in padded for words in map(normalize_answer, answers))


def staleness(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """How many training steps before ``version`` the turns were sampled, on average and at most."""
    lags = [version - turn.policy_version for t in trajectories if not t.excluded for turn in t.turns]
    return {"rollout/staleness": fmean(lags), "rollout/staleness_max": float(max(lags))} if lags else {}


def tool_timings(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Latencies of tool calls in seconds, and the share of calls answered from a cache or a recording. A seed does not
    reproduce these: a cache may hold replies of earlier runs."""
    calls = [call for t in trajectories for call in _calls(t)]
    if not calls:
        return {}
    latencies = [call.latency_s for call in calls]
    return {
        "time/tool_p50_s": float(np.percentile(latencies, 50)),
        "time/tool_p99_s": float(np.percentile(latencies, 99)),
        "time/tool_cached_rate": fmean(call.cached for call in calls),
    }


def eval_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """``eval/`` metrics of an evaluation; only the excluded rate when all trajectories are excluded."""
    counted = [t for t in trajectories if not t.excluded]
    metrics = {"eval/excluded_rate": 1.0 - len(counted) / len(trajectories)}
    if counted:
        metrics |= {
            "eval/questions": float(len(counted)),
            "eval/success": success_rate(counted),
            "eval/valid_turn_rate": valid_turn_rate(counted),
            "eval/num_turns": _mean([len(t.turns) for t in counted]),
        }
    return metrics


def search_off_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The success rate of an evaluation without tools; empty when all trajectories are excluded."""
    counted = [t for t in trajectories if not t.excluded]
    return {"eval/search_off_success": success_rate(counted)} if counted else {}


def _calls(trajectory: Trajectory) -> list[ToolCall]:
    return [call for turn in trajectory.turns for call in turn.tool_calls]


def _observation_tokens(trajectory: Trajectory) -> int:
    prompt = trajectory.turns[0].start if trajectory.turns else len(trajectory.token_ids)
    return len(trajectory.token_ids) - prompt - trajectory.num_action_tokens


def _mean(values: Sequence[float]) -> float:
    return float(fmean(values)) if values else 0.0
