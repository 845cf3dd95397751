"""A task of ours through OpenEnv, over loopback: the same trajectories as in process; outages; tokens and limits."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from sorl_env import StopReason, Task, ToolUseEnv, Trajectory, UserError, load_task
from sorl_env.envs.text_env import TextEnv, open_env
from sorl_env.rollout import RolloutJob, RolloutSettings, collect
from tests.tools.serve_env.servers import Process, serve_task
from tests.trajectories import Scripted

pytest.importorskip("websockets", reason="needs websockets: pip install -e '.[train]'")
pytestmark = [pytest.mark.openenv, pytest.mark.slow]

JOBS = [RolloutJob(f"g{i}/0", f"g{i}", i, 100 + i) for i in range(12)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    process = serve_task("minihop", tmp_path_factory.mktemp("server"))
    yield process
    process.kill()


class Bytes:
    """A tokenizer whose tokens are bytes."""

    chat_template = None
    eos_token_id = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode("utf-8", "replace")

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any: ...


ROOM = {"max_prompt_tokens": 1000, "max_observation_tokens": 2000, "max_trajectory_tokens": 9000}


def scripts(task: Task) -> dict[str, Sequence[str]]:
    """The expert's turns for each job; some go wrong in different ways."""
    env, found = ToolUseEnv(task), {}
    for job in JOBS:
        env.reset(seed=job.seed, options={"index": job.example_index})
        turns, seen = [], []
        while (turn := task.expert(env.example, seen)) is not None:  # type: ignore[misc]
            turns.append(turn)
            result = env.step(turn)
            seen.append(result.observation)
            if result.terminated or result.truncated:
                break
        if job.example_index % 4 == 1:
            turns.insert(0, "<search> no think block </search>")
        if job.example_index % 4 == 2:
            turns = ["<think> again </think> <search> founder </search>"] * 5
        found[job.id] = turns
    return found


def record(trajectory: Trajectory) -> dict[str, Any]:
    """All of a trajectory but its clocks and where its questions came from."""
    plain = dataclasses.asdict(trajectory)
    del plain["task"], plain["source"]
    for name in ("token_ids", "action_mask", "turn_ids", "rollout_log_probs"):
        plain[name] = plain[name].tolist()
    for turn in plain["turns"]:
        del turn["generate_s"], turn["tool_s"]
        turn["tool_calls"] = [call._replace(latency_s=0.0) for call in turn["tool_calls"]]
    return plain


def both(server: Process, split: str = "train", **limits: int) -> tuple[TextEnv, TextEnv]:
    tasks = load_task("minihop"), load_task(f"openenv:{server.url}")
    here, there = (
        open_env(task, split=split, limits=dataclasses.replace(task.limits, **limits)) for task in tasks
    )
    return here, there


def play(env: TextEnv, tokenizer: Any, sampler: Any, **settings: Any) -> list[Trajectory]:
    return asyncio.run(collect(env, tokenizer, sampler, JOBS, RolloutSettings(temperature=0.0, **settings)))


@pytest.mark.parametrize("limits", [{}, {"max_trajectory_tokens": 600}], ids=["whole", "out of tokens"])
def test_scripted_trajectories_are_the_same_through_the_server(
    server: Process, limits: dict[str, int]
) -> None:
    tokenizer = Bytes()
    turns = scripts(load_task("minihop"))
    here, there = (
        play(env, tokenizer, Scripted(tokenizer, turns)) for env in both(server, **(ROOM | limits))
    )
    assert [record(t) for t in there] == [record(t) for t in here]
    reasons = {t.stop_reason for t in there}
    assert reasons >= ({StopReason.MAX_TOKENS} if limits else {StopReason.ANSWER, StopReason.MAX_TURNS})
    assert any(call.hits for t in there for turn in t.turns for call in turn.tool_calls)


