"""Embed texts by a server that speaks OpenAI's embeddings API, as text-embeddings-inference, vLLM and others do."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np

from sorl_env.errors import UserError
from sorl_tools.index.encoder import Floats, Prefixes

TOKEN_VARIABLE = "SORL_ENCODER_TOKEN"
TIMEOUT_S = 120.0
TRIES = 6
FIRST_PAUSE_S = 0.5
BATCH = 32  # texts in a request for queries; text-embeddings-inference takes no more by default
# Texts by which a model is recognized, and how far the same model may be off on another device or in another precision.
PROBES = ("query: who wrote Hamlet?", "The tragedy of Hamlet was written around 1600.")
PROBE_TOLERANCE = 0.02

_jitter = random.Random()  # its own generator, so that pauses do not change the draws of others


class RemoteEncoder:
    """An embedding model behind ``POST ADDRESS/embeddings``. See ``Encoder``.

    Its vectors are normalized here. A token is taken from the environment variable ``SORL_ENCODER_TOKEN``. Requests
    that fail by 408, 429, 5xx or the connection are repeated, with pauses that double from half a second.

    Args:
        address: such as ``http://127.0.0.1:8080/v1``.
        model: the model's name at the server.

    Raises:
        UserError: here and when embedding: the server does not answer, refuses, or sends vectors of another dimension.
    """

    def __init__(self, address: str, model: str, prefixes: Prefixes) -> None:
        self.name, self.prefixes, self._address = model, prefixes, address.rstrip("/")
        token = os.environ.get(TOKEN_VARIABLE)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            if httpx.URL(address).scheme not in ("http", "https") or not httpx.URL(address).host:
                raise httpx.InvalidURL("it begins with neither http:// nor https://")
        except httpx.InvalidURL as error:
            raise UserError(
                f"encoder={address!r}: {error}; give an address such as http://127.0.0.1:8080/v1"
            ) from error
        self._client = httpx.Client(headers=headers, timeout=TIMEOUT_S)
        self.dim = 0  # whatever the first vector has
        self._probes = self._embed(list(PROBES))
        self.dim = self._probes.shape[1]

    def queries(self, texts: Sequence[str]) -> Floats:
        """See ``Encoder``."""
        whole = [text.encode(errors="replace").decode() for text in texts]  # replaces lone surrogates
        return self._in_batches([self.prefixes.query + text for text in whole], BATCH)

    def passages(self, texts: Sequence[str], batch_size: int) -> Floats:
        """See ``Encoder``."""
        return self._in_batches([self.prefixes.passage + text for text in texts], batch_size)

    def identity(self) -> list[float]:
        """The cosine of two texts and some elements of a vector: no server tells a hash of its weights."""
        similarity = float(self._probes[0] @ self._probes[1])
        return [round(number, 4) for number in (similarity, *self._probes[0][:8].tolist())]

    def matches(self, identity: Any) -> bool:
        """See ``Encoder``."""
        own = self.identity()
        same_kind = isinstance(identity, list) and len(identity) == len(own)
        return same_kind and np.allclose(own, identity, atol=PROBE_TOLERANCE)

    def _in_batches(self, texts: list[str], size: int) -> Floats:
        return np.concatenate(
            [self._embed(texts[start : start + size]) for start in range(0, len(texts), size)]
        )

    def _embed(self, texts: list[str]) -> Floats:
        """The vectors of some texts, (texts, dim), of length 1."""
        body = self._post({"model": self.name, "input": texts, "encoding_format": "float"})
        where = f"encoder={self._address}, model {self.name}"
        try:
            rows = sorted(body["data"], key=lambda row: row["index"])
            vectors = np.array([row["embedding"] for row in rows], dtype=np.float32)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{where}: not a reply of OpenAI's embeddings API ({error!r})") from error
        if vectors.ndim != 2 or vectors.shape[0] != len(texts) or (self.dim and vectors.shape[1] != self.dim):
            wanted = (len(texts), self.dim or "dim")
            raise UserError(
                f"{where}: it sent vectors of the shape {vectors.shape}, wanted {wanted}; is it the model?"
            )
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        if not np.isfinite(lengths).all() or not (lengths > 0).all():
            raise UserError(f"{where}: it sent a vector that is zero or not finite, which has no direction")
        return np.ascontiguousarray(vectors / lengths, dtype=np.float32)

    def _post(self, request: dict[str, Any]) -> Any:
        url = f"{self._address}/embeddings"
        problem = ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1) * _jitter.uniform(0.5, 1.0))
            try:
                response = self._client.post(url, json=request)
            except httpx.RequestError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            problem = f"it answered {response.status_code}: {response.text[:200]!r}"
            if response.status_code in (408, 429) or response.status_code >= 500:
                continue
            if response.status_code in (401, 403):
                raise UserError(f"encoder={url}: {problem}; set {TOKEN_VARIABLE} to its token")
            if not response.is_success:
                raise UserError(
                    f"encoder={url}: {problem}; check the address, the model's name and --batch_size"
                )
            try:
                return response.json()
            except ValueError as error:
                raise UserError(f"encoder={url}: its reply is no JSON ({error})") from error
        raise UserError(f"encoder={url}: no answer after {TRIES} tries ({problem}); is the server running?")
