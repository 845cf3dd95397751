"""Embed texts: with a model of sentence-transformers in this process, or by a server with OpenAI's embeddings API."""

from __future__ import annotations

import hashlib
import os
import random
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import numpy.typing as npt

from sorl_env.errors import UserError, http_address, install_command

TOKEN_VARIABLE = "SORL_ENCODER_TOKEN"
TIMEOUT_S = 120.0
TRIES = 6
FIRST_PAUSE_S = 0.5
QUERY_BATCH = 32  # text-embeddings-inference takes no more in a request by default
# Texts by which a model is recognized, and how far the same model may be off on another device or in another precision.
PROBES = ("query: who wrote Hamlet?", "The tragedy of Hamlet was written around 1600.")
PROBE_TOLERANCE = 0.02

_E5 = re.compile(r"(^|[-_])e5([-_]|$)", re.IGNORECASE)
_jitter = random.Random()  # its own generator, so that pauses do not change the draws of others

Floats = npt.NDArray[np.float32]


class Prefixes(NamedTuple):
    """Texts that a model expects before its inputs: ``query: `` and ``passage: `` for E5, nothing for MiniLM."""

    query: str
    passage: str


def open_encoder(
    model: str,
    address: str | None = None,
    query_prefix: str | None = None,
    passage_prefix: str | None = None,
    device: str | None = None,
) -> Encoder:
    """The encoder of a model: at ``address`` if there is one, or else in this process. ``model`` is a model folder or a
    name; ``address`` is that of a server with OpenAI's embeddings API, such as ``http://127.0.0.1:8080/v1``. A prefix
    is text before each query or passage; None takes it from the model's configuration or name. ``device`` is a torch
    device, for a model in this process; None takes a GPU if there is one. Raises ``UserError`` if no model is named,
    there is no such model, or the server does not answer."""
    if not model:
        raise UserError("a dense index needs --model: a model folder, or a name such as intfloat/e5-base-v2")
    if address is not None and device is not None:
        raise UserError(f"device={device}: the encoder at {address} chooses its own; leave it out")
    encoder = LocalEncoder(model, device) if address is None else RemoteEncoder(address, model)
    known = encoder.prefixes
    encoder.prefixes = Prefixes(
        known.query if query_prefix is None else query_prefix,
        known.passage if passage_prefix is None else passage_prefix,
    )
    return encoder


def named_prefixes(names: Iterable[str]) -> Prefixes:
    """The prefixes of E5 if one of a model's names is E5's, or else none."""
    is_e5 = any(_E5.search(Path(name).name) for name in names)
    return Prefixes("query: ", "passage: ") if is_e5 else Prefixes("", "")


class Encoder(ABC):
    """Its vectors have length 1, so that inner products are cosines. Threads may share it."""

    name: str
    prefixes: Prefixes
    dim: int

    def queries(self, texts: Sequence[str]) -> Floats:
        """Embed queries, (queries, dim)."""
        whole = [text.encode(errors="replace").decode() for text in texts]  # replaces lone surrogates
        return self._embed([self.prefixes.query + text for text in whole], QUERY_BATCH)

    def passages(self, texts: Sequence[str], batch_size: int) -> Floats:
        """Embed passages, (passages, dim)."""
        return self._embed([self.prefixes.passage + text for text in texts], batch_size)

    @abstractmethod
    def identity(self) -> Any:
        """What tells this model from others, as JSON."""

    def matches(self, identity: Any) -> bool:
        """Whether ``identity`` is of this model."""
        return bool(self.identity() == identity)

    @abstractmethod
    def _embed(self, texts: list[str], batch_size: int) -> Floats: ...


