"""``sorl-serve-agent``: the wire format against a real server process, and what goes wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette", reason="needs the search extra: pip install -e '.[search]'")
pytest.importorskip("uvicorn", reason="needs the search extra: pip install -e '.[search]'")

from sorl_env.commands.command import run_command
from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.rollout import RolloutSettings, SampledTurn
from sorl_env.task import Example
from sorl_env.tool import ToolReply, ToolUnavailableError
from sorl_env.tool.toolbox import Toolbox
from sorl_tools.http_server.options import ServerSettings, bind
from sorl_tools.http_server.server import Server as HttpServer
from sorl_train.evaluate.arguments import find_source, make_envs, make_policy
from sorl_train.evaluate.ask import _parser as ask_parser
from sorl_train.evaluate.ask import ask
from sorl_train.evaluate.runner import Policy
from sorl_train.serve_agent.agent import Agent
from sorl_train.serve_agent.app import agent_app
from sorl_train.serve_agent.chat import ChatError, error_content, parse_request

from ...processes import Process
from ...trajectories import Scripted
from ...waiting import wait_until
from ..evaluate.completions_server import serving

CHAT = "/v1/chat/completions"


def asking(question: str, **more: Any) -> dict[str, Any]:
    return {"model": "agent", "messages": [{"role": "user", "content": question}], **more}


class Server(Process):
    """``sorl-serve-agent`` on a free port. Use as a context."""

    def __init__(self, *options: str) -> None:
        command = ("sorl_train.serve_agent.cli", "--port", "0", "--served_name", "agent", *options)
        super().__init__(*command, address=r"http://127\.0\.0\.1:(\d+)/v1: agent on minihop")
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)


@pytest.fixture(scope="module")
def run(cold_started_run: Path) -> Path:
    return cold_started_run


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[Server]:
    with Server("--model", str(run), "--hardware.threads", "1", "--sampler.max_concurrency", "4") as started:
        yield started


# --- a real process -------------------------------------------------------------------------------------------
def test_questions_in_flight_together_are_answered_as_sorl_ask_answers_them(
    run: Path, server: Server
) -> None:
    args = ask_parser().parse_args(["x", "--model", str(run), "--hardware.threads", "1"])
    source = find_source(args, args.model)
    assert source is not None
    (env,) = make_envs(args, [], source.config).values()
    policy, examples = make_policy(args, source, [env]), env.examples.examples[:12]
    sampling = dataclasses.replace(policy, settings=dataclasses.replace(policy.settings, temperature=1.0))
    bodies = [
        asking(example.question, temperature=float(number % 2), seed=number)
        for number, example in enumerate(examples)
    ]
    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda body: server.client.post(CHAT, json=body), bodies))
    kinds = set()
    for number, (example, reply) in enumerate(zip(examples, replies, strict=True)):
        expected, content = ask((policy, sampling)[number % 2], env, example, number), reply.json()
        assert reply.status_code == 200 and content["object"] == "chat.completion"
        (choice,) = content["choices"]
        assert [turn["text"] for turn in content["sorl"]["turns"]] == [turn.text for turn in expected.turns]
        observations = [turn["observation"] for turn in content["sorl"]["turns"]]
        assert observations == [turn.observation for turn in expected.turns]
        last = expected.turns[-1]
        answered = last.kind == "answer"
        kinds.add(answered)
        assert choice["message"]["content"] == (last.content if answered else None)
        assert choice["finish_reason"] == ("stop" if answered else "length")
        total, drawn = len(expected.token_ids), expected.num_action_tokens
        usage = {"prompt_tokens": total - drawn, "completion_tokens": drawn, "total_tokens": total}
        assert content["usage"] == usage
    assert True in kinds
    assert server.client.get("/health").json() == {
        "status": "ok", "model": "agent", "task": "minihop", "in_flight": 0, "waiting": 0,
    }  # fmt: skip


def events(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of a streamed reply, which ends with [DONE]."""
    with server.client.stream("POST", CHAT, json=body) as reply:
        assert reply.status_code == 200 and reply.headers["content-type"] == "text/event-stream"
        lines = [line for line in reply.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_a_stream_tells_the_turns_then_the_answer(run: Path, server: Server) -> None:
    question = "What is the employer of nobody?"
    whole = server.client.post(CHAT, json=asking(question)).json()
    first, *turns = events(server, asking(question, stream=True, stream_options={"include_usage": True}))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    *turns, last, usage = turns
    if whole["choices"][0]["message"]["content"] is not None:
        *turns, answer = turns
        assert answer["choices"][0]["delta"]["content"] == whole["choices"][0]["message"]["content"]
    happened = [chunk["sorl"] for chunk in turns]
    assert happened == [
        {"turn": {"index": index, **turn}} for index, turn in enumerate(whole["sorl"]["turns"])
    ]
    assert last["sorl"] == whole["sorl"]
    assert last["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert {chunk["id"] for chunk in (first, *turns, last, usage)} == {first["id"]}


def test_max_tokens_bounds_what_follows_the_prompt(server: Server) -> None:
    whole = server.client.post(CHAT, json=asking("Who is it?")).json()
    cut = server.client.post(CHAT, json=asking("Who is it?", max_tokens=3)).json()
    assert (cut["sorl"]["stop_reason"], cut["choices"][0]["finish_reason"]) == ("max_tokens", "length")
    assert cut["usage"]["completion_tokens"] == 3 < whole["usage"]["completion_tokens"]
    assert len(cut["sorl"]["turns"]) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_question_that_does_not_fit(server: Server, stream: bool) -> None:
    reply = server.client.post(CHAT, json=asking("why " * 2000, stream=stream))
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "max_prompt_tokens" in error["message"]


def test_the_other_paths(server: Server) -> None:
    assert [entry["id"] for entry in server.client.get("/v1/models").json()["data"]] == ["agent"]
    assert server.client.get(CHAT).status_code == 405
    missing = server.client.post("/v1/completions", json={})
    assert missing.status_code == 404 and CHAT in missing.json()["error"]["message"]
    as_json = {"content-type": "application/json"}
    assert server.client.post(CHAT, content=b"{", headers=as_json).status_code == 400
    assert server.client.post(CHAT, content=b" " * (2 << 20), headers=as_json).status_code == 413


@pytest.mark.slow
def test_over_a_served_model_with_a_token(run: Path, tmp_path: Path) -> None:
    """The policy is on another server; ours holds the dialogue. It ends in order."""
    policy = str(run / "checkpoints" / "best" / "policy")
    (tmp_path / "token").write_text("secret\n")
    task = ["--task", "minihop", *world_of(run)]
    with serving(policy, vllm=True) as upstream:
        options = ["--endpoint", upstream.url, "--model_name", "tiny", "--tokenizer", policy]
        options += ["--timeout_s", "2"]
        with Server(*options, *task, "--token_file", str(tmp_path / "token")) as server:
            client, body = server.client, asking("What is the employer of nobody?")
            assert client.get("/health").status_code == 200
            refused = client.post(CHAT, json=body)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            client.headers["authorization"] = "Bearer wrong"
            assert client.get("/v1/models").json()["error"]["code"] == "invalid_api_key"
            client.headers["authorization"] = "Bearer secret"
            answered = client.post(CHAT, json=body)
            assert answered.status_code == 200 and answered.json()["sorl"]["turns"]
            upstream.faults[:] = [500] * 9
            out = client.post(CHAT, json=body)
            assert (out.status_code, out.json()["error"]["code"]) == (502, "policy_unavailable")
            assert server.stop() == 0


def world_of(run: Path) -> list[str]:
    from sorl_train.run.folder import saved_config

    return [f"--task_args.{name}={json.dumps(value)}" for name, value in saved_config(run).task_args.items()]


def test_openai_s_client_asks_and_streams(server: Server) -> None:
    openai = pytest.importorskip("openai", reason="needs OpenAI's client: pip install openai")
    question = "What is the employer of nobody?"
    with openai.OpenAI(base_url=f"{server.client.base_url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["agent"]
        asked: dict[str, Any] = {"model": "agent", "messages": [{"role": "user", "content": question}]}
        whole = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True))
        content = "".join(c.choices[0].delta.content or "" for c in chunks)
        assert (content or None) == whole.choices[0].message.content
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        happened = [chunk.sorl for chunk in chunks if getattr(chunk, "sorl", None)]
        told = [event["turn"] for event in happened if "turn" in event]
        assert [turn["text"] for turn in told] == [turn["text"] for turn in whole.sorl["turns"]]
        assert happened[-1] == whole.sorl
        with pytest.raises(openai.BadRequestError, match="this server does not support that"):
            client.chat.completions.create(**asked, n=2)


# --- requests -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ([], 400, None),
        ({"model": "agent"}, 400, "messages"),
        ({"messages": []}, 400, "model"),
        (asking("x", model="other"), 404, "model"),
        (asking("x", temprature=1), 400, "temprature"),
        (asking("x", temperature=3), 400, "temperature"),
        (asking("x", temperature=True), 400, "temperature"),
        (asking("x", top_p=0), 400, "top_p"),
        (asking("x", seed=-1), 400, "seed"),
        (asking("x", seed=0.5), 400, "seed"),
        (asking("x", max_tokens=0), 400, "max_tokens"),
        (asking("x", n=2), 400, "n"),
        (asking("x", stop=["."]), 400, "stop"),
        (asking("x", stream=1), 400, "stream"),
        (asking("x", stream_options={"include_usage": True}), 400, "stream_options"),
        (asking("x", tools=[{"type": "function"}]), 400, "tools"),
        (asking("x", response_format={"type": "json_object"}), 400, "response_format"),
        (asking("x", sorl={"options": {"1": "zinc"}}), 400, "sorl"),
        (asking(" "), 400, "messages"),
        ({"model": "agent", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
        ({"model": "agent", "messages": [{"role": "system", "content": "be kind"}]}, 400, "messages"),
        ({"model": "agent", "messages": [{"role": "user", "content": "x"}] * 2}, 400, "messages"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_by_name(body: Any, status: int, param: str | None) -> None:
    with pytest.raises(ChatError) as caught:
        parse_request(json.dumps(body).encode(), "agent")
    assert (caught.value.status, caught.value.param) == (status, param)
    assert error_content(caught.value)["error"]["type"] == "invalid_request_error"


def test_half_surrogate_pairs_in_a_request_are_replaced() -> None:
    body = asking("who \ud800?", sorl={"options": {"A": "\ude00\ud83d", "B": "\ud83d\ude00"}})
    request = parse_request(json.dumps(body).encode(), "agent")
    assert request.question == "who \ufffd?"
    assert request.sorl.options == {"A": "\ufffd\ufffd", "B": "\U0001f600"}


@pytest.mark.parametrize(
    "body",
    [
        *(b"[" * 100_000, b'{"model": ' * 5000, b'{"n": ' + b"1" * 5000 + b"}"),
        *(b"\xff", b'{"' + b"m" * 999_999 + b'": 1}'),
    ],
)
def test_hostile_json_in_a_request_is_refused(body: bytes) -> None:
    with pytest.raises(ChatError) as found:
        parse_request(body, "agent")
    assert found.value.status == 400 and len(str(found.value)) < 1000


def test_what_asks_for_nothing_is_taken() -> None:
    parts = [{"type": "text", "text": "Which?"}, {"type": "text", "text": "Now."}]
    body = asking("", user="me", n=1, stop=None, tools=[], presence_penalty=0, max_tokens=9, temperature=0)
    body["messages"][0]["content"] = parts
    body |= {
        "max_completion_tokens": 7,
        "sorl": {"options": {"A": "iron"}},
        "response_format": {"type": "text"},
    }
    asked = parse_request(json.dumps(body).encode(), "agent")
    assert (asked.question, asked.sorl.options) == ("Which?\nNow.", {"A": "iron"})
    assert (asked.temperature, asked.token_limit, asked.seed) == (0.0, 7, None)


# --- dialogues with a scripted policy -------------------------------------------------------------------------
class Out:
    """A search that is out, or finds one thing."""

    inline = True

    def __init__(self, tool: Any, works: bool) -> None:
        self.name, self.description, self.schema = tool.name, tool.description, tool.schema
        self.works = works

    def __call__(self, query: str) -> ToolReply:
        if not self.works:
            raise ToolUnavailableError("nobody there")
        return ToolReply("it", hits=1)


# of words that every such world has
TURNS = [f"<think> </think> <{tag}> employer </{tag}>" for tag in ("search", "answer")]


def scripted(
    env: ToolUseEnv, tokenizer: Any, turns: Sequence[str], works: bool = True, **options: Any
) -> tuple[Scripted, Agent]:
    with_tool = env.spawn()
    with_tool.toolbox = Toolbox([Out(tool, works) for tool in env.toolbox.tools], retries=0)
    script = Scripted(tokenizer, turns)
    settings = RolloutSettings(temperature=0.0, max_concurrency=1)
    return script, Agent(Policy(script, tokenizer, nullcontext, settings), with_tool, **options)


def send(agent: Agent, method: str, path: str, **what: Any) -> httpx.Response:
    async def send_it() -> httpx.Response:
        transport = httpx.ASGITransport(agent_app(agent, "agent"))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **what)

    return asyncio.run(send_it())


def post(agent: Agent, body: dict[str, Any]) -> httpx.Response:
    return send(agent, "POST", CHAT, json=body)


def test_a_dialogue_in_the_reply(minihop: ToolUseEnv, tokenizer: Any) -> None:
    script, agent = scripted(minihop, tokenizer, TURNS)
    with agent.running():
        content = post(agent, asking("who?")).json()
    assert content["choices"][0]["message"] == {"role": "assistant", "content": "employer", "refusal": None}
    search, answer = content["sorl"]["turns"]
    assert search["tool_calls"] == [{"tool": "search", "argument": "employer", "ok": True, "hits": 1}]
    assert "it" in search["observation"] and answer["observation"] == ""
    assert content["sorl"]["stop_reason"] == "answer" and len(script.released) == 1
    assert content["sorl"]["unknown_words"] == ["who"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_is_out_is_no_answer(minihop: ToolUseEnv, tokenizer: Any, stream: bool) -> None:
    _, agent = scripted(minihop, tokenizer, TURNS, works=False)
    with agent.running():
        reply = post(agent, asking("who?", stream=stream))
    if not stream:
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
        assert "nobody there" in reply.json()["error"]["message"]
        return
    *_, last, done = [line for line in reply.text.splitlines() if line]
    assert done == "data: [DONE]" and json.loads(last[6:])["error"]["code"] == "tool_unavailable"


def test_who_leaves_gives_the_place_free_and_who_comes_too_late_is_told(
    minihop: ToolUseEnv, tokenizer: Any
) -> None:
    script, agent = scripted(minihop, tokenizer, [], max_waiting=0)
    body = json.dumps(asking("who?")).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "path": CHAT, "method": "POST", "headers": headers, "query_string": b""}
    sent: list[Any] = []

    async def leave_when_it_waits() -> None:
        messages = iter([{"type": "http.request", "body": body}])

        async def receive() -> Any:
            message = next(messages, None)
            if message is not None:
                return message
            await asyncio.to_thread(script.waiting.wait, 60)
            with pytest.raises(ChatError, match="try again later"):
                await agent.answer(await agent.prepare(parse_request(body, "agent")))
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await agent_app(agent, "agent")(scope, receive, send)

    with agent.running():
        asyncio.run(leave_when_it_waits())
        wait_until(lambda: script.released)
    assert sent[0]["status"] == 499 and script.released == ["question 0"] and agent.open == 0


def test_a_bug_of_a_task_is_told_and_ends_no_other_dialogue(minihop: ToolUseEnv, tokenizer: Any) -> None:
    """A task's prompt that needs more of an example than a question has."""
    _, agent = scripted(minihop, tokenizer, TURNS)
    whole = agent._env.task

    def prompt(example: Example) -> str:
        return str(example.metadata["gone"]) if "bug" in example.question else whole.prompt(example)

    agent._env.task = dataclasses.replace(whole, prompt=prompt)
    with agent.running():
        assert post(agent, asking("a bug?")).status_code == 500
        assert post(agent, asking("who?")).status_code == 200


def test_a_policy_whose_event_loop_dies_ends_the_server(
    minihop: ToolUseEnv, tokenizer: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """An answer of 500 for ever, beside a health of ok, would keep a dead server in its place."""
    script, agent = scripted(minihop, tokenizer, TURNS)

    async def leave(*_: Any) -> SampledTurn:
        raise SystemExit(0)

    script.generate = leave  # type: ignore[method-assign]
    seen: list[httpx.Response] = []

    def serve(_: list[str]) -> int:
        with bind("127.0.0.1", 0) as bound, agent.running():
            bound.listen()
            url = f"http://127.0.0.1:{bound.getsockname()[1]}"
            asker = threading.Thread(
                target=lambda: seen.append(httpx.post(url + CHAT, json=asking("who?"), timeout=60))
            )
            asker.start()
            server = HttpServer(agent_app(agent, "agent"), ServerSettings())
            agent.on_failure = server.stop
            server.serve_on(bound)
            asker.join()
        return 0

    assert run_command("sorl-serve-agent", serve, []) == 1
    assert seen[0].status_code == 503 and seen[0].json()["error"]["code"] == "policy_failed"
    assert "SystemExit: 0" in capfd.readouterr().err
    health = send(agent, "GET", "/health")
    assert health.status_code == 503 and health.json()["status"] == "failed"


# --- attacks --------------------------------------------------------------------------------------------------
def test_a_web_page_runs_no_tools(server: Server) -> None:
    """What every server refuses is tested in tests/tools/http_server; this is that the guard is here, too."""
    body = json.dumps(asking("who?")).encode()
    for headers, status in (
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/json", "origin": "http://evil.example"}, 403),
        ({"content-type": "application/json", "host": "evil.example"}, 403),
    ):
        reply = server.client.post(CHAT, content=body, headers=headers)
        assert reply.status_code == status and reply.json()["error"]["type"] == "invalid_request_error"
    assert server.client.get("/v1/models", headers={"host": "evil.example"}).status_code == 403


@pytest.mark.slow
def test_dropped_streams_leave_nothing_in_the_log(run: Path) -> None:
    options = ["--model", str(run), "--hardware.threads", "1", "--sampler.max_concurrency", "2"]
    with Server(*options, "--drain_s", "0") as server:
        body = json.dumps(asking("Who is it?", stream=True)).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        address = (server.client.base_url.host, server.client.base_url.port)
        for number in range(30):
            with socket.create_connection(address, timeout=20) as client:
                client.sendall(request)
                if number % 3:
                    assert client.recv(1000).startswith(b"HTTP/1.1 200")
        with socket.create_connection(address, timeout=20) as client:
            client.sendall(request)
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
            server.process.send_signal(signal.SIGTERM)  # in the middle of a stream
            assert server.process.wait(60) == 0
    log = "".join(server.lines)
    assert not any(word in log for word in ("destroyed", "never retrieved", "Traceback")), log
