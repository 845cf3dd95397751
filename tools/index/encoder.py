"""Embed texts with a model of sentence-transformers."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sorl_env.errors import UserError
from sorl_tools.corpus import Passage

_E5 = re.compile(r"(^|[-_/])e5([-_/]|$)", re.IGNORECASE)


class Prefixes(NamedTuple):
    """Texts that a model expects before its inputs: ``query: `` and ``passage: `` for E5, nothing for MiniLM."""

    query: str
    passage: str


class Encoder:
    """An embedding model. Its vectors have length 1, so that inner products are cosines. Threads may share it.

    Args:
        model: a model folder, or a name that sentence-transformers finds.
        query_prefix: text before a query; None takes it from the model's configuration or name.
        passage_prefix: text before a passage, likewise.
        device: torch device; None takes a GPU if there is one.

    Raises:
        UserError: sentence-transformers is not installed, or there is no such model.
    """

    def __init__(
        self,
        model: str,
        *,
        query_prefix: str | None = None,
        passage_prefix: str | None = None,
        device: str | None = None,
    ) -> None:
        self.name = model
        self._model = _load(model, device)
        by_model = known_prefixes(model, self._model)
        self.prefixes = Prefixes(
            by_model.query if query_prefix is None else query_prefix,
            by_model.passage if passage_prefix is None else passage_prefix,
        )
        self.dim = len(self._encode(["x"], 1)[0])
        self._lock = threading.Lock()  # fast tokenizers are not thread-safe

    def queries(self, texts: Sequence[str], batch_size: int = 64) -> npt.NDArray[np.float32]:
        """Embed queries, (queries, dim)."""
        whole = [text.encode(errors="replace").decode() for text in texts]  # replaces lone surrogates
        with self._lock:
            return self._encode([self.prefixes.query + text for text in whole], batch_size)

    def passages(self, passages: Sequence[Passage], batch_size: int) -> npt.NDArray[np.float32]:
        """Embed passages by title and text, (passages, dim)."""
        texts = [f"{p.title}\n{p.text}" if p.title else p.text for p in passages]
        with self._lock:
            return self._encode([self.prefixes.passage + text for text in texts], batch_size)

    def hash(self) -> str:
        """``sha256:..`` of the weights and their names, which does not depend on where the model is."""
        digest = hashlib.sha256()
        for name, weights in sorted(self._model.state_dict().items()):
            digest.update(f"{name}\0{tuple(weights.shape)}\0".encode())
            digest.update(weights.detach().cpu().float().contiguous().numpy().tobytes())
        return f"sha256:{digest.hexdigest()}"

    def _encode(self, texts: list[str], batch_size: int) -> npt.NDArray[np.float32]:
        options = {"normalize_embeddings": True, "prompt": "", "show_progress_bar": False}
        vectors = self._model.encode(texts, batch_size=batch_size, **options)
        return np.ascontiguousarray(vectors, dtype=np.float32)


def _load(model: str, device: str | None) -> Any:
    if not model:
        raise UserError("a dense index needs --model: a model folder, or a name such as intfloat/e5-base-v2")
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
    names = [Path(name).name if Path(name).is_dir() else name]
    configs = (getattr(module, "config", None) for module in model.modules())
    names += [str(getattr(config, "_name_or_path", "")) for config in configs]
    if any(_E5.search(Path(one).name) or _E5.search(one) for one in names if one):
        return Prefixes("query: ", "passage: ")
    return Prefixes("", "")
