"""``sorl-serve`` in a process: the protocol, what it refuses, and how it ends."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sorl_tools.index.build.build import build
from sorl_tools.index.index import read_manifest
from sorl_tools.search.bm25_search import BM25Search
from sorl_tools.search.http import HttpSearch

from ...waiting import wait_until

EXCHANGES = json.loads((Path(__file__).parent / "data" / "search_r1_exchanges.json").read_text("utf-8"))


def post_as_search_r1(url: str, payload: dict[str, Any]) -> dict[str, Any]:
    """A client made from the format alone."""
    request = urllib.request.Request(
        url, json.dumps(payload).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        body: dict[str, Any] = json.load(response)
        return body


def without_scores(reply: dict[str, Any]) -> dict[str, Any]:
    """The reply with its scores checked and replaced."""

    def blank(hit: dict[str, Any]) -> dict[str, Any]:
        if "score" not in hit:
            return hit
        assert isinstance(hit["score"], float) and hit["score"] > 0
        return {**hit, "score": "SCORE"}

    return {"result": [[blank(hit) for hit in hits] for hits in reply["result"]]}


@pytest.mark.parametrize("exchange", EXCHANGES["exchanges"], ids=lambda e: json.dumps(e["request"])[:40])
def test_recorded_exchanges(server: Any, exchange: dict[str, Any]) -> None:
    reply = post_as_search_r1(server.url, exchange["request"])
    assert set(reply) == {"result"}
    assert without_scores(reply) == exchange["reply"]


def test_finds_what_the_search_in_process_finds(
    server: Any, corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SORL_CACHE", str(cache))
    local = BM25Search.from_file(corpus, top_k=3)
    queries = ["composers born in Salzburg", "green river", "nothing of this", "", "Mozart Mozart", "Übung"]
    remote = HttpSearch(server.url, top_k=3)
    assert [remote(query) for query in queries] == [local(query) for query in queries]
    assert remote.fingerprint == local.fingerprint
    reply = server.retrieve(queries=queries, topk=3, return_scores=True).json["result"]
    for query, hits in zip(queries, reply, strict=True):
        found = [(hit["document"]["id"], hit["score"]) for hit in hits]
        assert found == [(p.id, pytest.approx(s, rel=1e-6)) for p, s in local.retrieve(query)]
    remote.close()


def test_a_built_index(start: Any, server: Any, corpus: Path, tmp_path: Path) -> None:
    build([corpus], tmp_path / "index")
    running = start(source=tmp_path / "index")
    health = running.request("GET", "/health").json
    assert health["fingerprint"] == read_manifest(tmp_path / "index").hash
    asked = {"queries": ["composers born in Salzburg", "river", "Mozart"], "topk": 3, "return_scores": True}
    assert post_as_search_r1(running.url, asked) == post_as_search_r1(server.url, asked)


def test_health_ready_and_metrics(server: Any) -> None:
    health = server.request("GET", "/health").json
    assert health["status"] == "ok" and health["passages"] == 5 and health["backend"] == "bm25"
    assert server.request("GET", "/ready").json == {"ready": True}
    before = counters(server)
    reply = server.retrieve(queries=["a", "b", "b"])
    assert reply.headers["x-sorl-fingerprint"] == health["fingerprint"]
    assert server.retrieve(queries="x").status == 422
    after = counters(server)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown['sorl_serve_requests_total{status="200"}'] == 1
    assert grown['sorl_serve_requests_total{status="422"}'] == 1
    assert grown["sorl_serve_queries_total"] == 3
    assert grown["sorl_serve_batch_queries_sum"] == 2  # "b" was searched once
    assert grown["sorl_serve_request_seconds_count"] == 2
    assert after["process_resident_memory_bytes"] > 1e6


def counters(server: Any) -> dict[str, float]:
    lines = server.request("GET", "/metrics").body.decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/retrieve", 405), ("POST", "/health", 405), ("GET", "/", 404), ("POST", "/search", 404)],
)
def test_wrong_paths_and_methods(server: Any, method: str, path: str, status: int) -> None:
    reply = server.request(method, path, b"{}" if method == "POST" else None)
    assert reply.status == status
    assert "/retrieve" in reply.json["error"] or "takes" in reply.json["error"]


def test_refused_requests_cost_nothing(server: Any) -> None:
    """What a broken or hostile client sends; the server says what is wrong, and neither grows nor ends."""
    many = json.dumps({"queries": ["x"] * 10_000}).encode()
    bodies = [
        (many, 422),
        (b"x" * 50_000_000, 413),
        (b'{"queries": ["\xff"]}', 400),
        (b"{}", 422),
        (b"", 400),
        (b"[" * 1_000_000, 4),
    ]
    for round_number in range(4):
        for body, status in bodies:
            reply = server.request("POST", "/retrieve", body)
            assert reply.status == status or (status == 4 and reply.status in (400, 422))
            assert reply.json["error"]
        if round_number == 0:
            before = server.memory_mb()
    assert server.memory_mb() < before + 30
    assert server.retrieve(queries=["Mozart"], topk=1).json["result"][0][0]["id"] == "1"


def test_requests_at_a_time_are_searched_together(server: Any) -> None:
    before = counters(server)
    words = ["Mozart", "Bizet", "river", "café", "nothing"]
    ids = {"Mozart": ["1"], "Bizet": ["0"], "river": ["2"], "café": ["4"], "nothing": []}

    def ask(number: int) -> bool:
        queries = [words[(number + i) % 5] for i in range(1 + number % 4)]
        reply = server.retrieve(queries=queries, topk=1).json["result"]
        return [[hit["id"] for hit in hits] for hits in reply] == [ids[query] for query in queries]

    with ThreadPoolExecutor(32) as threads:
        assert all(threads.map(ask, range(400)))
    after = counters(server)
    requests = after["sorl_serve_request_seconds_count"] - before["sorl_serve_request_seconds_count"]
    batches = after["sorl_serve_batch_queries_count"] - before["sorl_serve_batch_queries_count"]
    assert requests == 400 and batches < 400


def test_a_token(start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("s3cret-t0ken\n")
    (tmp_path / "token").chmod(stat.S_IRUSR)
    guarded = start("--token-file", str(tmp_path / "token"))
    body = b'{"queries": ["Mozart"]}'
    for headers, said in [({}, "send Authorization"), ({"Authorization": "Bearer \xe9"}, "wrong token")]:
        reply = guarded.request("POST", "/retrieve", body, headers)
        assert reply.status == 401 and said in reply.json["error"]
        assert reply.headers["WWW-Authenticate"] == "Bearer"
    good = {"Authorization": "Bearer s3cret-t0ken"}
    assert guarded.request("POST", "/retrieve", body, good).status == 200
    assert guarded.request("GET", "/metrics").status == 401
    assert guarded.request("GET", "/metrics", headers=good).status == 200
    assert guarded.request("GET", "/ready").status == 200  # a probe holds no token
    search = HttpSearch(guarded.url)
    with pytest.raises(ValueError, match=r"answered 401: .*; set SORL_SEARCH_TOKEN to its token"):
        search("Mozart")
    search.close()
    monkeypatch.setenv("SORL_SEARCH_TOKEN", "s3cret-t0ken")
    search = HttpSearch(guarded.url)
    assert search("Mozart").hits == 2
    search.close()
    assert guarded.stop() == 0
    assert "s3cret" not in "".join(guarded.lines)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_ends_at_a_signal_and_answers_what_is_in_flight(start: Any, number: int, status: int) -> None:
    running = start()
    head = b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: 23\r\n\r\n"
    clients = [socket.create_connection(("127.0.0.1", running.port), timeout=30) for _ in range(60)]
    for client in clients:
        client.sendall(head + b'{"queries": [')  # in flight, with its end still to come
    assert running.request("GET", "/health").status == 200  # what came before it is in the server's hands
    running.process.send_signal(number)
    wait_until(lambda: refuses(running.port))
    for client in clients:
        client.sendall(b'"Mozart"]}')
    assert all(client.recv(65536).startswith(b"HTTP/1.1 200") for client in clients)
    for client in clients:
        client.close()
    assert running.process.wait(60) == status
    assert not any("Traceback" in line for line in running.lines)


def test_a_web_page_finds_nothing(server: Any) -> None:
    body = b'{"queries": ["Mozart"]}'
    rebound = {"Host": f"evil.example:{server.port}"}
    assert server.request("POST", "/retrieve", body, {"Origin": "http://evil.example"}).status == 403
    assert server.request("POST", "/retrieve", body, rebound).status == 403
    assert server.request("GET", "/metrics", None, rebound).status == 403


def test_three_thousand_requests_leave_nothing_behind(server: Any) -> None:
    def ask(count: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        for number in range(count):
            connection.request("POST", "/retrieve", json.dumps({"queries": [f"Mozart {number}"]}).encode())
            assert connection.getresponse().read()
        connection.close()

    ask(500)
    before = server.memory_mb()
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(ask, [500] * 6))
    assert server.memory_mb() < before + 10


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
    except ConnectionRefusedError:
        return True
    return False


def test_says_where_it_listens(start: Any) -> None:
    first = start()
    assert "warning" not in "".join(first.lines)
    open_to_all = start("--host", "0.0.0.0")
    open_to_all.wait_for("warning: anyone who can reach 0.0.0.0 may ask: there is no --token_file")


def run(*options: str, source: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sorl_tools.serve.cli", str(source), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.slow
def test_workers_share_a_port(start: Any) -> None:
    running = start("--workers", "2")
    wait_for_workers(running, 2)
    victim = running.request("GET", "/health").json["pid"]
    search = HttpSearch(running.url, top_k=1)
    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(resilient, search) for _ in range(400)]
        os.kill(victim, signal.SIGKILL)
        assert all(call.result() for call in calls)
    search.close()
    running.wait_for(r"worker \d ended with status -9 and is started again")
    assert victim not in wait_for_workers(running, 2)
    total = counters(running)['sorl_serve_requests_total{status="200"}']
    assert total >= 350  # of all workers, the dead one included
    assert running.stop() == 0


@pytest.mark.slow
def test_workers_end_with_their_supervisor(start: Any) -> None:
    running = start("--workers", "2")
    workers = wait_for_workers(running, 2)
    running.process.kill()
    running.process.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


@pytest.mark.slow
def test_workers_that_cannot_open_the_source(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"id": 1}\n')
    done = run("--workers", "2", "--port", "0", source=tmp_path / "broken.jsonl")
    assert done.returncode == 2
    assert done.stderr.count("broken.jsonl:1: not a passage") == 1 and "Traceback" not in done.stderr


def wait_for_workers(running: Any, count: int) -> set[int]:
    """The processes that answer, once there are ``count``."""

    def answering() -> set[int]:
        pids = {running.request("GET", "/health").json["pid"] for _ in range(20)}
        return pids if len(pids) == count else set()

    return wait_until(answering)


def resilient(search: HttpSearch) -> bool:
    for _ in range(5):
        try:
            return search("Mozart").hits == 1
        except RuntimeError:
            time.sleep(0.1)
    return False
