"""A continuous-batching sampler for any decoder-only transformers model.

Each trajectory in flight holds one row of a key-value cache from its first token to its last, so a turn only pays
for the tokens that are new. Rows that are decoding are kept in front, ``[0, num_active)``: one decoding step is one
forward pass over a contiguous view of the cache, finished rows leave it at once, and rows that wait for a tool cost
nothing. New rows and returning rows are prefilled together; a prompt that a group shares is read once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sorl_env.rollout import SampledTurn, SamplingParams
from sorl_env.tokens import Tokenizer
from sorl_train.config import ModelConfig
from sorl_train.engines.local.row_cache import COLUMNS, RowCache, feed
from sorl_train.models import autocast, compute_dtype

# Rows x columns of one prefill pass: on a CPU what its cache holds, on a GPU enough to fill it.
CPU_PREFILL, GPU_PREFILL = 2048, 16384
# A cache of up to so many bytes stays from one batch to the next: touching new memory costs a tiny policy a tenth of
# its rollout. A larger one makes room for the update.
KEPT_CACHE = 1 << 28
# Event-loop turns granted to trajectories between two steps: enough for a reply of an in-process tool to come back
# as the next turn's request, so that rows rejoin the batch together. It never waits for a tool that is slow.
YIELDS = 6


@dataclass(eq=False)
class _Row:
    """One trajectory in flight."""

    slot: int
    cached: list[int] = field(default_factory=list)  # the tokens whose keys and values are in the cache
    pending: list[int] = field(default_factory=list)  # tokens to feed before the next draw
    drawn: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    params: SamplingParams = field(default_factory=lambda: SamplingParams(1))
    draws: np.random.Generator = None  # type: ignore[assignment]  # each turn brings its own
    reply: asyncio.Future[SampledTurn] | None = None


class TransformersSampler:
    """Implements ``sorl_env.rollout.Sampler``; see the module's docstring.

    One uniform number a token, from a generator seeded by the trajectory and the turn, picks the token by inverting
    the cumulative distribution: what a trajectory draws does not depend on which others share its batch (up to the
    rounding of a matrix product), and with in-process tools a run is reproducible bit for bit.

    Args:
        model: a causal language model of transformers; the trainer's own, so weights are always the newest.
        tokenizer: decodes the tail of a turn to find stop strings.
        max_rows: trajectories in flight.
        config: the compute dtype.
    """

    def __init__(
        self, model: Any, tokenizer: Tokenizer, max_rows: int, config: ModelConfig = ModelConfig()
    ) -> None:
        self.model = model
        self._device = next(model.parameters()).device
        self._config = config
        self.policy_version = 0
        self._tokenizer = tokenizer
        self._max_rows = max_rows
        self._capacity = COLUMNS  # of a new cache: what the last one came to have
        self._cache = self._new_cache(0)
        self._rows: dict[str, _Row] = {}  # by session
        self._by_slot: list[_Row | None] = [
            None
        ] * max_rows  # [0, num_active) decode, the others anywhere behind
        self._num_active = 0
        self._waiting: list[_Row] = []
        self._driver: asyncio.Task[None] | None = None
        self._eos = _eos_ids(model, tokenizer)
        self._enders = _StopTokens(tokenizer, len(model.get_input_embeddings().weight))

    @contextmanager
    def session(self) -> Iterator[TransformersSampler]:
        """Around one batch: switches the model to inference and gives a large cache's memory back afterwards."""
        was_training = self.model.training
        self.model.eval()
        if len(self._cache.lengths) == 0:
            self._cache = self._new_cache(self._max_rows)
        try:
            yield self
        finally:
            self.model.train(was_training)
            self._rows.clear()
            self._by_slot = [None] * self._max_rows
            self._waiting.clear()
            self._num_active, self._driver = 0, None
            self._capacity = self._cache.capacity
            self._cache.lengths[:] = 0
            if self._cache.data.nbytes > KEPT_CACHE:
                self._cache = self._new_cache(0)

    def _new_cache(self, rows: int) -> RowCache:
        return RowCache(self.model, rows, compute_dtype(self._config, self._device), self._capacity)

    async def generate(self, session: str, token_ids: Sequence[int], params: SamplingParams) -> SampledTurn:
        """Draw one turn (see ``Sampler.generate``)."""
        row = self._rows.get(session) or self._admit(session)
        cached = len(row.cached)
        if list(token_ids[:cached]) != row.cached or len(token_ids) == cached:
            raise ValueError(f"session {session}: token_ids must extend the {cached} tokens seen before")
        row.pending = list(token_ids[cached:])
        row.params, row.drawn, row.log_probs = params, [], []
        row.draws = np.random.Generator(np.random.Philox(params.seed))
        row.reply = asyncio.get_running_loop().create_future()
        self._waiting.append(row)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.ensure_future(self._drive())
        return await row.reply

    def release(self, session: str) -> None:
        row = self._rows.pop(session, None)
        if row is None:
            return
        if row in self._waiting:
            self._waiting.remove(row)
        if row.slot < self._num_active:
            self._deactivate(row)
        self._by_slot[row.slot] = None
        self._cache.lengths[row.slot] = 0

    def _admit(self, session: str) -> _Row:
        if len(self._rows) == self._max_rows:
            raise ValueError(f"more than max_concurrency={self._max_rows} trajectories in flight")
        slot = len(self._rows)  # free unless a trajectory before it is over
        if self._by_slot[slot] is not None:
            slot = self._by_slot.index(None)
        row = self._rows[session] = self._by_slot[slot] = _Row(slot)
        return row

    def _move(self, row: _Row, slot: int) -> None:
        """Give ``row`` another slot; who was there, if anyone, takes its old one."""
        if slot == row.slot:
            return
        other = self._by_slot[slot]
        if other is None:
            self._cache.copy([row.slot], [slot])
        else:
            self._cache.swap(row.slot, slot)
            other.slot = row.slot
        self._by_slot[row.slot], self._by_slot[slot] = other, row
        row.slot = slot

    def _activate(self, rows: Sequence[_Row]) -> slice:
        """Put ``rows`` behind those that decode, moving none that is there already; returns their slots."""
        slots = slice(self._num_active, self._num_active + len(rows))
        here = {row.slot for row in rows}
        vacant = [slot for slot in range(slots.start, slots.stop) if slot not in here]
        for row in rows:
            if row.slot >= slots.stop:
                self._move(row, vacant.pop())
        self._num_active = slots.stop
        return slots

    def _deactivate(self, row: _Row) -> None:
        self._move(row, self._num_active - 1)
        self._num_active -= 1

    def _in(self, slots: slice) -> list[_Row]:
        """The rows in ``slots``, where none is free."""
        return [row for row in self._by_slot[slots] if row is not None]

    async def _drive(self) -> None:
        """Prefill and decode until no trajectory wants tokens; errors reach every caller that waits."""
        try:
            while True:
                for _ in range(YIELDS):
                    await asyncio.sleep(0)
                # prefill in groups: a pass for every row that returns would double the number of passes
                if self._waiting and len(self._waiting) * 4 >= self._num_active:
                    self._prefill()
                elif self._num_active:
                    rows = slice(0, self._num_active)
                    self._accept(self._in(rows), self._forward(rows))
                else:
                    return
        except BaseException as error:
            for row in self._by_slot:
                if row is not None and row.reply is not None and not row.reply.done():
                    row.reply.set_exception(
                        error if isinstance(error, Exception) else asyncio.CancelledError()
                    )
            raise

    def _prefill(self) -> None:
        """Feed the pending tokens of all waiting rows, similar lengths together, and draw their first tokens."""
        readers: dict[
            Any, list[_Row]
        ] = {}  # rows of one group wait for the same prompt: the first reads it for all
        for row in sorted(self._waiting, key=lambda row: -len(row.pending)):
            readers.setdefault(id(row) if row.cached else tuple(row.pending), []).append(row)
        self._waiting = []
        groups = list(readers.values())
        limit = CPU_PREFILL if self._device.type == "cpu" else GPU_PREFILL
        while groups:
            count = max(1, limit // len(groups[0][0].pending))
            self._read(groups[:count])
            groups = groups[count:]

    def _read(self, groups: Sequence[list[_Row]]) -> None:
        """One prefill pass; rows of one group have the same pending tokens."""
        slots = self._activate([group[0] for group in groups])
        logits = self._forward(slots)
        rows = self._in(slots)
        pairs = [(group[0], row) for group in groups for row in group[1:]]
        if pairs:
            copies = [row for _, row in pairs]
            self._activate(copies)
            sources = [reader.slot for reader, _ in pairs]
            self._cache.copy(sources, [row.slot for row in copies])
            for row in copies:
                row.cached.extend(row.pending)
            logits = torch.cat([logits, logits[[slot - slots.start for slot in sources]]])
            rows += copies
        self._accept(rows, logits)

    def _forward(self, slots: slice) -> Tensor:
        """Feed the pending tokens of the rows in ``slots``; returns the logits after their last ones, (b, V)."""
        rows = self._in(slots)
        for row in rows:
            row.cached.extend(row.pending)
        with autocast(self._config, self._device):
            return feed(self.model, self._cache, slots, [row.pending for row in rows])

    def _accept(self, rows: Sequence[_Row], logits: Tensor) -> None:
        """Draw the next token of each of ``rows`` and answer those whose turn it ends."""
        finished = []
        for row, token, log_prob in zip(rows, *_draw(logits, rows), strict=True):
            row.drawn.append(token)
            row.log_probs.append(log_prob)
            row.pending = [token]
            if token in self._eos:
                finish = "eos"
            elif self._enders.completes(row.drawn, row.params.stop):
                finish = "stop"
            elif len(row.drawn) >= row.params.max_new_tokens:
                finish = "length"
            else:
                continue
            finished.append(row)
            assert row.reply is not None
            if not row.reply.done():  # the caller may have been cancelled
                turn = SampledTurn(row.drawn, row.log_probs, finish, self.policy_version)  # type: ignore[arg-type]
                row.reply.set_result(turn)
        for row in sorted(
            finished, key=lambda row: -row.slot
        ):  # from behind: rows that finish together stay put
            self._deactivate(row)


@torch.inference_mode()
def _draw(logits: Tensor, rows: Sequence[_Row]) -> tuple[list[int], list[float]]:
    """One token a row and its log-probability under the (temperature-scaled, untruncated) policy. logits: (b, V)."""
    temperatures = [row.params.temperature for row in rows]
    scale = torch.tensor([t or 1.0 for t in temperatures], device=logits.device)
    log_probs = torch.log_softmax(logits.float() / scale[:, None], dim=-1)
    if not any(temperatures):
        tokens = log_probs.argmax(dim=-1)
    else:
        uniforms = torch.tensor(
            [row.draws.random() if row.params.temperature else 0.0 for row in rows],
            dtype=torch.float64,
            device=logits.device,
        )
        probs = _nucleus(log_probs.exp(), [row.params.top_p for row in rows])
        cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
        points = (uniforms * cumulative[:, -1])[:, None]
        tokens = torch.searchsorted(cumulative, points, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
        if not all(temperatures):
            greedy = torch.tensor([not t for t in temperatures], device=logits.device)
            tokens = torch.where(greedy, log_probs.argmax(dim=-1), tokens)
    return tokens.tolist(), log_probs.gather(-1, tokens[:, None])[:, 0].tolist()


def _nucleus(probs: Tensor, top_p: Sequence[float]) -> Tensor:
    """Zero what lies outside the smallest set of tokens whose mass reaches ``top_p`` (the first token always stays)."""
    if all(p >= 1.0 for p in top_p):
        return probs
    limits = torch.tensor(top_p, dtype=torch.float64, device=probs.device)[:, None]
    ordered, order = probs.double().sort(dim=-1, descending=True, stable=True)
    ordered[(ordered.cumsum(dim=-1) - ordered) >= limits] = 0.0
    return torch.zeros_like(ordered).scatter(-1, order, ordered)


def _eos_ids(model: Any, tokenizer: Tokenizer) -> frozenset[int]:
    """Every id that ends a message: the tokenizer's and those of the model's generation config."""
    ids = {tokenizer.eos_token_id}
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids.update(configured if isinstance(configured, (list, tuple)) else [configured])
    return frozenset(int(i) for i in ids if i is not None)


class _StopTokens:
    """Tells whether the newest token completed a stop string.

    Only tokens that begin with an end of a stop string (``>``, ``ch>``, ..) can complete it; for all others, nearly
    all of them, the answer is one look-up.
    """

    TAIL = 24  # tokens decoded to look for a stop string

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._may_end: dict[tuple[str, ...], frozenset[int]] = {}

    def completes(self, drawn: Sequence[int], stop: tuple[str, ...]) -> bool:
        if not stop:
            return False
        if stop not in self._may_end:
            ends = tuple(word[i:] for word in stop for i in range(len(word)))
            texts = enumerate(self._tokenizer.decode([i]) for i in range(self._vocab_size))
            # a whole stop string may stand anywhere in a token; parts of characters (U+FFFD) may turn out to be any
            self._may_end[stop] = frozenset(
                i
                for i, text in texts
                if text.startswith((*ends, "\ufffd")) or any(word in text for word in stop)
            )
        if drawn[-1] not in self._may_end[stop]:
            return False
        text = self._tokenizer.decode(drawn[-self.TAIL :], skip_special_tokens=True)
        return any(word in text for word in stop)
