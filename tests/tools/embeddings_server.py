"""A real loopback server with OpenAI's embeddings API, which misbehaves on demand."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from .loopback import LoopbackServer, Reply


def vector(text: str, model: str = "e5", dim: int = 16) -> list[float]:
    seed = int.from_bytes(hashlib.sha256(f"{model}{text}".encode()).digest()[:4], "big")
    return [float(number) for number in np.random.default_rng(seed).standard_normal(dim) * 7]


def embeddings(request: dict[str, Any], dim: int = 16) -> Reply:
    """What the API sends, in another order than it was asked."""
    rows = [
        {"index": i, "embedding": vector(t, request["model"], dim)} for i, t in enumerate(request["input"])
    ]
    return 200, json.dumps({"object": "list", "data": rows[::-1]}).encode()


class Server(LoopbackServer):
    """It does what ``behaviours`` says next, and embeds when nothing is left."""

    def __init__(self) -> None:
        self.behaviours: list[Callable[[dict[str, Any]], Reply]] = []
        super().__init__(lambda request: (self.behaviours.pop(0) if self.behaviours else embeddings)(request))
        self.address += "/v1"
