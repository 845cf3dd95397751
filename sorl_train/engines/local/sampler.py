"""A continuous-batching sampler for any decoder-only transformers model.

Each trajectory in flight holds one row of a key-value cache from its first token to its last, so a turn only pays
for the tokens that are new. Rows that are decoding are kept in front, ``[0, num_active)``: one decoding step is one
forward pass over a contiguous view of the cache, finished rows leave it at once, and rows that wait for a tool cost
nothing. New rows and returning rows are prefilled together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sorl_env.rollout import SampledTurn, SamplingParams
from sorl_env.tokens import Tokenizer
from sorl_train.config import ModelConfig
from sorl_train.models import autocast, compute_dtype

PREFILL_TOKENS = 16384  # upper bound of rows x columns of one prefill pass
# Event-loop turns granted to trajectories between two steps: enough for a reply of an in-process tool to come back
# as the next turn's request, so that rows rejoin the batch together. It never waits for a tool that is slow.
YIELDS = 6


class RowCache:
    """Keys and values of all rows, (layers, 2, rows, kv_heads, capacity, head_dim), written in place.

    It stands in for a transformers ``Cache``: the model calls ``update`` once a layer. ``select`` says beforehand which
    rows a forward pass covers and where their new tokens go; ``mask`` hides what lies behind a row's length.
    """

    def __init__(self, model: nn.Module, rows: int, dtype: torch.dtype, capacity: int = 256) -> None:
        config: Any = model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, rows, heads, capacity, head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=next(model.parameters()).device)
        self.lengths = np.zeros(rows, dtype=np.int64)
        self._rows = slice(0, 0)
        self._width = 0
        self._row_index: Tensor = torch.empty(0)
        self._column_index: Tensor = torch.empty(0)

    @property
    def capacity(self) -> int:
        return self.data.shape[4]

    def select(self, rows: slice, new_tokens: int) -> tuple[Tensor, Tensor]:
        """Prepare a pass of ``new_tokens`` columns over ``rows``: position ids (b, n) and the mask (b, 1, n, w)."""
        lengths = self.lengths[rows]
        self._width = int(lengths.max()) + new_tokens
        self._grow(self._width)
        device = self.data.device
        columns = torch.as_tensor(lengths, device=device)[:, None] + torch.arange(new_tokens, device=device)
        self._rows, self._column_index = rows, columns
        self._row_index = torch.arange(rows.start, rows.stop, device=device)[:, None]
        mask = torch.arange(self._width, device=device) <= columns[:, None, :, None]
        return columns, mask

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store (b, heads, n, dim) at the selected places and return all keys and values up to the widest row."""
        for kind, new in enumerate((keys, values)):
            self.data[layer, kind, self._row_index, :, self._column_index] = new.transpose(1, 2).to(
                self.data.dtype
            )
        view = self.data[layer, :, self._rows, :, : self._width]
        return view[0], view[1]

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows."""
        if a == b:
            return
        width = int(max(self.lengths[a], self.lengths[b]))
        kept = self.data[:, :, a, :, :width].clone()
        self.data[:, :, a, :, :width] = self.data[:, :, b, :, :width]
        self.data[:, :, b, :, :width] = kept
        self.lengths[[a, b]] = self.lengths[[b, a]]

    def _grow(self, width: int) -> None:
        if width <= self.capacity:
            return
        layers, two, rows, heads, capacity, dim = self.data.shape
        data = self.data.new_zeros((layers, two, rows, heads, max(width, 2 * capacity), dim))
        data[..., :capacity, :] = self.data
        self.data = data


@dataclass
class _Row:
    """One trajectory in flight."""

    slot: int
    cached: list[int] = field(default_factory=list)  # the tokens whose keys and values are in the cache
    pending: list[int] = field(default_factory=list)  # tokens to feed before the next draw
    drawn: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    params: SamplingParams = field(default_factory=lambda: SamplingParams(1))
    draws: np.random.Generator = field(default_factory=np.random.default_rng)
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
        self._cache = self._new_cache(0)
        self._rows: dict[str, _Row] = {}  # by session
        self._by_slot: list[_Row] = []  # rows in flight, [0, num_active) decoding
        self._num_active = 0
        self._waiting: list[_Row] = []
        self._driver: asyncio.Task[None] | None = None
        self._eos = _eos_ids(model, tokenizer)
        self._enders = _StopTokens(tokenizer, len(model.get_input_embeddings().weight))

    @contextmanager
    def session(self) -> Iterator[TransformersSampler]:
        """Around one batch: switches the model to inference and gives the cache's memory back afterwards."""
        was_training = self.model.training
        self.model.eval()
        self._cache = self._new_cache(self._max_rows)
        try:
            yield self
        finally:
            self.model.train(was_training)
            self._rows.clear()
            self._by_slot.clear()
            self._waiting.clear()
            self._num_active, self._driver = 0, None
            self._cache = self._new_cache(0)

    def _new_cache(self, rows: int) -> RowCache:
        return RowCache(self.model, rows, compute_dtype(self._config, self._device))

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
        last = self._by_slot[-1]
        self._swap(row, last)
        self._cache.lengths[row.slot] = 0
        self._by_slot.pop()

    def _admit(self, session: str) -> _Row:
        if len(self._by_slot) == self._max_rows:
            raise ValueError(f"more than max_concurrency={self._max_rows} trajectories in flight")
        row = self._rows[session] = _Row(slot=len(self._by_slot))
        self._by_slot.append(row)
        return row

    def _swap(self, a: _Row, b: _Row) -> None:
        self._cache.swap(a.slot, b.slot)
        self._by_slot[a.slot], self._by_slot[b.slot] = b, a
        a.slot, b.slot = b.slot, a.slot

    def _deactivate(self, row: _Row) -> None:
        self._swap(row, self._by_slot[self._num_active - 1])
        self._num_active -= 1

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
                    self._step(slice(0, self._num_active), 1)
                else:
                    return
        except BaseException as error:
            for row in self._by_slot:
                if row.reply is not None and not row.reply.done():
                    row.reply.set_exception(
                        error if isinstance(error, Exception) else asyncio.CancelledError()
                    )
            raise

    def _prefill(self) -> None:
        """Feed the pending tokens of waiting rows, similar lengths together, and draw their first tokens."""
        self._waiting.sort(key=lambda row: -len(row.pending))
        width = len(self._waiting[0].pending)
        count = max(1, PREFILL_TOKENS // width)
        rows, self._waiting = self._waiting[:count], self._waiting[count:]
        start = self._num_active
        for row in rows:
            self._swap(row, self._by_slot[self._num_active])
            self._num_active += 1
        self._step(slice(start, self._num_active), width)

    @torch.no_grad()
    def _step(self, slots: slice, width: int) -> None:
        """One forward pass over ``slots``, ``width`` columns wide, and one draw for each row."""
        rows = self._by_slot[slots]
        device = self._cache.data.device
        inputs = torch.zeros((len(rows), width), dtype=torch.long)
        for i, row in enumerate(rows):
            inputs[i, : len(row.pending)] = torch.as_tensor(row.pending)
        last = torch.as_tensor([len(row.pending) - 1 for row in rows], device=device)
        positions, mask = self._cache.select(slots, width)
        with autocast(self._config, self._device):
            output = self.model.base_model(
                input_ids=inputs.to(device),
                attention_mask=mask,
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
            )
            hidden = output.last_hidden_state[torch.arange(len(rows), device=device), last]
            logits = self.model.get_output_embeddings()(hidden)  # (b, V)
        for row in rows:
            self._cache.lengths[row.slot] += len(row.pending)
            row.cached.extend(row.pending)
        tokens, log_probs = _draw(logits, rows)
        for row, token, log_prob in zip(rows, tokens, log_probs, strict=True):
            self._accept(row, token, log_prob)

    def _accept(self, row: _Row, token: int, log_prob: float) -> None:
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
            return
        self._deactivate(row)
        assert row.reply is not None
        if not row.reply.done():  # the caller may have been cancelled
            row.reply.set_result(SampledTurn(row.drawn, row.log_probs, finish, self.policy_version))  # type: ignore[arg-type]


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
        probs = _nucleus(log_probs.exp().double(), [row.params.top_p for row in rows])
        cumulative = probs.cumsum(dim=-1)
        tokens = (
            (cumulative <= (uniforms * cumulative[:, -1])[:, None])
            .sum(dim=-1)
            .clamp(max=logits.shape[-1] - 1)
        )
        if not all(temperatures):
            greedy = torch.tensor([not t for t in temperatures], device=logits.device)
            tokens = torch.where(greedy, log_probs.argmax(dim=-1), tokens)
    return tokens.tolist(), log_probs.gather(-1, tokens[:, None])[:, 0].tolist()


def _nucleus(probs: Tensor, top_p: Sequence[float]) -> Tensor:
    """Zero what lies outside the smallest set of tokens whose mass reaches ``top_p`` (the first token always stays)."""
    if all(p >= 1.0 for p in top_p):
        return probs
    limits = torch.tensor(top_p, dtype=probs.dtype, device=probs.device)[:, None]
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    ordered[(ordered.cumsum(dim=-1) - ordered) >= limits] = 0.0
    return torch.zeros_like(probs).scatter(-1, order, ordered)


def _eos_ids(model: Any, tokenizer: Tokenizer) -> frozenset[int]:
    """Every id that ends a message: the tokenizer's and those of the model's generation config."""
    ids = {tokenizer.eos_token_id}
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids.update(configured if isinstance(configured, (list, tuple)) else [configured])
    return frozenset(int(i) for i in ids if i is not None)


class _StopTokens:
    """Tells whether the newest token completed a stop string.

    Only tokens that hold the last character of a stop string can complete one; for all others, nearly all of them,
    the answer is one look-up.
    """

    TAIL = 24  # tokens decoded to look for a stop string

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._may_end: dict[tuple[str, ...], np.ndarray[Any, np.dtype[np.bool_]]] = {}

    def completes(self, drawn: Sequence[int], stop: tuple[str, ...]) -> bool:
        if not stop:
            return False
        if stop not in self._may_end:
            last = {word[-1] for word in stop}
            texts = (self._tokenizer.decode([i]) for i in range(self._vocab_size))
            self._may_end[stop] = np.fromiter(
                (any(c in text for c in last) for text in texts), dtype=np.bool_
            )
        if not self._may_end[stop][drawn[-1]]:
            return False
        text = self._tokenizer.decode(drawn[-self.TAIL :], skip_special_tokens=True)
        return any(word in text for word in stop)
