"""A run on a Ray cluster of two nodes, one of which is lost."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
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
def gpus() -> int:
    """Pretended GPUs of a node."""
    return 2


@pytest.fixture
def tell(gpus: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Tells the cluster to ``kill`` its second node or to ``add`` one; runs of this test join it."""
    path = [*import_folders(on_cpu=True), *filter(None, [os.environ.get("PYTHONPATH")])]
    cluster = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("ray_nodes.py")), str(gpus)],
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


WORKERS = {
    "PolicyWorker": "policy",
    "PolicyModelActor": "policy",
    "RolloutWorker": "vLLM",
    "RolloutRayActor": "vLLM",
    "RayWorkerProc": "part of vLLM",
}


def placement() -> list[Counter[str]]:
    """Of each Ray node below this process, how many workers of a kind it has: other tests have nodes, too."""
    nodes: dict[int, Counter[str]] = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found = re.match(r"ray::(\w+)", " ".join(process.cmdline()))
            if found and found[1] in WORKERS:
                nodes.setdefault(process.ppid(), Counter())[WORKERS[found[1]]] += 1
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


@pytest.mark.parametrize("gpus", [4])
def test_asynchronous_with_engines_of_two_gpus_each(
    tmp_path: Path, tell: Callable[[str], str], gpus: int
) -> None:
    """Four GPUs train and four sample; which node has which is Ray's choice."""
    settings = SETTINGS | {
        "cluster__gpus_per_node": gpus,
        "cluster__vllm_engines": 2,
        "cluster__vllm_tensor_parallel": 2,
        "cluster__async_rollout": True,
        "rollout__max_staleness": 1,
        "update__steps": 4,
    }
    run_dir = tmp_path / "run"
    process = subprocess.Popen(
        command(run_dir, **settings), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_until_step(run_dir, 1, process)
    placed = placement()
    print(f"workers of each node: {placed}")
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert [line["step"] for line in metrics(run_dir)] == list(range(5))
    assert sum(placed, Counter()) == {"policy": 4, "vLLM": 2, "part of vLLM": 4}
    assert [node["policy"] + node["part of vLLM"] for node in placed] == [gpus] * 2
