"""Two whole steps of each kind of algorithm through Ray, vLLM and DeepSpeed.

Algorithms of one kind differ in their loss alone, and test_equivalence.py takes a DeepSpeed step with each of them.
What only a whole run shows is how rewards and groups come through Ray: advantages from turns and from states.
test_runs.py and test_paper_configs.py have whole runs of the critic's kind and of group advantages.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sorl_train.algorithms import ALGORITHMS

from .conftest import WORLD, train
from .test_runs import check_run_folder

pytestmark = [pytest.mark.openrlhf, pytest.mark.slow]


@pytest.mark.parametrize("algo", ["mt_grpo", "gigpo"])
def test_two_steps_change_the_policy(algo: str, tmp_path: Path) -> None:
    row = ALGORITHMS[algo]
    settings = {"algo": algo, "rollout__group_size": 4}
    if row.advantage == "turn_group":
        settings["task_args"] = WORLD | {"hit_reward": 0.5}
    done = train(tmp_path / "run", **settings)
    assert done.returncode == 0, done.stderr
    lines = check_run_folder(tmp_path / "run")
    assert max(line["loss/grad_norm"] for line in lines[1:]) > 0
    assert "loss/value" not in lines[2]
    assert lines[2]["rollout/mismatch_kl"] < 1e-3  # vLLM draws from the weights that step 1 has left
