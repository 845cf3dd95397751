"""Every fault of the list between the client and a real ``sorl-serve``: one more attempt, and a server that is well."""

from __future__ import annotations

from typing import Any

import pytest

from sorl_env.tool import ToolCall, ToolRequest
from sorl_env.toolbox import Toolbox
from sorl_tools.search.http import HttpSearch

from .faulty_server import FAULTS, HANGING, FaultyServer


@pytest.fixture(scope="module")
def on_the_way(server: Any) -> Any:
    proxy = FaultyServer(server.port)
    yield proxy
    proxy.close()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_on_the_way(server: Any, on_the_way: FaultyServer, name: str) -> None:
    search = HttpSearch(on_the_way.url, top_k=1, timeout_s=1.0 if name in HANGING else 30.0)
    box = Toolbox([search], timeout_s=60.0, backoff_s=0.01)
    first = box.call(ToolRequest("search", "river"))
    on_the_way.behaviours = [FAULTS[name]]
    again = box.call(ToolRequest("search", "river"))
    assert isinstance(first, ToolCall) and isinstance(again, ToolCall)
    assert (first.attempts, again.attempts) == (1, 2)
    assert again.reply == first.reply == "Doc 1 (Salzburg): A city on the Salzach. Its river is green."
    assert server.request("GET", "/ready").status == 200
    search.close()


def test_memory_stays_through_all_of_them(server: Any, on_the_way: FaultyServer) -> None:
    search = HttpSearch(on_the_way.url, top_k=1, timeout_s=5.0)
    box = Toolbox([search], timeout_s=5.0, backoff_s=0.001)
    quick = [fault for name, fault in FAULTS.items() if name not in HANGING]
    before = 0.0
    for turn in range(20):
        for fault in quick:
            on_the_way.behaviours = [fault]
            assert isinstance(box.call(ToolRequest("search", "river")), ToolCall)
        if turn == 4:
            before = server.memory_mb()
    assert server.memory_mb() < before + 10
    search.close()
