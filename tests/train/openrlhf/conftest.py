"""Real OpenRLHF, Ray, vLLM and DeepSpeed on a CPU."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_train.openrlhf.launch import CPU_ENVIRONMENT, CPU_MODE, import_folders
from sorl_train.openrlhf.rendezvous import rendezvous_port
from sorl_train.run.files import read_jsonl

from ..conftest import SHORT as LOCAL
from ..conftest import flags

TINY = {"hidden_size": 64, "num_layers": 2, "num_heads": 2}

# Two steps of a few short trajectories. vLLM on a CPU has no heads narrower than 32.
SHORT: dict[str, Any] = {name: value for name, value in LOCAL.items() if name != "hardware.threads"}
SHORT |= {f"tiny.{name}": value for name, value in TINY.items()}
SHORT |= {
    "engine": "openrlhf",
    "hardware.device": "cpu",
    "cluster.gpus_per_node": 1,
    "cluster.vllm_engines": 1,
    "cluster.vllm_tensor_parallel": 1,
    "cluster.zero_stage": 2,
    "cluster.deadline_s": 300,
    "limits.max_trajectory_tokens": 512,
}


@pytest.fixture(scope="module")
def importable() -> None:
    """What a run has on a CPU, in this process: without it OpenRLHF does not import where there is no GPU."""
    sys.path[:0] = import_folders(on_cpu=True)
    runpy.run_path(str(CPU_MODE / "sitecustomize.py"))


def command(run_dir: Path, *more: str, **overrides: Any) -> list[str]:
    """``sorl-train`` with the short settings; ``a__b=1`` overrides ``a.b``."""
    settings = SHORT | {name.replace("__", "."): value for name, value in overrides.items()}
    if settings["engine"] == "local":
        settings = {name: value for name, value in settings.items() if not name.startswith("cluster.")}
    config = () if "--resume" in more else ("--config", "minihop")
    return [
        sys.executable,
        "-m",
        "sorl_train.cli",
        "--run_dir",
        str(run_dir),
        *config,
        *more,
        *flags(settings),
    ]


def train(run_dir: Path, *more: str, **overrides: Any) -> subprocess.CompletedProcess[str]:
    """Run to the end; the log of a run that failed is shown with the test."""
    done = subprocess.run(command(run_dir, *more, **overrides), capture_output=True, text=True)
    log = run_dir / "openrlhf.log"
    if done.returncode and log.is_file():
        print(log.read_text(errors="replace")[-8000:])
    return done


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return read_jsonl(run_dir / "metrics.jsonl")


def run_ranks(script: Path, folder: Path, ranks: int) -> None:
    """``script FOLDER`` in ``ranks`` processes with what a CPU run needs."""
    common = os.environ | CPU_ENVIRONMENT
    path = [*import_folders(on_cpu=True), *filter(None, [os.environ.get("PYTHONPATH")])]  # as launch.py does
    port = str(rendezvous_port())
    common |= {"PYTHONPATH": os.pathsep.join(path), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            env=common | {"RANK": str(rank), "WORLD_SIZE": str(ranks)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=900)
        assert process.returncode == 0, output[-4000:]


def deepspeed_results(folder: Path, ranks: int, cases: Mapping[Any, Any]) -> dict[Any, list[dict[str, Any]]]:
    """What each rank found for each case of ``deepspeed_cases.py``; one start, which takes longer than they do."""
    torch.save(list(cases.values()), folder / "cases.pt")
    run_ranks(Path(__file__).with_name("deepspeed_cases.py"), folder, ranks)
    found = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]
    return dict(zip(cases, map(list, zip(*found, strict=True)), strict=True))
