"""A run on a Ray cluster of two nodes, one of which is lost."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sorl_train.openrlhf.launch import CPU_ENVIRONMENT, import_folders

from .conftest import command, metrics
from .test_runs import newest, wait_until_step

pytestmark = [pytest.mark.openrlhf, pytest.mark.slow]
SETTINGS: dict[str, Any] = {
    "algo": "so_grpo",
    "rollout__group_size": 4,
    "cluster__nodes": 2,
    "cluster__gpus_per_node": 2,
    "cluster__vllm_engines": 4,
    "checkpoint__every": 1,
}


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Tells the cluster to ``kill`` its second node or to ``add`` one; runs of this test join it."""
    path = [*import_folders(on_cpu=True), *filter(None, [os.environ.get("PYTHONPATH")])]
    cluster = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("ray_nodes.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | CPU_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(path)},
    )
    assert cluster.stdin is not None and cluster.stdout is not None
    monkeypatch.setenv("RAY_ADDRESS", cluster.stdout.readline().strip())

    def say(word: str) -> str:
        cluster.stdin.write(f"{word}\n")
        cluster.stdin.flush()
        return cluster.stdout.readline().strip()

    yield say
    cluster.stdin.close()
    cluster.wait(60)


def placement() -> list[Counter[str]]:
    """Of each Ray node on this machine, how many workers of a kind it has."""
    nodes: dict[int, Counter[str]] = {}
    for process in psutil.process_iter(["cmdline", "ppid"]):
        title = " ".join(process.info["cmdline"] or [])
        if found := re.match(r"ray::(PolicyWorker|PolicyModelActor|RolloutWorker|RolloutRayActor)\b", title):
            kind = "policy" if found[1].startswith("Policy") else "vLLM"
            nodes.setdefault(process.info["ppid"], Counter())[kind] += 1
    return list(nodes.values())


def test_a_run_that_was_not_told_of_a_cluster_starts_its_own(tell: Callable[[str], str]) -> None:
    """Ray would join the one that runs on this machine, with its four GPUs."""
    code = "import ray; from sorl_train.openrlhf.driver import cluster; ray.init(**cluster({'SORL_LOGICAL_GPUS': '3'}))"
    words = [sys.executable, "-c", f"{code}; print(ray.cluster_resources()['GPU'])"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "3.0", done.stderr


def test_a_lost_node_ends_the_run_and_it_resumes_on_another(
    tmp_path: Path, tell: Callable[[str], str]
) -> None:
    run_dir = tmp_path / "run"
    words = command(run_dir, update__steps=400, **SETTINGS)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until_step(run_dir, 1, process, saved=True)
    placed = placement()
    print(f"workers of each node: {placed}")
    assert placed == [{"policy": 2, "vLLM": 2}] * 2
    assert tell("kill") == "done"
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == 1 and f"sorl-train --resume --run_dir {run_dir}" in stderr, stderr
    saved = newest(run_dir)
    other = subprocess.run(
        command(run_dir, "--resume", **(SETTINGS | {"cluster__nodes": 1, "cluster__vllm_engines": 2})),
        capture_output=True,
        text=True,
    )
    assert other.returncode == 2 and "cluster.nodes" in other.stderr, other.stderr
    assert tell("add") == "done"
    done = subprocess.run(
        command(run_dir, "--resume", **(SETTINGS | {"update__steps": saved + 1})),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in metrics(run_dir)] == list(range(saved + 2))
