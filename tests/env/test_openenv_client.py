"""The client of OpenEnv against servers that hang, die and lie; ``tests/tools/serve_env`` has real ones."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import pytest

from sorl_env import ToolUnavailableError, UserError, load_task, open_env
from sorl_env.envs.step import TurnInfo

pytest.importorskip("websockets", reason="needs websockets: pip install -e '.[train]'")
from websockets.datastructures import Headers
from websockets.http11 import Response
from websockets.sync.server import serve

ECHO = {"properties": {"message": {"type": "string"}, "metadata": {}}, "required": ["message"]}
Handle = Callable[[dict[str, Any]], str]


def observation(text: Any = "hello", reward: Any = 0.5, done: Any = False, **more: Any) -> str:
    data = {"observation": {"text": text, "metadata": {}}, "reward": reward, "done": done, **more}
    return json.dumps({"type": "observation", "data": data})


@contextmanager
def server(handle: Handle, action: Any = ECHO, pages: dict[str, bytes] | None = None) -> Iterator[str]:
    """A server that answers each message with what ``handle`` makes of it; an empty answer is none."""
    known = {"/schema": json.dumps({"action": action}).encode(), "/state": b"{}", **(pages or {})}

    def page(connection: Any, request: Any) -> Response | None:
        if request.path == "/ws":
            return None
        body = known.get(request.path, b"")
        status = HTTPStatus.OK if body else HTTPStatus.NOT_FOUND
        headers = Headers({"content-length": str(len(body)), "connection": "close"})
        return Response(status.value, status.phrase, headers, body)

    def talk(connection: Any) -> None:
        for message in connection:
            said = handle(json.loads(message))
            if said == "close":
                return
            if said:
                connection.send(said)

    with serve(talk, "127.0.0.1", 0, process_request=page, max_size=None) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.socket.getsockname()[1]}"
        finally:
            running.shutdown()
            thread.join()


def play(url: str, *turns: str, **knobs: Any) -> tuple[str, list[TurnInfo]]:
    env = open_env(load_task(f"openenv:{url}", **{"timeout_s": 2.0, "wait_s": 0.3, **knobs}))

    async def main() -> tuple[str, list[TurnInfo]]:
        try:
            prompt = await env.areset(0, 0)
            return prompt, [await env.astep(f"<action>{turn}</action>") for turn in turns]
        finally:
            env.end_episode()

    return asyncio.run(main())


def on_step(reply: str) -> Handle:
    return lambda message: observation() if message["type"] == "reset" else reply


def test_an_episode() -> None:
    seen: list[dict[str, Any]] = []

    def handle(message: dict[str, Any]) -> str:
        seen.append(message)
        if message["type"] == "reset":
            return observation("begin", None)
        return observation(message["data"]["message"][::-1], 0.25, message["data"]["message"] == "end")

    with server(handle) as url:
        prompt, (first, last) = play(url, "abc", "end")
    assert prompt.endswith("begin")
    assert first.observation == "\n\n<information>\ncba\n</information>\n\n"
    assert (first.reward, first.ended, last.reward, last.terminated) == (0.25, False, 0.25, True)
    assert seen[0] == {"type": "reset", "data": {"seed": 0}}
    assert seen[1] == {"type": "step", "data": {"message": "abc"}}


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("", "TimeoutError"),
        ("close", "ConnectionClosed"),
        ("{", "cannot be read"),
        ("[" * 1000 + "]" * 1000, "nested too deeply"),
        ("[]", "not a message of OpenEnv"),
        ('{"type": "state", "data": {}}', "of type 'state'"),
        ('{"type": "observation", "data": {}}', "another form"),
        (observation(done="yes"), "another form"),
        (observation(reward="much"), "a reward of 'much'"),
        (observation(reward=float("nan")), "a reward of 'nan'"),
        (observation(reward=1e999), "a reward of 'inf'"),
        (observation("x" * (5 << 20)), "ConnectionClosed"),
        ('{"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "a bug"}}', "a bug"),
        ('{"type": "error", "data": {"code": "CAPACITY_REACHED"}}', "the episode was lost"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_server_that_fails_is_an_outage_and_no_reward(reply: str, message: str) -> None:
    with server(on_step(reply)) as url:
        _, (result,) = play(url, "go", timeout_s=0.5 if not reply else 20.0)
    assert result.stop_reason == "error" and result.reward == 0 and result.ended
    assert message in result.error and len(result.error) <= 1000


@pytest.mark.parametrize("reply", ["", "close", '{"type": "error", "data": {"code": "CAPACITY_REACHED"}}'])
def test_a_server_without_a_place_is_waited_for_and_then_an_outage(reply: str) -> None:
    with server(lambda _: reply) as url, pytest.raises(ToolUnavailableError, match="no episode began within"):
        play(url, timeout_s=0.2)


def test_what_the_policy_does_wrong_it_reads() -> None:
    refused = '{"type": "error", "data": {"code": "VALIDATION_ERROR", "errors": [{"msg": "too short"}]}}'
    with server(on_step(refused)) as url:
        _, results = play(url, "go", "on")
    assert all("too short" in r.observation and not r.ended for r in results)
    with server(lambda _: refused) as url, pytest.raises(ToolUnavailableError, match="begins no episode"):
        play(url)
    two = {"properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"]}
    with server(lambda message: observation(json.dumps(message["data"]), 0), action=two) as url:
        _, results = play(url, '{"x": 1, "y": 2}', "north", "[1]", "{" * 9)
    assert '{"x": 1, "y": 2}' in results[0].observation
    assert all("must be a JSON object with x, y" in r.observation for r in results[1:])
    one = {"properties": {"move": {"type": "integer"}}, "required": ["move"]}
    with server(lambda message: observation(json.dumps(message["data"]), 0), action=one) as url:
        assert '{"move": 3}' in play(url, "3")[1][0].observation


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ({"/schema": b"not json"}, "cannot be read"),
        ({"/schema": b"[]"}, "not what an OpenEnv server says"),
        ({"/schema": b'{"action": 3}'}, "no schema of an action"),
        ({"/schema": b" " * (5 << 20)}, "longer than"),
        ({"/state": b'{"sorl": {"protocol": 99}}'}, "the same version of sorl"),
        ({"/state": b'{"sorl": {"protocol": 1, "limits": {"max_turns": -1}}}'}, "cannot be read"),
        ({"/state": b'{"sorl": 3}'}, "cannot be read"),
    ],
)
def test_what_is_no_server_of_openenv_is_refused(pages: dict[str, bytes], message: str) -> None:
    with server(lambda _: "", pages=pages) as url, pytest.raises(UserError, match=message):
        load_task(f"openenv:{url}")


def test_settings_are_checked() -> None:
    for knobs in ({"timeout_s": 0}, {"wait_s": 1e9}, {"examples": 0}, {"format": "xml"}):
        with pytest.raises(UserError, match=next(iter(knobs))):
            load_task("openenv:http://127.0.0.1:1", **knobs)
    with pytest.raises(UserError, match="write openenv:http"):
        load_task("openenv:127.0.0.1:80")
    with pytest.raises(UserError, match="does not answer"):
        load_task("openenv:http://127.0.0.1:1")
