"""A real HTTP server with ``/v1/completions`` over a small model: as vLLM answers, or as a plain server does."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from sorl_env.rollout import SamplingParams
from sorl_train.models.policy import load_policy, load_tokenizer
from sorl_train.rollout.sampler import TransformersSampler

from ...tools.loopback import LoopbackServer, Reply


class Served(LoopbackServer):
    """The model, the requests it got, and the faults it has still to show (HTTP statuses; 0 drops the connection)."""

    def __init__(self, folder: str, vllm: bool) -> None:
        self.tokenizer = load_tokenizer(folder)
        self.sampler = TransformersSampler(load_policy(folder, "cpu"), self.tokenizer, 64)
        self.vllm = vllm
        self.loop = asyncio.new_event_loop()
        self.faults: list[int] = []
        self.numbers = count()
        super().__init__(self.reply)
        self.url = f"{self.address}/v1"

    def reply(self, request: dict[str, Any]) -> Reply:
        fault = self.faults.pop() if self.faults else None
        if fault is not None:
            return fault, json.dumps({"error": {"message": f"told to say {fault}"}}).encode()
        if request["path"] != "/v1/completions" or request["model"] != "tiny":
            said = f"no model {request['model']} at {request['path']}"
            return 404, json.dumps({"error": {"message": said}}).encode()
        choice = asyncio.run_coroutine_threadsafe(self.complete(request), self.loop).result()
        return 200, json.dumps({"object": "text_completion", "model": "tiny", "choices": [choice]}).encode()

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
            ids = drawn.token_ids if body["return_token_ids"] else None
            return choice | {"stop_reason": word, "token_ids": ids}
        cut = min((text.index(word) for word in body["stop"] if word in text), default=len(text))
        return choice | {"text": text[:cut]}


@contextmanager
def serving(folder: str, *, vllm: bool) -> Iterator[Served]:
    served = Served(folder, vllm)
    thread = threading.Thread(target=served.loop.run_forever, daemon=True)
    thread.start()
    try:
        with served.sampler.session():
            yield served
    finally:
        served.close()
        served.loop.call_soon_threadsafe(served.loop.stop)
        thread.join(5)
        served.loop.close()
