"""The dialects of ``/retrieve``: the clients of other projects, unchanged, against a live ``sorl-serve``."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest

QUERY = "composers born in Salzburg"
FOUND = [
    {"id": "1", "contents": '"Mozart"\nThe composer Mozart was born in Salzburg.'},
    {"id": "3", "contents": '"Mozart"\nThe composer Mozart was born in Salzburg.'},
]


def gem_search_tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class ``SearchTool`` of gem-llm.

    Its module needs msgspec and requests only, but importing the package ``gem`` imports all of its environments and
    what they need. An empty package with the same folder stands in for that, so that CI can install gem-llm alone.
    """
    spec = importlib.util.find_spec("gem")
    if spec is None or spec.origin is None or not (Path(spec.origin).parent / "tools").is_dir():
        pytest.skip("needs gem-llm: make .venv/.interop, or pip install --no-deps gem-llm==0.1.0")
    bare = types.ModuleType("gem")
    bare.__path__ = [str(Path(spec.origin).parent)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "gem"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gem", bare)
    module = importlib.import_module("gem.tools.search_tool")
    for name in [name for name in sys.modules if name.startswith("gem.")]:
        monkeypatch.setitem(sys.modules, name, sys.modules[name])  # removed again after the test
    return module.SearchTool


def test_gem(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = gem_search_tool(monkeypatch)(search_url=server.url, topk=2)
    is_valid, has_error, observation, action = tool.execute_action(f"x <search> {QUERY} </search> rest")
    assert (is_valid, has_error) == (True, False)
    assert action == f"x <search> {QUERY} </search>"
    assert observation == (
        '\n\n<information>Doc 1(Title: "Mozart") The composer Mozart was born in Salzburg.\n'
        'Doc 2(Title: "Mozart") The composer Mozart was born in Salzburg.\n</information>\n\n'
    )
    assert tool.execute_action("<search> grünen Übung </search>")[1] is False
    assert tool.execute_action("<search> nothing-of-this </search>")[2] == (
        "\n\n<information></information>\n\n"
    )


def test_skyrl(server: Any) -> None:
    search = pytest.importorskip(
        "skyrl_gym.tools.search", reason="needs skyrl-gym: pip install -e '.[interop]'"
    )
    reply, error = search.call_search_api(server.url, QUERY, topk=2)
    assert error is None
    assert [hit["document"] for hit in reply["result"][0]] == FOUND
    assert all(hit["score"] > 0 for hit in reply["result"][0])
    tools = search.SearchToolGroup(server.url, topk=2)
    assert json.loads(tools.search(f" {QUERY} ")) == {
        "result": 'Doc 1: "Mozart"\nThe composer Mozart was born in Salzburg.\n'
        'Doc 2: "Mozart"\nThe composer Mozart was born in Salzburg.\n'
    }
    assert json.loads(tools.search("nothing-of-this")) == {"result": ""}
    reply, error = search.call_search_api(server.url, "x" * 201)
    assert reply is None and "422" in error


def test_a_token_in_the_address(start: Any, tmp_path: Path) -> None:
    search = pytest.importorskip(
        "skyrl_gym.tools.search", reason="needs skyrl-gym: pip install -e '.[interop]'"
    )
    (tmp_path / "token").write_text("s3/cret:x")
    server = start("--token-file", str(tmp_path / "token"))
    reply, error = search.call_search_api(server.url, QUERY)
    assert reply is None and "401" in error
    right = server.url.replace("http://", "http://any:s3%2Fcret%3Ax@")
    reply, error = search.call_search_api(right, QUERY)
    assert error is None and reply["result"][0][0]["document"] == FOUND[0]
    for wrong in ("any:other@", "s3%2Fcret%3Ax@", ":@"):
        reply, error = search.call_search_api(server.url.replace("http://", f"http://{wrong}"), QUERY)
        assert reply is None and "401" in error


def test_messagepack_on_the_wire(server: Any) -> None:
    def ask(body: bytes) -> Any:
        reply = server.request("POST", "/retrieve", body)
        return reply.status, reply.headers["content-type"], reply.body

    one = msgspec.msgpack.encode({"query": QUERY, "topk": 1, "return_scores": False})
    status, kind, body = ask(one)
    assert (status, kind) == (200, "application/msgpack")
    assert msgspec.msgpack.decode(body) == {"result": [{"document": FOUND[0], "score": None}]}
    many = msgspec.msgpack.encode({"queries": [QUERY] * 65})
    assert ask(many)[:2] == (422, "application/json")
    assert ask(one[:-1])[0] == 400
    assert ask(b"\x80" * 5_000_000)[0] == 413
