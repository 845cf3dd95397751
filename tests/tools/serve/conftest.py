"""A real ``sorl-serve`` in a process of its own."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ...processes import Process

for package in ("httptools", "msgspec", "numba", "prometheus_client", "starlette", "uvicorn"):
    pytest.importorskip(package, reason="needs the search extra: pip install -e '.[search]'")

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


class ServerProcess(Process):
    """``sorl-serve`` on a free port. Use as a context."""

    def __init__(self, source: Path, *options: str, cache: Path, port: int = 0, ready: bool = True) -> None:
        command = ("sorl_tools.serve.cli", str(source), "--port", str(port), *options)
        super().__init__(*command, address=r"http://\S+:(\d+)/retrieve", SORL_CACHE=str(cache))
        self.url = f"http://127.0.0.1:{self.port}/retrieve"
        if ready:
            self.wait_for("ready: ")

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