def test_a_killed_server_is_an_outage_and_one_that_returns_is_waited_for(tmp_path: Path) -> None:
    tokenizer = Bytes()
    process = serve_task("minihop", tmp_path)
    port = int(process.url.rpartition(":")[2])
    task = load_task(f"openenv:{process.url}", wait_s=600.0)
    env = open_env(task, limits=dataclasses.replace(task.limits, **ROOM))
    turns = scripts(load_task("minihop"))
    servers = [process]

    def restart(job: str, turn: int) -> None:
        if job == "g3/0" and turn == 1:
            servers[0].kill()
            servers.append(serve_task("minihop", tmp_path, port=port))

    found = play(env, tokenizer, Scripted(tokenizer, turns, restart), max_concurrency=4)
    servers[-1].kill()
    lost = [t for t in found if t.stop_reason is StopReason.ERROR]
    assert lost and all(t.excluded and t.reward == 0 and "the episode was lost" in str(t.error) for t in lost)
    assert {t.id for t in lost} <= {f"g{i}/0" for i in range(4)}  # later episodes found the new server
    assert all(t.stop_reason in (StopReason.ANSWER, StopReason.MAX_TURNS) for t in found[4:])

    short = with_a_short_wait(env)
    (trajectory,) = asyncio.run(collect(short, tokenizer, Scripted(tokenizer, turns), JOBS[:1]))
    assert trajectory.excluded and not trajectory.turns and "no episode began" in str(trajectory.error)
    with pytest.raises(UserError, match="does not answer"):
        load_task(f"openenv:{process.url}")


def with_a_short_wait(env: Any) -> Any:
    """The environment, which gives a server that is gone up soon."""
    from sorl_env.bridges.openenv_client import OpenEnvSession

    known = env._open_session()._server
    env._open_session = lambda: OpenEnvSession(dataclasses.replace(known, wait_s=0.3))
    return env


def test_a_full_server_is_waited_for(tmp_path: Path) -> None:
    tokenizer = Bytes()
    process = serve_task("minihop", tmp_path, "--max_sessions", "2")
    task = load_task(f"openenv:{process.url}")
    env = open_env(task, limits=dataclasses.replace(task.limits, **ROOM))
    found = play(env, tokenizer, Scripted(tokenizer, scripts(load_task("minihop"))))
    process.kill()
    assert not any(t.excluded for t in found)


def test_the_token_is_asked_for_and_limits_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect

    (tmp_path / "token").write_text("secret")
    options = ("--token_file", str(tmp_path / "token"), "--session_idle_s", "20", "--max_body_kb", "4")
    process = serve_task("minihop", tmp_path, *options)
    try:
        for method, path in (
            ("GET", "/state"),
            ("POST", "/reset"),
            ("POST", "/mcp"),
            ("GET", "/list_environments"),
        ):
            assert httpx.request(method, process.url + path).status_code == 401
        with pytest.raises(UserError, match="SORL_OPENENV_TOKEN"):
            load_task(f"openenv:{process.url}")
        monkeypatch.setenv("SORL_OPENENV_TOKEN", "secret")
        env = open_env(load_task(f"openenv:{process.url}"))
        assert asyncio.run(env.areset(0, 0)).startswith("Search, then answer.")
        too_long = httpx.post(
            f"{process.url}/reset", content=b"x" * 5000, headers={"Authorization": "Bearer secret"}
        )
        assert too_long.status_code == 413
        address = process.url.replace("http", "ws") + "/ws"
        headers = {"Authorization": "Bearer secret"}
        with connect(address, additional_headers=headers) as idle, pytest.raises(ConnectionClosed):
            idle.recv(timeout=600)  # after twenty seconds of silence
        with connect(address, additional_headers=headers) as large, pytest.raises(ConnectionClosed):
            large.send(json.dumps({"type": "step", "data": {"message": "x" * 10_000}}))
            large.recv(timeout=600)
        with connect(address, additional_headers=headers) as no_object:
            no_object.send("[]")
            assert json.loads(no_object.recv(timeout=600))["type"] == "error"
        with connect(address, additional_headers=headers) as wrong:
            for message in (
                "{",
                '{"type": "step", "data": {"message": "x"}}',
                '{"type": "reset", "data": 3}',
            ):
                wrong.send(message)
                assert json.loads(wrong.recv(timeout=600))["type"] == "error"
            wrong.send('{"type": "reset", "data": {"split": "test", "index": 99999}}')
            assert "no task 99999" in wrong.recv(timeout=600)
            wrong.send('{"type": "reset", "data": {"seed": 5}}')
            assert json.loads(wrong.recv(timeout=600))["type"] == "observation"
    finally:
        process.kill()


def test_a_web_page_plays_no_episodes(server: Process) -> None:
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    address = server.url.replace("http", "ws") + "/ws"
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(InvalidStatus, match="403"):
        connect(address, origin="http://evil.example")  # type: ignore[arg-type]
    with pytest.raises(InvalidStatus, match="403"):
        connect(f"ws://evil.example:{port}/ws", sock=socket.create_connection(("127.0.0.1", port)))
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
        assert httpx.post(f"{server.url}/reset", content=b"{}", headers=headers).status_code == 403
