"""Two steps of training on OpenEnv servers: on a task of ours, and on the environment that OpenEnv's own tool makes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sorl_env.trajectory import read_jsonl
from sorl_train.run.files import read_jsonl as read_metrics
from tests.tools.serve_env.servers import Process, free_port, openenv_python, serve_task
from tests.tools.serve_env.test_loopback import both, play, record
from tests.train.conftest import train_short

pytest.importorskip("websockets", reason="needs websockets: pip install -e '.[train]'")
pytestmark = [pytest.mark.openenv, pytest.mark.slow]


def train(folder: Path, url: str, model: str, **settings: Any) -> list[Any]:
    """Two steps on the server at ``url``; returns the second step's trajectories."""
    given = {"task": f"openenv:{url}", "model": model, "eval__search_off": False, **settings}
    run_dir, summary = train_short(folder, **given)
    assert summary["steps"] == 2
    lines = read_metrics(run_dir.metrics)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["rollout/excluded_rate"] == 0 for line in lines[1:])
    return list(read_jsonl(run_dir.trajectories / "step_000002.jsonl"))


def test_a_policys_greedy_trajectories_are_the_same_through_the_server(
    tiny_folder: str, tmp_path: Path
) -> None:
    from sorl_train.models.policy import load_policy, load_tokenizer
    from sorl_train.rollout.sampler import TransformersSampler

    tokenizer, model = load_tokenizer(tiny_folder), load_policy(tiny_folder, "cpu")
    server, found = serve_task("minihop", tmp_path), []
    for env in both(server, "test"):
        sampler = TransformersSampler(model, tokenizer, 16, "float32")
        with sampler.session():
            found.append([record(t) for t in play(env, tokenizer, sampler)])
    server.kill()
    # replies arrive in another order, so turns share other batches, whose matrix products round otherwise
    here, there = ([trajectory.pop("rollout_log_probs") for trajectory in side] for side in found)
    assert found[1] == found[0]
    for one, other in zip(here, there, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    assert sum(len(t["token_ids"]) for t in found[0]) > 1000


def test_on_a_task_of_ours(tiny_folder: str, tmp_path: Path) -> None:
    process = serve_task("minihop", tmp_path)
    try:
        trajectories = train(tmp_path / "run", process.url, tiny_folder, task_args={"wait_s": 600})
    finally:
        process.kill()
    assert {t.split for t in trajectories} == {"train"}
    assert all(t.task.startswith("openenv:") and t.example_id.startswith("train-") for t in trajectories)


def test_on_the_environment_of_openenv_init(tiny_folder: str, tmp_path: Path) -> None:
    """It echoes a message and rewards its length; one session at a time, so that episodes wait for each other."""
    quiet = os.environ | {"NO_COLOR": "1"}
    made = [openenv_python(), "-m", "openenv.cli", "init", "echo_env", "--output-dir", str(tmp_path)]
    subprocess.run(made, check=True, capture_output=True, env=quiet, timeout=900)
    port = free_port()
    serve = ["-m", "uvicorn", "server.app:app", "--host", "127.0.0.1", "--port", str(port)]
    process = Process(serve, port, tmp_path / "echo_env")
    try:
        knobs = {"format": "raw", "max_turns": 2, "field": "echoed_message", "wait_s": 600}
        limits = {"limits__max_new_tokens": 8, "limits__max_trajectory_tokens": 256}
        trajectories = train(tmp_path / "run", process.url, tiny_folder, task_args=knobs, **limits)
    finally:
        process.kill()
    assert all(0 < t.reward <= 2 for t in trajectories)
    assert all(t.turns[0].text == t.turns[0].observation for t in trajectories)
