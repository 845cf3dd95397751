"""Circuit breakers, on a clock that the test moves."""

from __future__ import annotations

import pytest

from sorl_tools.search import http_servers
from sorl_tools.search.http_servers import Attempt, ServerPool


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(http_servers.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(http_servers._jitter, "uniform", lambda low, high: low)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def begin(pool: ServerPool, *tried: str) -> Attempt:
    attempt = pool.begin(tried)
    assert isinstance(attempt, Attempt)
    return attempt


def test_three_failures_in_a_row_rest_a_server(clock: Clock) -> None:
    pool = ServerPool(["a"])
    for _ in range(2):
        pool.finish(begin(pool), "refused")
    pool.finish(begin(pool))  # an answer in between: the count starts anew
    for _ in range(3):
        pool.finish(begin(pool), "refused")
    assert pool.begin() == pytest.approx(0.5)
    clock.now += 0.2
    assert pool.begin() == pytest.approx(0.3)


def test_one_request_tries_a_server_that_rested(clock: Clock) -> None:
    pool = ServerPool(["a"])
    for _ in range(3):
        pool.finish(begin(pool), "refused")
    clock.now += 0.5
    for pause in (1.0, 2.0, 4.0, 8.0, 8.0):
        probe = begin(pool)
        assert probe.is_probe
        assert isinstance(pool.begin(), float)  # the others wait for what comes of it
        pool.finish(probe, "refused")
        assert pool.begin() == pytest.approx(pause)
        clock.now += pause
    pool.finish(begin(pool))
    assert not begin(pool).is_probe and not begin(pool).is_probe


def test_failures_of_requests_that_were_under_way_count_once(clock: Clock) -> None:
    pool = ServerPool(["a"])
    under_way = [begin(pool) for _ in range(100)]
    clock.now += 1.0
    for attempt in under_way:
        pool.finish(attempt, "reset")
    assert pool.begin() == pytest.approx(0.5)  # and not the longest pause at once


def test_retry_after_is_kept_to(clock: Clock) -> None:
    pool = ServerPool(["a"])
    older = begin(pool)
    clock.now += 0.1
    pool.finish(begin(pool), "429", rest_s=20.0)
    clock.now += 0.1
    pool.finish(older)  # an answer to an older request does not cut it short
    assert pool.begin() == pytest.approx(19.9)
    clock.now += 20.0
    pool.finish(begin(pool))
    pool.finish(begin(pool), "503", rest_s=1e9)
    assert pool.begin() == pytest.approx(300.0)


def test_the_least_busy_server_is_asked(clock: Clock) -> None:
    pool = ServerPool(["a", "b"])
    urls = [begin(pool).server.url for _ in range(4)]
    assert sorted(urls) == ["a", "a", "b", "b"]
    assert begin(pool, "a").server.url == "b"
    assert pool.begin(("a", "b")) is None


def test_a_server_that_fails_is_asked_last(clock: Clock) -> None:
    pool = ServerPool(["a", "b"])
    pool.finish(begin(pool, "b"), "refused")
    assert [begin(pool).server.url for _ in range(3)] == ["b", "b", "b"]
    for _ in range(2):
        pool.finish(begin(pool, "b"), "refused")
    assert begin(pool).server.url == "b"
    assert isinstance(pool.begin(("b",)), float)


def test_a_cancelled_probe_leaves_the_turn_to_another(clock: Clock) -> None:
    pool = ServerPool(["a"])
    for _ in range(3):
        pool.finish(begin(pool), "refused")
    clock.now += 1.0
    pool.abandon(begin(pool))
    assert begin(pool).is_probe
    assert pool.servers[0].in_flight == 1
