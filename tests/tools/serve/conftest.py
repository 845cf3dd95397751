"""A real ``sorl-serve`` in a process of its own."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

for package in ("httptools", "msgspec", "numba", "prometheus_client", "starlette", "uvicorn"):
    pytest.importorskip(package, reason="needs the search extra: pip install 'sorl[search]'")

ROWS = [
    {"id": "0", "contents": '"Bizet"\nThe composer Georges Bizet was born in Paris.'},
    {"id": "1", "contents": '"Mozart"\nThe composer Mozart was born in Salzburg.'},
    {"id": "2", "contents": '"Salzburg"\nA city on the Salzach. Its river is green.'},
    {"id": "3", "contents": '"Mozart"\nThe composer Mozart was born in Salzburg.'},
    {"id": "4", "contents": "Untitled: Übung im Grünen, naïve café."},
]


class Reply:
    """Status, headers and body of one answer."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class ServerProcess:
    """``sorl-serve`` on a free port. Use as a context; ``stop`` asks it to end and returns its exit status."""

    def __init__(self, source: Path, *options: str, cache: Path, port: int = 0, ready: bool = True) -> None:
        command = [sys.executable, "-m", "sorl_tools.serve.cli", str(source), "--port", str(port), *options]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "SORL_CACHE": str(cache), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # a shell's background jobs, and what they start, ignore Ctrl-C
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = int(self.wait_for(r"http://\S+:(\d+)/retrieve")[1])
        self.url = f"http://127.0.0.1:{self.port}/retrieve"
        if ready:
            self.wait_for("ready: ")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def wait_for(self, pattern: str, timeout_s: float = 60.0) -> re.Match[str]:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = re.search(pattern, "".join(self.lines))
            if found:
                return found
            if self.process.poll() is not None:
                self._reader.join(1.0)
                found = re.search(pattern, "".join(self.lines))
                if found:
                    return found
                break
            time.sleep(0.02)
        raise AssertionError(f"{pattern!r} was not printed: {''.join(self.lines)}")

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, headers or {})
            return Reply(connection.getresponse())
        finally:
            connection.close()

    def retrieve(self, **fields: Any) -> Reply:
        return self.request("POST", "/retrieve", json.dumps(fields).encode())

    def memory_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        self.process.send_signal(number)
        status = self.process.wait(timeout_s)
        self._close()
        return status

    def _close(self) -> None:
        self._reader.join(5.0)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._close()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path


Start = Callable[..., ServerProcess]


@pytest.fixture
def start(corpus: Path, cache: Path) -> Iterator[Start]:
    """Starts servers, which end with the test."""
    running: list[ServerProcess] = []

    def start_one(*options: str, source: Path = corpus, **more: Any) -> ServerProcess:
        running.append(ServerProcess(source, *options, cache=cache, **more))
        return running[-1]

    yield start_one
    for server in running:
        server.__exit__()


@pytest.fixture(scope="session")
def server(corpus: Path, cache: Path) -> Iterator[ServerProcess]:
    """One server for all tests that leave it as it is."""
    options = ["--max_queries", "64", "--max_query_chars", "200", "--stall_timeout_s", "3"]
    with ServerProcess(corpus, *options, cache=cache) as running:
        yield running
