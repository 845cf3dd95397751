"""Metrics of a step's trajectories, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sorl_env.task import Example
from sorl_env.tool import ToolCall
from sorl_env.trajectory import StopReason, Trajectory, Turn
from sorl_train.rollout.metrics import (
    answers_of,
    eval_metrics,
    holds_answer,
    rollout_metrics,
    search_off_metrics,
    tool_timings,
)
from sorl_train.run.stability import Summary

from ...trajectories import make_trajectory

EXAMPLES = [
    Example("q0", "who?", ("Bizet",)),
    Example("q1", "where?", ("Rome",)),
    Example("q2", "?", ("yes",)),
]


def trajectory(
    example: str, *calls: ToolCall, stop_reason: StopReason = StopReason.ANSWER, **more: Any
) -> Trajectory:
    turns = tuple(
        Turn(i, "", "tool", call.argument, None, call.reply, {}, (call,), i, i + 1)
        for i, call in enumerate(calls)
    )
    names = {"id": f"{example}/0", "group_id": example, "example_id": example}
    return make_trajectory([0] * (len(calls) + 1), turns=turns, stop_reason=stop_reason, **names, **more)


def search(query: str, reply: str = "", **more: Any) -> ToolCall:
    return ToolCall("search", query, reply, **more)


def test_searches_by_hand() -> None:
    step = [
        trajectory("q0", search("composer", "Doc 1: by Verdi"), search("Composer", "Doc 1: by Bizet.")),
        trajectory("q1", search("city", "Doc 1: Paris"), ToolCall("calculator", "city", "Rome")),
        trajectory("q2", search("yes?", "Doc 1: yes")),  # nothing to look for
        trajectory(
            "q1", search("town", ok=False, error="out"), stop_reason=StopReason.ERROR, error="search is out"
        ),
        trajectory("unknown", search("x", "Doc 1: Bizet")),
    ]
    metrics = rollout_metrics(step, answers_of(EXAMPLES))
    assert metrics["tool/answer_in_top_k"] == pytest.approx(1 / 2)  # q0 of q0 and the first q1
    assert metrics["tool/duplicate_query_rate"] == pytest.approx(1 / 6)  # six searches, one asked before
    assert metrics["tool/error_rate"] == pytest.approx(1 / 7)
    assert metrics["rollout/excluded_rate"] == pytest.approx(1 / 5)


def test_without_searches_there_is_nothing_to_say() -> None:
    metrics = rollout_metrics([trajectory("q0", ToolCall("calculator", "1+1", "2"))], answers_of(EXAMPLES))
    assert not {"tool/answer_in_top_k", "tool/duplicate_query_rate"} & set(metrics)


def test_what_a_seed_does_not_reproduce_is_named_time() -> None:
    calls = [search("a", latency_s=0.1), search("b", latency_s=0.3), search("c", latency_s=0.2, cached=True)]
    timings = tool_timings([trajectory("q0", *calls)])
    assert timings["time/tool_p50_s"] == pytest.approx(0.2)
    assert timings["time/tool_cached_rate"] == pytest.approx(1 / 3)
    assert set(timings) == {"time/tool_p50_s", "time/tool_p99_s", "time/tool_cached_rate"}
    assert not any("cached" in name for name in rollout_metrics([trajectory("q0", *calls)], {}))
    assert tool_timings([trajectory("q0")]) == {}


def test_an_outage_is_not_a_success_rate_of_zero() -> None:
    call = search("town", ok=False, error="out")
    lost = trajectory("q1", call, stop_reason=StopReason.ERROR, error="search is out")
    metrics = rollout_metrics([lost, lost], {})
    assert (
        metrics["rollout/excluded_rate"] == metrics["rollout/stop_error"] == metrics["tool/error_rate"] == 1.0
    )
    assert not {"rollout/success", "rollout/valid_turn_rate", "rollout/reward_mean"} & set(metrics)
    assert eval_metrics([lost]) == {"eval/excluded_rate": 1.0} and search_off_metrics([lost]) == {}
    summary = Summary()
    summary.observe(0, {"eval/success": 0.8})
    assert not summary.observe(10, eval_metrics([lost]))
    assert summary.final_success == 0.8 and summary.evaluations_below == 0  # no sign of a collapse


def test_the_answers_to_look_for() -> None:
    options = {"A": "Aspirin", "B": "Heparin"}
    examples = [
        Example("twice", "?", ("Rome",)),
        Example("twice", "?", ("Roma", "No.", "Norway", "Yes")),
        Example("choice", "?", ("B",), options),
        Example("yes", "?", ("A",), {"A": "yes", "B": "no"}),
    ]
    assert answers_of(examples) == {"twice": ("Rome", "Roma", "Norway"), "choice": ("Heparin",), "yes": ()}


def test_answers_are_whole_words() -> None:
    assert holds_answer("Doc 1 (The Beatles): An English band.", ["the beatles!"])
    assert holds_answer("Doc 1 (X): in the Paris, of 1900", ["Rome", "Paris of 1900"])
    assert not holds_answer("Doc 1: Romeo and Juliet", ["Rome"])
    assert not holds_answer("Doc 1: a", ["the", ""])  # nothing is left of them
