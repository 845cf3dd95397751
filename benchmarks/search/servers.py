"""Start retrieval servers, put load on them, and measure their memory."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SHARED = Path(os.environ.get("SORL_SHARED_DATA", HERE.parents[2] / "shared" / "data"))
CORPUS = SHARED / "corpus" / "wiki.jsonl.gz"
QUESTIONS = SHARED / "nq" / "test.jsonl.gz"


def add_load_options(parser: argparse.ArgumentParser, seconds: float) -> None:
    parser.add_argument("--questions", type=Path, default=QUESTIONS, help=".jsonl.gz with a question per row")
    parser.add_argument("--seconds", type=float, default=seconds, help="of one measurement")
    parser.add_argument("--connections", type=int, default=64, help="clients at the same time")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="of sorl-serve")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def running(command: Sequence[str], port: int, probe: str) -> Iterator[int]:
    """A server, from the moment it answers the probe; gives its process id."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, *command], env=environment, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while not _answers(f"http://127.0.0.1:{port}{probe}"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{' '.join(command)} does not answer")
            time.sleep(0.2)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextlib.contextmanager
def sorl_serve(source: Path, workers: int) -> Iterator[tuple[int, int]]:
    """Our server once all of its workers listen: process id and port."""
    port = free_port()
    options = ["--port", str(port), "--workers", str(workers)]
    with running(["-m", "sorl_tools.serve.cli", str(source), *options], port, "/ready") as pid:
        deadline = time.monotonic() + 120
        while len({_worker(port) for _ in range(40)}) < workers:
            if time.monotonic() > deadline:
                raise RuntimeError("not all workers listen")
            time.sleep(0.2)
        yield pid, port


def _worker(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
        return int(json.load(response)["pid"])


def load(
    port: int, questions: Path, seconds: float, connections: int, queries: Sequence[int]
) -> dict[str, Any]:
    """What ``load.py`` measures in a process of its own; ``errors`` counts the requests that failed."""
    options = ["--port", port, "--questions", questions, "--seconds", seconds, "--connections", connections]
    command = [sys.executable, HERE / "load.py", *options, "--queries", *queries]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return {**result, "errors": result["requests"] - result["statuses"].get("200", 0) + result["broken"]}


def memory_mb(pid: int) -> float:
    """Memory of a process and its children; pages that they share count once (PSS)."""
    total = 0.0
    for one in [pid, *_children(pid)]:
        with contextlib.suppress(OSError):
            found = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{one}/smaps_rollup").read_text(), re.M)
            total += int(found[1]) / 1024 if found else 0.0
    return total


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        own = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in own] + [g for child in own for g in _children(int(child))]
    return []
