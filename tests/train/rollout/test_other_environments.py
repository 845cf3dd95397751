"""Two steps of training on an environment that is not ``ToolUseEnv``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sorl_env.errors import UserError
from sorl_env.trajectory import read_jsonl
from sorl_train.run.files import read_jsonl as read_metrics
from tests.env import text_gyms
from tests.train.conftest import short_config, train_short

LAKE: dict[str, Any] = {
    "task": "gym:FrozenLake-v1",
    "task_args": {"wrapper": f"{text_gyms.__file__}:LakeInWords", "format": "raw", "max_turns": 3},
    "limits__max_new_tokens": 8,
    "limits__max_trajectory_tokens": 256,
}


@pytest.mark.slow
def test_two_steps_on_a_gymnasium_environment(tiny_folder: str, tmp_path: Path) -> None:
    run_dir, summary = train_short(tmp_path / "run", model=tiny_folder, eval__search_off=False, **LAKE)
    assert summary["steps"] == 2
    assert [line["rollout/excluded_rate"] for line in read_metrics(run_dir.metrics)[1:]] == [0, 0]
    trajectories = list(read_jsonl(run_dir.trajectories / "step_000002.jsonl"))
    assert {t.task for t in trajectories} == {"gym:FrozenLake-v1"}
    assert all(t.turns[0].observation for t in trajectories)


def test_there_are_no_tools_to_switch_off(tiny_folder: str) -> None:
    from sorl_train.rollout.environments import make_env

    with pytest.raises(UserError, match=r"give --eval\.search_off false"):
        make_env(short_config(model=tiny_folder, eval__search_off=True, **LAKE))
