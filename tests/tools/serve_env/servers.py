"""Servers of OpenEnv in processes of their own."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


def openenv_python() -> str:
    """The Python of an environment that has openenv; skips the test if there is none."""
    named = os.environ.get("SORL_OPENENV_PYTHON")
    if named:
        return str(Path(named).absolute())
    if importlib.util.find_spec("openenv") is not None:
        return sys.executable
    pytest.skip("needs the environment with openenv: make test-openenv")


class Process:
    """A server that has been started and answers."""

    def __init__(self, arguments: Sequence[str], port: int, folder: Path, **variables: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"server-{port}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [openenv_python(), *arguments], cwd=folder, stdout=log, stderr=log, env=os.environ | variables
            )
        deadline = time.monotonic() + 600
        while True:
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"no server:\n{self.log.read_text()}")
            threading.Event().wait(0.1)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def serve_task(task: str, folder: Path, *options: str, port: int | None = None) -> Process:
    """``sorl-serve-env TASK``."""
    port = free_port() if port is None else port
    arguments = ["-m", "sorl_tools.serve_env.cli", task, "--port", str(port), *options]
    return Process(arguments, port, folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
