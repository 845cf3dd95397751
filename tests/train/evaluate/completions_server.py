"""A real HTTP server with ``/v1/completions`` over a small model: as vLLM answers, or as a plain server does."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

from sorl_env.rollout import SamplingParams
from sorl_train.models.policy import load_policy, load_tokenizer
from sorl_train.rollout.sampler import TransformersSampler


class Served:
    """The model, the requests it got, and the faults it has still to show (HTTP statuses; 0 drops the connection)."""

    def __init__(self, folder: str, vllm: bool) -> None:
        self.tokenizer = load_tokenizer(folder)
        self.sampler = TransformersSampler(load_policy(folder, "cpu"), self.tokenizer, 64)
        self.vllm = vllm
        self.loop = asyncio.new_event_loop()
        self.requests: list[dict[str, Any]] = []
        self.authorizations: set[str | None] = set()
        self.faults: list[int] = []
        self.numbers = count()
        self.url = ""

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        session = f"request {next(self.numbers)}"
        prompt = body["prompt"]
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        params = SamplingParams(
            body["max_tokens"],
            body["temperature"],
            body["top_p"],
            tuple(body["stop"]),
            body["seed"],
            stop_ids=tuple(body.get("stop_token_ids", ())),
        )
        try:
            drawn = await self.sampler.generate(session, ids, params)
        finally:
            self.sampler.release(session)
        text = self.tokenizer.decode(drawn.token_ids, skip_special_tokens=True)
        choice: dict[str, Any] = {"index": 0, "text": text}
        choice["finish_reason"] = "length" if drawn.finish == "length" else "stop"
        if self.vllm:
            word = next((word for word in body["stop"] if word in text), None)
            choice |= {
                "stop_reason": word,
                "token_ids": drawn.token_ids if body["return_token_ids"] else None,
            }
            return choice
        cut = min((text.index(word) for word in body["stop"] if word in text), default=len(text))
        return choice | {"text": text[:cut]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def do_POST(self) -> None:
        served: Served = self.server.served
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        served.requests.append(body)
        served.authorizations.add(self.headers["authorization"])
        fault = served.faults.pop() if served.faults else None
        if fault == 0:
            self.close_connection = True
            return None
        if fault is not None:
            return self._reply(fault, {"error": {"message": f"told to say {fault}"}})
        if self.path != "/v1/completions" or body["model"] != "tiny":
            return self._reply(404, {"error": {"message": f"no model {body['model']} at {self.path}"}})
        choice = asyncio.run_coroutine_threadsafe(served.complete(body), served.loop).result()
        return self._reply(200, {"object": "text_completion", "model": "tiny", "choices": [choice]})

    def _reply(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serving(folder: str, *, vllm: bool) -> Iterator[Served]:
    served = Served(folder, vllm)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.served = served  # type: ignore[attr-defined]
    served.url = f"http://127.0.0.1:{server.server_port}/v1"
    threads = [
        threading.Thread(target=work, daemon=True) for work in (served.loop.run_forever, server.serve_forever)
    ]
    for thread in threads:
        thread.start()
    try:
        with served.sampler.session():
            yield served
    finally:
        server.shutdown()
        server.server_close()
        served.loop.call_soon_threadsafe(served.loop.stop)
        for thread in threads:
            thread.join(5)
        served.loop.close()
