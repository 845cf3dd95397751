"""A continuous-batching sampler for any decoder-only transformers model.

Each trajectory in flight owns one row of a key-value cache from its first token to its last, so that a turn costs only
its new tokens. Decoding rows are kept in front, in the slots ``[0, num_active)``: a decoding step is one forward pass
over a contiguous part of the cache. Finished rows leave that part at once, and rows that wait for a tool cost nothing.
New and returning rows are prefilled together. Rows with the same tokens so far, as a group has at its prompt and often
after a first search, are read once, and so is the instruction that new prompts begin with.

A row is dropped when its turn does not end properly, because its caller is cancelled or its trajectory is released.
When the model raises, all rows are dropped. The next turn of such a trajectory reads all of its tokens again.
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
from sorl_env.turns.tokens import Tokenizer
from sorl_train.models.attention import decoding_model
from sorl_train.models.forward import autocast, compute_dtype
from sorl_train.rollout.kv_cache import COLUMNS, ActiveRollout, RowCache, Slots, draw, feed

# Tokens (rows x columns) of one prefill pass: on a CPU as many as fit its cache, on a GPU enough to keep it busy.
CPU_PREFILL, GPU_PREFILL = 2048, 16384
# New prompts that share at least this many first tokens, with each other or with a row, have them computed once.
LONG_BEGINNING = 32
# A cache of at most this many bytes is kept between batches: for a tiny policy, touching new memory takes a tenth of
# the rollout. A larger cache is freed for the update.
KEPT_CACHE = 1 << 28
# Passes of the event loop between two steps: enough for a trajectory to get the reply of an in-process tool and to
# request its next turn, so that rows rejoin the batch together. A slow tool is not waited for.
YIELDS = 6


class TransformersSampler:
    """Implements ``sorl_env.rollout.Sampler``; see the module's docstring. Each token takes one uniform random number,
    from a generator seeded by trajectory and turn, and inverts the cumulative distribution. What a trajectory samples
    therefore does not depend on the others in its batch (except for rounding in matrix products), and a run with
    in-process tools is reproducible bit for bit. ``model`` is a causal language model of transformers, the trainer's
    own, so its weights are always the newest. The tokenizer decodes the end of a turn to find stop strings. At most
    ``max_rows`` trajectories are in flight. For ``dtype`` see ``compute_dtype``."""

    def __init__(self, model: Any, tokenizer: Tokenizer, max_rows: int, dtype: str = "auto") -> None:
        self.model = model
        self._device = next(model.parameters()).device
        self._dtype = dtype
        self.policy_version = 0
        self._tokenizer = tokenizer
        self._max_rows = max_rows
        self._capacity = COLUMNS  # of a new cache; it starts with what the last one has grown to
        self._cache = self._new_cache(0)
        self._slots = Slots(self._cache)
        self._waiting: list[ActiveRollout] = []
        self._is_open = False
        self._decoder: Any = None  # the model as a session decodes with it
        self._driver: asyncio.Task[None] | None = None
        self._eos = _eos_ids(model, tokenizer)
        self._vocab_size = len(model.get_input_embeddings().weight)
        self._enders = _StopTokens(tokenizer, self._vocab_size)

    @contextmanager
    def session(self) -> Iterator[TransformersSampler]:
        """The context of one batch: it puts the model into evaluation mode, and at the end cancels the turns in flight
        and frees a large cache. Raises ``RuntimeError`` if a session is open already; the end of one would drop the
        rows of both."""
        if self._is_open:
            raise RuntimeError("the sampler's session is open already: one batch at a time")
        was_training = self.model.training
        self.model.eval()
        self._decoder = decoding_model(self.model, compute_dtype(self._dtype, self._device))
        if len(self._cache.lengths) == 0:
            self._cache = self._new_cache(self._max_rows)
        self._slots = Slots(self._cache)
        self._is_open = True
        try:
            yield self
        finally:
            self._is_open = False
            self._decoder = None
            self.model.train(was_training)
            self._end_driver()
            self._give_up_all(None)
            self._capacity = self._cache.capacity
            if self._cache.data.nbytes > KEPT_CACHE:
                self._cache = self._new_cache(0)

    def _new_cache(self, rows: int) -> RowCache:
        return RowCache(self.model, rows, compute_dtype(self._dtype, self._device), self._capacity)

    async def generate(self, session: str, token_ids: Sequence[int], params: SamplingParams) -> SampledTurn:
        """Sample one turn (see ``Sampler.generate``). Raises ``ValueError`` if ``token_ids`` do not extend the
        session's earlier ones or are not in the vocabulary, the session's last turn is still being sampled, or all rows
        are taken; ``RuntimeError`` if no ``session()`` is open; and ``asyncio.CancelledError`` if the trajectory was
        released meanwhile, or the session ended."""
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
        except BaseException:  # cancelled, or the model raised: the row holds a turn that nobody received
            self._drop(row)
            raise

    def release(self, session: str) -> None:
        """Free the trajectory's row (see ``Sampler.release``); a turn that is still being sampled is cancelled."""
        row = self._slots.get(session)
        if row is not None:
            self._drop(row)
            row.settle(None)

    def _row_for(self, session: str, token_ids: Sequence[int]) -> ActiveRollout:
        """The session's row, or a new one, after a check that ``token_ids`` extend its cached tokens."""
        if not self._is_open:
            raise RuntimeError("the sampler draws only inside its session()")
        row = self._slots.get(session)
        if row is not None and row.reply is not None:
            if not row.reply.done():
                raise ValueError(f"session {session}: its last turn is still being sampled; await it first")
            self._drop(row)  # its caller was cancelled and does not know yet
            row = None
        cached = [] if row is None else row.cached
        if list(token_ids[: len(cached)]) != cached or len(token_ids) == len(cached):
            raise ValueError(f"session {session}: token_ids must extend the {len(cached)} tokens seen before")
        for token in token_ids[len(cached) :]:  # checked here, as a forward pass would fail for all rows
            if not 0 <= token < self._vocab_size:
                raise ValueError(
                    f"session {session}: token {token} is none of the model's {self._vocab_size}"
                )
        return row or self._slots.admit(session)

    def _drop(self, row: ActiveRollout) -> None:
        self._slots.drop(row)
        if row in self._waiting:
            self._waiting.remove(row)

    def _give_up_all(self, error: Exception | None) -> int:
        """Remove all rows and ``settle`` them; returns how many callers were waiting."""
        self._waiting.clear()
        return sum(row.settle(error) for row in self._slots.clear())

    async def _drive(self) -> None:
        this = asyncio.current_task()
        try:
            while True:
                for _ in range(YIELDS):
                    await asyncio.sleep(0)
                # rows are prefilled in groups: one pass for each returning row would double the number of passes
                if self._waiting and len(self._waiting) * 4 >= self._slots.num_active:
                    self._prefill()
                elif self._slots.num_active:
                    rows = slice(0, self._slots.num_active)
                    self._accept(self._slots.rows_in(rows), self._forward(rows))
                else:
                    return
        except BaseException as error:
            if self._driver is not this:
                raise  # the session has ended, and the rows belong to the next one
            # a failed step leaves rows half fed, so none is kept
            told = self._give_up_all(error if isinstance(error, Exception) else None)
            if not (told and isinstance(error, Exception)):
                raise  # otherwise the callers have the error, and asyncio need not report it as well

    def _end_driver(self) -> None:
        """Stop the driver, in case its event loop outlives the session."""
        driver, self._driver = self._driver, None
        if driver is not None and not driver.done() and not driver.get_loop().is_closed():
            driver.cancel()

    def _prefill(self) -> None:
        """Feed the pending tokens of all waiting rows, similar lengths together, and sample their first tokens."""
        self._read_beginning([row for row in self._waiting if not row.cached])
        # rows of a group wait for the same prompt, and after the same first turn for the same reply: one reads for all
        readers: dict[tuple[int, ...], list[ActiveRollout]] = {}
        for row in sorted(self._waiting, key=lambda row: -len(row.pending)):
            readers.setdefault((*row.cached, *row.pending), []).append(row)
        self._waiting = []
        groups = list(readers.values())
        limit = CPU_PREFILL if self._device.type == "cpu" else GPU_PREFILL
        while groups:
            count = max(1, limit // len(groups[0][0].pending))
            self._read(groups[:count])
            groups = groups[count:]

    def _read_beginning(self, rows: Sequence[ActiveRollout]) -> None:
        """Give new rows their longest common prefix, and leave each at least one token to compute. The prefix is copied
        from a row that holds it; if none does, the first new row computes it."""
        prompts = sorted({tuple(row.pending) for row in rows})
        if not prompts:
            return
        # of sorted prompts, what the first and the last have in common is common to all
        length = min(_common(prompts[0], prompts[-1]), min(map(len, prompts)) - 1)
        beginning = prompts[0][:length]
        source = max(self._slots.all_rows(), key=lambda row: _common(row.cached, beginning))
        found = _common(source.cached, beginning)
        if found < LONG_BEGINNING:
            if length < LONG_BEGINNING or len(prompts) == 1:
                return
            source, found = rows[0], length
            whole, source.pending = source.pending, list(beginning)
            self._forward(self._slots.activate([source]))
            self._slots.deactivate(source)
            source.pending = whole[found:]
        copies = [row for row in rows if row is not source]
        self._cache.copy([source.slot] * len(copies), [row.slot for row in copies], found)
        for row in copies:
            row.cached, row.pending = row.pending[:found], row.pending[found:]

    def _read(self, groups: Sequence[list[ActiveRollout]]) -> None:
        """One prefill pass over groups of rows; the rows of a group have the same tokens, cached and pending."""
        slots = self._slots.activate([group[0] for group in groups])
        logits = self._forward(slots)
        rows = self._slots.rows_in(slots)
        pairs = [(group[0], row) for group in groups for row in group[1:]]
        if pairs:
            copies = [row for _, row in pairs]
            for row in copies:
                self._cache.free(row.slot)  # what it has cached comes with the rest
            self._slots.activate(copies)
            sources = [reader.slot for reader, _ in pairs]
            self._cache.copy(sources, [row.slot for row in copies])
            for reader, row in pairs:
                row.cached = list(reader.cached)
            logits = torch.cat([logits, logits[[slot - slots.start for slot in sources]]])
            rows += copies
        self._accept(rows, logits)

    def _forward(self, slots: slice) -> Tensor:
        """Feed the pending tokens of the rows in ``slots``; returns the logits after the last ones, (b, V)."""
        rows = self._slots.rows_in(slots)
        for row in rows:
            row.cached.extend(row.pending)
        with autocast(self._dtype, self._device):
            return feed(self._decoder, self._cache, slots, [row.pending for row in rows])

    def _accept(self, rows: Sequence[ActiveRollout], logits: Tensor) -> None:
        finished = []
        for row, token, log_prob in zip(rows, *draw(logits, rows), strict=True):
            row.drawn.append(token)
            row.log_probs.append(log_prob)
            row.pending = [token]
            if token in self._eos or token in row.params.stop_ids:
                finish = "eos"
            elif self._enders.completes(row.drawn, row.params.stop):
                finish = "stop"
            elif len(row.drawn) >= row.params.max_new_tokens:
                finish = "length"
            else:
                continue
            finished.append(row)
            assert row.reply is not None
            if not row.reply.done():  # otherwise its caller was cancelled, and will drop the row
                turn = SampledTurn(row.drawn, row.log_probs, finish, self.policy_version)  # type: ignore[arg-type]
                row.reply.set_result(turn)
                row.reply = None
        # from the last slot on, so that rows that finish together are not moved more than once
        for row in sorted(finished, key=lambda row: -row.slot):
            self._slots.deactivate(row)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    length = min(len(one), len(other))
    return next((place for place in range(length) if one[place] != other[place]), length)


def _eos_ids(model: Any, tokenizer: Tokenizer) -> frozenset[int]:
    """All ids that end a message: the tokenizer's and those of the model's generation config."""
    ids = {tokenizer.eos_token_id}
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids.update(configured if isinstance(configured, (list, tuple)) else [configured])
    return frozenset(int(i) for i in ids if i is not None)


class _StopTokens:
    """Tells whether the newest token completed a stop string. Only a token that begins with the end of a stop string
    (``>``, ``ch>``, ..) can complete it. For nearly all tokens the answer is therefore one look-up."""

    TAIL = 24  # last tokens of a turn that are decoded to look for a stop string

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
            # a token may also contain a whole stop string, or part of a character (U+FFFD), which may become anything
            self._may_end[stop] = frozenset(
                i
                for i, text in texts
                if text.startswith((*ends, "\ufffd")) or any(word in text for word in stop)
            )
        if drawn[-1] not in self._may_end[stop]:
            return False
        text = self._tokenizer.decode(drawn[-self.TAIL :], skip_special_tokens=True)
        return any(word in text for word in stop)