class LocalEncoder(Encoder):
    """A model of sentence-transformers in this process. See ``open_encoder``."""

    def __init__(self, model: str, device: str | None) -> None:
        self.name = model
        self._model = _load(model, device)
        prompts = {name: text for name, text in self._model.prompts.items() if text}
        own = Prefixes(prompts.get("query", ""), prompts.get("passage") or prompts.get("document", ""))
        configs = (getattr(module, "config", None) for module in self._model.modules())
        names = [model, *(str(getattr(config, "_name_or_path", "")) for config in configs)]
        self.prefixes = own if any(own) else named_prefixes(names)
        self._lock = threading.Lock()  # fast tokenizers are not thread-safe
        self.dim = len(self._embed(["a text"], 1)[0])  # some models embed no empty text

    def identity(self) -> str:
        """``sha256:..`` of the weights and their names, which does not depend on where the model is."""
        digest = hashlib.sha256()
        for name, weights in sorted(self._model.state_dict().items()):
            digest.update(f"{name}\0{tuple(weights.shape)}\0".encode())
            digest.update(weights.detach().cpu().float().contiguous().numpy().tobytes())
        return f"sha256:{digest.hexdigest()}"

    def _embed(self, texts: list[str], batch_size: int) -> Floats:
        options = {"normalize_embeddings": True, "prompt": "", "show_progress_bar": False}
        with self._lock:
            vectors = self._model.encode(texts, batch_size=batch_size, **options)
        return np.ascontiguousarray(vectors, dtype=np.float32)


def _load(model: str, device: str | None) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ModuleNotFoundError as error:
        raise UserError(f"dense search needs sentence-transformers: {install_command('search')}") from error
    path = Path(model).expanduser()
    if not path.is_dir() and (path.is_absolute() or model.startswith((".", "~"))):
        raise UserError(f"--model {model}: no such folder")
    try:
        return SentenceTransformer(str(path) if path.is_dir() else model, device=device)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"--model {model}: cannot be loaded ({str(error).splitlines()[0]})") from error


class RemoteEncoder(Encoder):
    """An embedding model behind ``POST ADDRESS/embeddings``, as text-embeddings-inference, vLLM and others offer it.
    Its vectors are normalized here. A token is taken from the environment variable ``SORL_ENCODER_TOKEN``. Requests
    that fail by 408, 429, 5xx or the connection are repeated, with pauses that double from half a second. A server that
    does not answer, refuses, or sends vectors of another dimension is a UserError, here and when embedding."""

    def __init__(self, address: str, model: str) -> None:
        self.name, self.prefixes = model, named_prefixes([model])
        self._url = f"{address.rstrip('/')}/embeddings"
        token = os.environ.get(TOKEN_VARIABLE)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        http_address(address, "encoder", "http://127.0.0.1:8080/v1")
        self._client = httpx.Client(headers=headers, timeout=TIMEOUT_S)
        self.dim = 0  # whatever the first vector has
        self._probes = self._embed(list(PROBES), QUERY_BATCH)
        self.dim = self._probes.shape[1]

    def identity(self) -> list[float]:
        """The cosine of two texts and some elements of a vector: no server tells a hash of its weights."""
        similarity = float(self._probes[0] @ self._probes[1])
        return [round(number, 4) for number in (similarity, *self._probes[0][:8].tolist())]

    def matches(self, identity: Any) -> bool:
        """Whether ``identity`` is of this model, up to ``PROBE_TOLERANCE``."""
        own = self.identity()
        same_kind = isinstance(identity, list) and len(identity) == len(own)
        return same_kind and np.allclose(own, identity, atol=PROBE_TOLERANCE)

    def _embed(self, texts: list[str], batch_size: int) -> Floats:
        starts = range(0, len(texts), batch_size)
        return np.concatenate([self._embed_batch(texts[start : start + batch_size]) for start in starts])

    def _embed_batch(self, texts: list[str]) -> Floats:
        """The vectors of some texts, (texts, dim), of length 1."""
        where = f"encoder={self._url}, model {self.name}"
        response = self._post({"model": self.name, "input": texts, "encoding_format": "float"})
        try:
            rows = sorted(response.json()["data"], key=lambda row: row["index"])
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

    def _post(self, request: dict[str, Any]) -> httpx.Response:
        where, problem = f"encoder={self._url}", ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1) * _jitter.uniform(0.5, 1.0))
            try:
                response = self._client.post(self._url, json=request)
            except httpx.RequestError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if response.is_success:
                return response
            problem = f"it answered {response.status_code}: {response.text[:200]!r}"
            if response.status_code in (401, 403):
                raise UserError(f"{where}: {problem}; set {TOKEN_VARIABLE} to its token")
            if response.status_code not in (408, 429) and response.status_code < 500:
                raise UserError(f"{where}: {problem}; check the address, the model's name and --batch_size")
        raise UserError(f"{where}: no answer after {TRIES} tries ({problem}); is the server running?")
