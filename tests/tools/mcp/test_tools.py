"""The tools of MCP servers in a toolbox: one in this process, and servers that hang, die and lie."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sorl_env.errors import UserError
from sorl_env.tool import ToolCall, ToolRequest, ToolUnavailableError
from sorl_env.tool.toolbox import Toolbox
from sorl_tools.mcp import McpServer, mcp_tools, server

from ...waiting import wait_until
from . import servers

pytest.importorskip("mcp", reason="needs pip install -e '.[mcp]'")

SERVERS = str(Path(servers.__file__))


def command(*words: str) -> str:
    return shlex.join([sys.executable, SERVERS, *words])


Box = Callable[..., Toolbox]


@pytest.fixture
def box() -> Iterator[Box]:
    """Makes toolboxes with the tools of a server, which are closed after the test."""
    made: list[Toolbox] = []

    def make(server: Any, *, connect_s: float = 60.0, per_episode: bool = False, **settings: Any) -> Toolbox:
        tools = mcp_tools(server, connect_s, per_episode=per_episode)
        for tool in tools:
            tool.server.timeout_s = settings.get("timeout_s", 60.0)
        made.append(Toolbox(tools, **{"timeout_s": 60.0, "retries": 0, "backoff_s": 0.01, **settings}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def ask(toolbox: Toolbox, name: str, argument: str) -> ToolCall:
    outcome = toolbox.call(ToolRequest(name, argument))
    assert isinstance(outcome, ToolCall), outcome
    return outcome


def outage(toolbox: Toolbox, name: str, argument: str) -> str:
    outcome = toolbox.call(ToolRequest(name, argument))
    assert isinstance(outcome, ToolUnavailableError), outcome
    return str(outcome)


def test_a_server_in_this_process(box: Box) -> None:
    toolbox = box(servers.stock_server())
    assert toolbox.names == ("shelf", "note_add")
    assert toolbox.stateful == frozenset()
    shelf, note = toolbox.tools
    assert " ".join(shelf.description.split()) == "List what lies on a shelf, given its name."
    assert note.schema["properties"]["times"]["type"] == "integer"
    assert shelf.fingerprint == "MCPServer stock (stock 1.2)"  # type: ignore[attr-defined]
    assert ask(toolbox, "shelf", "oak A 1").reply == "bolts 7 , lamps 3"
    assert ask(toolbox, "note_add", '{"line": "é", "times": 2}').reply == "é / é"


def test_what_the_policy_gets_wrong_it_reads(box: Box) -> None:
    toolbox = box(servers.stock_server())
    wrong = ask(toolbox, "shelf", "no such shelf")
    assert not wrong.ok and "there is no shelf no such shelf" in wrong.reply
    for argument in ("x", "{}", '{"line": 1}', '{"line": "a", "times": "2"}', '{"line": "a", "other": 1}'):
        assert not ask(toolbox, "note_add", argument).ok
    assert not ask(toolbox, "note.add", "x").ok


def test_calls_on_an_event_loop_and_side_by_side(box: Box) -> None:
    toolbox = box(servers.stock_server())

    async def ask_many() -> list[Any]:
        requests = [ToolRequest("shelf", name) for name in list(servers.STOCK) * 10]
        return await asyncio.gather(*map(toolbox.acall, requests))

    assert [one.reply for one in asyncio.run(ask_many())] == list(servers.STOCK.values()) * 10
    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda name: ask(toolbox, "shelf", name).reply, list(servers.STOCK) * 10))
    assert replies == list(servers.STOCK.values()) * 10


def test_a_server_that_keeps_state_is_one_for_each_episode(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process ends in the background, because other episodes go on in the event loop."""
    waits: list[bool] = []
    close = server._Connection.close
    monkeypatch.setattr(
        server._Connection, "close", lambda self, *, wait=False: (waits.append(wait), close(self, wait=wait))
    )
    toolbox = box(command("liar", "pid"), per_episode=True)
    assert toolbox.stateful == {"shelf"}
    first, second = toolbox.for_episode(None, 0), toolbox.for_episode(None, 0)
    pids = [ask(one, "shelf", "x").reply for one in (first, second, first)]
    assert pids[0] == pids[2] != pids[1]
    assert not any(running(int(pid)) is False for pid in pids)
    waits.clear()
    first.close(only=first.stateful)
    second.close(only=second.stateful)
    assert waits == [False, False]
    wait_until(lambda: not running(int(pids[0])) and not running(int(pids[1])))


