"""Two whole steps of every algorithm through Ray, vLLM and DeepSpeed."""

from __future__ import annotations

from pathlib import Path

import pytest

from sorl_train.algorithms import ALGORITHMS

from .conftest import WORLD, train
from .test_runs import check_run_folder

pytestmark = [pytest.mark.openrlhf, pytest.mark.slow]

# test_runs.py has whole runs of these two, in several settings each.
ELSEWHERE = ("so_ppo", "so_grpo")


@pytest.mark.parametrize("algo", [name for name in ALGORITHMS if name not in ELSEWHERE])
def test_two_steps_change_the_policy(algo: str, tmp_path: Path) -> None:
    row = ALGORITHMS[algo]
    settings = {"algo": algo, "rollout__group_size": 4 if row.needs_groups else 1}
    if row.advantage == "turn_group":
        settings["task_args"] = WORLD | {"hit_reward": 0.5}
    done = train(tmp_path / "run", **settings)
    assert done.returncode == 0, done.stderr
    lines = check_run_folder(tmp_path / "run")
    assert max(line["loss/grad_norm"] for line in lines[1:]) > 0
    assert ("loss/value" in lines[2]) == row.needs_critic
    assert lines[2]["rollout/mismatch_kl"] < 1e-3  # vLLM draws from the weights that step 1 has left
