"""A continuous-batching sampler for any decoder-only transformers model.

Each trajectory in flight holds one row of a key-value cache from its first token to its last, so a turn only pays
for the tokens that are new. Rows that are decoding are kept in front, ``[0, num_active)``: one decoding step is one
forward pass over a contiguous view of the cache, finished rows leave it at once, and rows that wait for a tool cost
nothing. New rows and returning rows are prefilled together; a prompt that a group shares is read once.

A turn that does not end as it should takes its trajectory's row with it, and the next turn reads all tokens anew: where
the caller is cancelled or the trajectory is released, the row leaves the decoding rows; where the model raises, no row
is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sorl_env.rollout import SampledTurn, SamplingParams
from sorl_env.tokens import Tokenizer
from sorl_train.config.settings import ModelConfig
from sorl_train.models.forward import autocast, compute_dtype
from sorl_train.rollout.kv_cache import COLUMNS, RowCache, feed
from sorl_train.rollout.slots import Row, Slots

# Rows x columns of one prefill pass: on a CPU what its cache holds, on a GPU enough to fill it.
CPU_PREFILL, GPU_PREFILL = 2048, 16384
# A cache of up to so many bytes stays from one batch to the next: touching new memory costs a tiny policy a tenth of
# its rollout. A larger one makes room for the update.
KEPT_CACHE = 1 << 28
# Event-loop turns granted to trajectories between two steps: enough for a reply of an in-process tool to come back
# as the next turn's request, so that rows rejoin the batch together. It never waits for a tool that is slow.
YIELDS = 6


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
        self._slots = Slots(self._cache)
        self._waiting: list[Row] = []
        self._is_open = False
        self._driver: asyncio.Task[None] | None = None
        self._eos = _eos_ids(model, tokenizer)
        self._vocab_size = len(model.get_input_embeddings().weight)
        self._enders = _StopTokens(tokenizer, self._vocab_size)

    @contextmanager
    def session(self) -> Iterator[TransformersSampler]:
        """Around one batch: switches the model to inference and gives a large cache's memory back afterwards.

        What is still in flight at the end is cancelled.

        Raises:
            RuntimeError: a session is open already; its end would take the rows of both.
        """
        if self._is_open:
            raise RuntimeError("the sampler's session is open already: one batch at a time")
        was_training = self.model.training
        self.model.eval()
        if len(self._cache.lengths) == 0:
            self._cache = self._new_cache(self._max_rows)
        self._slots = Slots(self._cache)
        self._is_open = True
        try:
            yield self
        finally:
            self._is_open = False
            self.model.train(was_training)
            self._end_driver()
            self._give_up_all(None)
            self._capacity = self._cache.capacity
            if self._cache.data.nbytes > KEPT_CACHE:
                self._cache = self._new_cache(0)

    def _new_cache(self, rows: int) -> RowCache:
        return RowCache(self.model, rows, compute_dtype(self._config, self._device), self._capacity)

    async def generate(self, session: str, token_ids: Sequence[int], params: SamplingParams) -> SampledTurn:
        """Draw one turn (see ``Sampler.generate``).

        Raises:
            ValueError: ``token_ids`` do not extend the session's earlier ones or are not the model's, the session's
                last turn is still being drawn, or all rows are taken.
            RuntimeError: there is no session around it.
            asyncio.CancelledError: the trajectory was released meanwhile, or the session ended.
        """
        row = self._row_for(session, token_ids)
        row.pending = list(token_ids[len(row.cached) :])
        row.params, row.drawn, row.log_probs = params, [], []
        row.draws = np.random.Generator(np.random.Philox(params.seed))
        reply = row.reply = asyncio.get_running_loop().create_future()
        self._waiting.append(row)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.ensure_future(self._drive())
        try:
            return await reply
        except BaseException:  # cancelled, or the model raised: the row holds a turn that nobody has
            self._drop(row)
            raise

    def release(self, session: str) -> None:
        """Free the trajectory's row (see ``Sampler.release``); a turn that is still being drawn is cancelled."""
        row = self._slots.get(session)
        if row is not None:
            self._drop(row)
            row.settle(None)

    def _row_for(self, session: str, token_ids: Sequence[int]) -> Row:
        """The session's row, whose cached tokens ``token_ids`` extend; a new one where it has none."""
        if not self._is_open:
            raise RuntimeError("the sampler draws only inside its session()")
        row = self._slots.get(session)
        if row is not None and row.reply is not None:
            if not row.reply.done():
                raise ValueError(f"session {session}: its last turn is still being drawn; await it first")
            self._drop(row)  # its caller was cancelled, and has not been told yet
            row = None
        cached = [] if row is None else row.cached
        if list(token_ids[: len(cached)]) != cached or len(token_ids) == len(cached):
            raise ValueError(f"session {session}: token_ids must extend the {len(cached)} tokens seen before")
        for token in token_ids[len(cached) :]:  # in a forward pass it would fail for all
            if not 0 <= token < self._vocab_size:
                raise ValueError(
                    f"session {session}: token {token} is none of the model's {self._vocab_size}"
                )
        return row or self._slots.admit(session)

    def _drop(self, row: Row) -> None:
        """Take a row out, whatever it was about to do."""
        self._slots.drop(row)
        if row in self._waiting:
            self._waiting.remove(row)

    def _give_up_all(self, error: Exception | None) -> int:
        """Take all rows out and tell those that wait for a turn: ``error``, or that they are cancelled.

        Returns how many were told.
        """
        self._waiting.clear()
        return sum(row.settle(error) for row in self._slots.clear())

    async def _drive(self) -> None:
        """Prefill and decode until no trajectory wants tokens; errors reach every caller that waits."""
        this = asyncio.current_task()
        try:
            while True:
                for _ in range(YIELDS):
                    await asyncio.sleep(0)
                # prefill in groups: a pass for every row that returns would double the number of passes
                if self._waiting and len(self._waiting) * 4 >= self._slots.num_active:
                    self._prefill()
                elif self._slots.num_active:
                    rows = slice(0, self._slots.num_active)
                    self._accept(self._slots.rows_in(rows), self._forward(rows))
                else:
                    return
        except BaseException as error:
            if self._driver is not this:
                raise  # the session has ended: the rows are those of the next one
            # a step that broke off leaves rows half fed: none is kept, and trajectories that go on are read anew
            told = self._give_up_all(error if isinstance(error, Exception) else None)
            if not (told and isinstance(error, Exception)):
                raise  # else it is the callers' by now, and asyncio need not report it a second time

    def _end_driver(self) -> None:
        """Stop the driver, where its event loop goes on after the session."""
        driver, self._driver = self._driver, None
        if driver is not None and not driver.done() and not driver.get_loop().is_closed():
            driver.cancel()

    def _prefill(self) -> None:
        """Feed the pending tokens of all waiting rows, similar lengths together, and draw their first tokens."""
        # rows of one group wait for the same prompt: the first reads it for all
        readers: dict[Any, list[Row]] = {}
        for row in sorted(self._waiting, key=lambda row: -len(row.pending)):
            readers.setdefault(id(row) if row.cached else tuple(row.pending), []).append(row)
        self._waiting = []
        groups = list(readers.values())
        limit = CPU_PREFILL if self._device.type == "cpu" else GPU_PREFILL
        while groups:
            count = max(1, limit // len(groups[0][0].pending))
            self._read(groups[:count])
            groups = groups[count:]

    def _read(self, groups: Sequence[list[Row]]) -> None:
        """One prefill pass; rows of one group have the same pending tokens."""
        slots = self._slots.activate([group[0] for group in groups])
        logits = self._forward(slots)
        rows = self._slots.rows_in(slots)
        pairs = [(group[0], row) for group in groups for row in group[1:]]
        if pairs:
            copies = [row for _, row in pairs]
            self._slots.activate(copies)
            sources = [reader.slot for reader, _ in pairs]
            self._cache.copy(sources, [row.slot for row in copies])
            for row in copies:
                row.cached.extend(row.pending)
            logits = torch.cat([logits, logits[[slot - slots.start for slot in sources]]])
            rows += copies
        self._accept(rows, logits)

    def _forward(self, slots: slice) -> Tensor:
        """Feed the pending tokens of the rows in ``slots``; returns the logits after their last ones, (b, V)."""
        rows = self._slots.rows_in(slots)
        for row in rows:
            row.cached.extend(row.pending)
        with autocast(self._config, self._device):
            return feed(self.model, self._cache, slots, [row.pending for row in rows])

    def _accept(self, rows: Sequence[Row], logits: Tensor) -> None:
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
            if not row.reply.done():  # else its caller was cancelled, and drops the row when it is told
                turn = SampledTurn(row.drawn, row.log_probs, finish, self.policy_version)  # type: ignore[arg-type]
                row.reply.set_result(turn)
                row.reply = None
        # from behind: rows that finish together stay put
        for row in sorted(finished, key=lambda row: -row.slot):
            self._slots.deactivate(row)


@torch.inference_mode()
def _draw(logits: Tensor, rows: Sequence[Row]) -> tuple[list[int], list[float]]:
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