@pytest.mark.slow
def test_a_slow_end_is_waited_for_at_the_end_of_the_process() -> None:
    """Of the server of an episode that ended just before."""
    program = """if True:
        import sys
        from sorl_env.tool import ToolRequest
        from sorl_env.tool.toolbox import Toolbox
        from sorl_tools.mcp import mcp_tools
        episode = Toolbox(mcp_tools(sys.argv[1], per_episode=True)).for_episode(None, 0)
        print(episode.call(ToolRequest("shelf", "x")).reply)
        episode.close(only=episode.stateful)
    """
    words = [sys.executable, "-c", program, command("liar", "linger")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not running(int(done.stdout)), done.stderr


def test_a_shared_server_is_one_for_all(box: Box) -> None:
    toolbox = box(command("liar", "pid"))
    pids = {ask(toolbox.for_episode(None, seed), "shelf", "x").reply for seed in range(3)}
    assert len(pids) == 1
    toolbox.close()
    assert not running(int(pids.pop()))


def running(pid: int) -> bool:
    """Whether there is such a process; one that has ended and was not waited for does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("lie", "reply", "is_ok"),
    [
        ("wrong id first", "for you", True),
        ("image", "[image image/png: not a text, left out]\na shelf", True),
        ("is_error", "there is no such shelf", False),
    ],
)
def test_odd_answers(box: Box, lie: str, reply: str, is_ok: bool) -> None:
    call = ask(box(command("liar", *lie.split())), "shelf", "x")
    assert (call.reply, call.ok) == (reply, is_ok)


@pytest.mark.parametrize(
    ("lie", "message"), [("die", "Connection closed"), ("no content", "content"), ("bug", "something broke")]
)
def test_what_is_an_outage(box: Box, lie: str, message: str) -> None:
    toolbox = box(command("liar", *lie.split()))
    assert message in outage(toolbox, "shelf", "x")
    assert "unavailable after 1 try" in outage(toolbox, "shelf", "x")


@pytest.mark.parametrize("lie", ["hang", "wrong id", "no JSON", "surrogate", "null"])
def test_what_does_not_answer_is_given_up_at_the_deadline(box: Box, lie: str) -> None:
    toolbox = box(command("liar", *lie.split()), timeout_s=2.0)
    started = time.monotonic()
    # versions of the client refuse null, or go on waiting for another reply
    assert lie == "null" or "no reply from" in outage(toolbox, "shelf", "x")
    assert outage(toolbox, "shelf", "x")
    assert time.monotonic() - started < 30


def test_a_server_that_died_is_started_again(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    toolbox = box(command("liar", "die", "once"), retries=2)
    call = ask(toolbox, "shelf", "x")
    assert (call.reply, call.attempts) == ("back", 2)


@pytest.mark.parametrize("on_loop", [False, True])
def test_a_server_that_hangs_is_started_again(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_loop: bool
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    toolbox = box(command("liar", "hang", "once"), timeout_s=5.0)

    def call() -> Any:
        request = ToolRequest("shelf", "x")
        return asyncio.run(toolbox.acall(request)) if on_loop else toolbox.call(request)

    assert isinstance(call(), ToolUnavailableError)
    wait_until(lambda: toolbox.tools[0].server._connection is None)  # type: ignore[attr-defined]
    toolbox.timeout_s = 60.0
    toolbox.tools[0].server.timeout_s = 60.0  # type: ignore[attr-defined]
    assert call().reply == "back"


def test_the_state_of_an_episode_is_not_lost_silently(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    toolbox = box(command("liar", "die", "once"), retries=2, per_episode=True)
    episode = toolbox.for_episode(None, 0)
    assert "what it knew of the episode is lost" in outage(episode, "shelf", "x")
    assert ask(toolbox.for_episode(None, 0), "shelf", "x").reply == "back"


@pytest.mark.slow
def test_a_line_without_end(box: Box) -> None:
    toolbox = box(command("liar", "endless", "line"), timeout_s=3.0)
    assert "no reply from" in outage(toolbox, "shelf", "x")


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ("no schema", "does not list its tools"),
        ("list for a schema", "does not list its tools"),
        ("array", "does not list its tools"),
        ("no tools", "has no tools"),
        ("twice", "two of its tools would have the tag <a_b>"),
        ("text for tools", "does not list its tools"),
        ("endless listing", "does not end"),
    ],
)
def test_wrong_listings(lie: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        mcp_tools(command("liar", *lie.split()), 60.0)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ("", "gives no server"),
        ("no-such-program x", "there is no program 'no-such-program'"),
        ("'", "not a command"),
        ("http://", "no host"),
        ("http://127.0.0.1:1/mcp", "does not list its tools"),
        (f"{sys.executable} -c 1", "does not list its tools"),
    ],
)
def test_no_server(server: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        mcp_tools(server, 60.0)


def test_a_server_that_hangs_when_it_starts() -> None:
    with pytest.raises(UserError, match="no reply within 2 s"):
        mcp_tools(command("liar", "hang", "at", "once"), 2.0)


def test_an_episode_that_ends_while_its_server_starts_does_not_wait_for_it() -> None:
    hanging = McpServer(command("liar", "hang", "at", "once"), 4.0, keeps_state=True)
    with ThreadPoolExecutor() as threads:
        call = threads.submit(hanging.call, "search", {})
        wait_until(hanging._lock.locked)
        hanging.close(wait=False)
        assert not call.done()
        with pytest.raises(ToolUnavailableError, match="no reply within 4 s"):
            call.result()
