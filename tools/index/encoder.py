"""Embed texts: with a model of sentence-transformers in this process, or by a server (``remote_encoder``)."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from sorl_env.errors import UserError

_E5 = re.compile(r"(^|[-_/])e5([-_/]|$)", re.IGNORECASE)

Floats = npt.NDArray[np.float32]


class Prefixes(NamedTuple):
    """Texts that a model expects before its inputs: ``query: `` and ``passage: `` for E5, nothing for MiniLM."""

    query: str
    passage: str


class Encoder(Protocol):
    """Its vectors have length 1, so that inner products are cosines. Threads may share it."""

    name: str
    prefixes: Prefixes
    dim: int

    def queries(self, texts: Sequence[str]) -> Floats:
        """Embed queries, (queries, dim)."""

    def passages(self, texts: Sequence[str], batch_size: int) -> Floats:
        """Embed passages, (passages, dim)."""

    def identity(self) -> Any:
        """What tells this model from others, as JSON."""

    def matches(self, identity: Any) -> bool:
        """Whether ``identity`` is of this model."""


class LocalEncoder:
    """A model of sentence-transformers in this process. See ``dense.open_encoder``."""

    def __init__(
        self, model: str, query_prefix: str | None, passage_prefix: str | None, device: str | None
    ) -> None:
        self.name = model
        self._model = _load(model, device)
        self.prefixes = with_defaults(known_prefixes(model, self._model), query_prefix, passage_prefix)
        self._lock = threading.Lock()  # fast tokenizers are not thread-safe
        self.dim = len(self._encode(["a text"], 1)[0])  # some models embed no empty text

    def queries(self, texts: Sequence[str]) -> Floats:
        """See ``Encoder``."""
        whole = [text.encode(errors="replace").decode() for text in texts]  # replaces lone surrogates
        return self._encode([self.prefixes.query + text for text in whole], 64)

    def passages(self, texts: Sequence[str], batch_size: int) -> Floats:
        """See ``Encoder``."""
        return self._encode([self.prefixes.passage + text for text in texts], batch_size)

    def identity(self) -> str:
        """``sha256:..`` of the weights and their names, which does not depend on where the model is."""
        digest = hashlib.sha256()
        for name, weights in sorted(self._model.state_dict().items()):
            digest.update(f"{name}\0{tuple(weights.shape)}\0".encode())
            digest.update(weights.detach().cpu().float().contiguous().numpy().tobytes())
        return f"sha256:{digest.hexdigest()}"

    def matches(self, identity: Any) -> bool:
        """See ``Encoder``."""
        return bool(self.identity() == identity)

    def _encode(self, texts: list[str], batch_size: int) -> Floats:
        options = {"normalize_embeddings": True, "prompt": "", "show_progress_bar": False}
        with self._lock:
            vectors = self._model.encode(texts, batch_size=batch_size, **options)
        return np.ascontiguousarray(vectors, dtype=np.float32)


def _load(model: str, device: str | None) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ModuleNotFoundError as error:
        raise UserError("dense search needs sentence-transformers: pip install 'sorl[search]'") from error
    path = Path(model).expanduser()
    if not path.is_dir() and (path.is_absolute() or model.startswith((".", "~"))):
        raise UserError(f"--model {model}: no such folder")
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # loading the weights takes only a moment
    try:
        return SentenceTransformer(str(path) if path.is_dir() else model, device=device)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"--model {model}: cannot be loaded ({str(error).splitlines()[0]})") from error
    finally:
        if shown:
            logging.enable_progress_bar()


def known_prefixes(name: str, model: Any) -> Prefixes:
    """The prefixes of a model: its own prompts, or else those of E5 if its name or its configuration says E5."""
    prompts = {key: value for key, value in (getattr(model, "prompts", None) or {}).items() if value}
    query = prompts.get("query")
    passage = prompts.get("passage") or prompts.get("document")
    if query or passage:
        return Prefixes(query or "", passage or "")
    configs = (getattr(module, "config", None) for module in model.modules())
    names = [Path(name).name if Path(name).is_dir() else name]
    return named_prefixes([*names, *(str(getattr(config, "_name_or_path", "")) for config in configs)])


def named_prefixes(names: Sequence[str]) -> Prefixes:
    """The prefixes of E5 if one of a model's names is E5's, or else none."""
    if any(_E5.search(Path(one).name) or _E5.search(one) for one in names if one):
        return Prefixes("query: ", "passage: ")
    return Prefixes("", "")


def with_defaults(known: Prefixes, query: str | None, passage: str | None) -> Prefixes:
    """The prefixes of a model, with those that a user has chosen in their place."""
    return Prefixes(known.query if query is None else query, known.passage if passage is None else passage)
