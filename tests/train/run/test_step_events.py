"""A batch that teaches nothing is said: at first, and then ever more rarely."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sorl_train.run.files import read_jsonl
from sorl_train.run.stability import in_vain, step_events

from ..conftest import train_short

VAIN = {"rollout/success": 0.0, "loss/signal_frac": 0.0, "loss/grad_norm": 0.0, "loss/effective_lr": 1e-6}


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({}, "no step had a gradient: start with --stage sft"),
        ({"loss/effective_lr": 0.0}, "no step was taken"),  # a trust region, or update.skip_without_signal
        ({"loss/effective_lr": 0.0, "loss/grad_norm": 0.1}, "no step was taken"),
        ({"loss/grad_norm": 0.1}, "steps followed the KL and entropy terms alone"),
        ({"rollout/success": 0.1}, ""),
        ({"loss/signal_frac": 0.1}, ""),  # some are better than others, or a critic says so
    ],
)
def test_what_came_of_the_batch(metrics: dict[str, float], said: str) -> None:
    assert said in in_vain(VAIN | metrics) and bool(said) == bool(in_vain(VAIN | metrics))


@pytest.mark.parametrize(
    ("metrics", "kind", "said"),
    [
        (
            {"trust_moves_back": 3.0, "trust_kl": 0.0049, "trust_kl_max": 0.731, "trust_scale": 0.25},
            "moved_back",
            "reached 0.73: weights were moved back 3 times, and the step ends at 0.0049; learning rates are times 0.25",
        ),
        ({"trust_moves_back": 0.0}, None, ""),
        ({"overlong_filtered_frac": 1.0}, "no_step", "every trajectory was filtered by overlong.exclude"),
        ({"success": 0.0}, None, ""),  # a batch without an update
    ],
)
def test_what_is_an_event(metrics: dict[str, float], kind: str | None, said: str) -> None:
    names = {name: f"{'loss' if 'trust' in name else 'rollout'}/{name}" for name in metrics}
    events = list(step_events({names[name]: value for name, value in metrics.items()}, 0))
    assert [event[0] for event in events] == ([kind] if kind else [])
    assert all(said in event[1] for event in events)


def test_a_policy_that_never_succeeds_is_told_so_at_doubling_intervals(
    tiny_folder: str, tmp_path: Path
) -> None:
    """One of random weights; a resume goes on counting."""
    settings: dict[str, Any] = {
        "model": tiny_folder,
        "algo": "so_grpo",
        "rollout__group_size": 4,
        "loss__kl_coef": 0.0,
    }
    settings |= {"limits__max_new_tokens": 8, "limits__max_turns": 1, "rollout__batch_size": 8}
    train_short(tmp_path / "run", **settings, update__steps=3)
    run_dir, _ = train_short(tmp_path / "run", resume=True, **settings, update__steps=5)
    events = read_jsonl(run_dir.events)
    assert [(event["kind"], event["step"]) for event in events] == [
        ("in_vain", 1),
        ("in_vain", 2),
        ("in_vain", 4),
    ]
    assert all("no step had a gradient" in event["reason"] for event in events)
