"""Stands for vLLM where it is not installed: the calls that ``VllmSampler`` makes, answered by a transformers model.

``PRETENDED_VLLM=stale`` ignores new weights. Tests put this folder on ``PYTHONPATH`` under the name vllm.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

EngineArgs = SamplingParams = SimpleNamespace


class LLMEngine:
    """Draws a whole turn of one request in each step."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.requests: dict[str, tuple[list[int], Any]] = {}

    @classmethod
    def from_engine_args(cls, args: Any) -> LLMEngine:
        return cls(args.model)

    def apply_model(self, function: Any) -> None:
        function(self)

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        if os.environ.get("PRETENDED_VLLM") != "stale":
            self.model.load_state_dict(dict(weights), strict=False)

    def reset_prefix_cache(self) -> bool:
        return not self.requests

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        self.requests[name] = list(prompt["prompt_token_ids"]), params

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.requests.pop(name, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    @torch.no_grad()
    def step(self) -> list[Any]:
        name, (ids, params) = self.requests.popitem()
        drawn: list[int] = []
        log_probs = []
        while len(drawn) < params.max_tokens:
            logits = self.model(torch.tensor([ids + drawn])).logits[0, -1] / max(params.temperature, 1e-6)
            found = torch.log_softmax(logits, -1)
            drawn.append(int(torch.multinomial(found.exp(), 1)))
            log_probs.append({drawn[-1]: SimpleNamespace(logprob=float(found[drawn[-1]]))})
        turn = {"token_ids": drawn, "logprobs": log_probs, "finish_reason": "length", "stop_reason": None}
        return [SimpleNamespace(request_id=name, outputs=[SimpleNamespace(**turn)])]
