"""Short whole runs with credit for turns, and the refusal of rewards that a task does not give."""

from __future__ import annotations

from pathlib import Path

import pytest

from sorl_env.errors import UserError
from sorl_train.rollout.environments import make_env
from sorl_train.run.files import read_jsonl

from .conftest import short_config, train_short

REWARDED = {"task_args__hit_reward": 0.5, "task_args__valid_reward": 0.1}
SETTINGS = {"update__epochs": 2, "rollout__group_size": 4, "eval__num_examples": 4} | REWARDED


def test_a_waiting_batch_has_its_states_after_a_resume(tmp_path: Path) -> None:
    settings = {**SETTINGS, "algo": "gigpo", "rollout__max_staleness": 1, "checkpoint__every": 1}
    whole, _ = train_short(tmp_path / "whole", **settings | {"update__steps": 3})
    stopped, _ = train_short(tmp_path / "stopped", **settings | {"update__steps": 2})
    train_short(stopped.path, resume=True, **settings | {"update__steps": 3})
    with_states = [line["loss/shared_state_frac"] for line in read_jsonl(stopped.metrics)[1:]]
    assert with_states[:2] == [line["loss/shared_state_frac"] for line in read_jsonl(whole.metrics)[1:3]]
    assert len(with_states) == 3 and with_states[0] > 0.3  # at least the first turns


def test_comparing_the_rewards_of_turns_needs_rewards_of_turns() -> None:
    config = short_config(algo="mt_grpo", rollout__group_size=4)
    with pytest.raises(UserError, match=r"(?s)task minihop gives none.*--task_args\.hit_reward"):
        make_env(config)
    make_env(config, evaluation=True)
    make_env(short_config(algo="mt_grpo", rollout__group_size=4, stage="sft"))


def test_an_algorithm_brings_its_published_settings() -> None:
    rloo, gigpo = short_config(algo="rloo").loss, short_config(algo="gigpo").loss
    assert (rloo.group_baseline, rloo.group_std) == ("leave_one_out", False)
    assert (gigpo.gamma, gigpo.turn_weight, gigpo.anchor_state) == (0.95, 1.0, "observation")
    assert short_config(algo="gigpo", loss__gamma=0.9).loss.gamma == 0.9
    assert short_config(algo="grpo").loss.gamma == 1.0
