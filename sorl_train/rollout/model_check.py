"""Check a loaded model: trainer and sampler must compute the same log-probabilities as the model alone.

The trainer pads rows and computes logits for the policy's tokens only. The sampler caches keys and values of rows of
different lengths and makes its own attention masks. A model with other attention, positions or state than they expect
would be sampled or trained wrongly without any error, so it is refused here.

The check reads two short random sequences, always in float32, so that rounding cannot hide a fault. During the check
attention spans are shorter than these sequences: wrong masks then show on 72 tokens as well as on 4,096. It takes about
ten passes over the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sorl_env.errors import UserError
from sorl_train.models import packing
from sorl_train.models.attention import (
    OTHER_SAMPLER,
    check_length,
    decoding_model,
    model_name,
    position_table,
    short_spans,
)
from sorl_train.models.forward import action_stats
from sorl_train.rollout.kv_cache import COLUMNS, RowCache, feed

LENGTH = 72  # tokens of the longer sequence
SPAN = 16  # tokens that a layer with a limited span looks back during the check
# In nats. Two exact ways differ by 1e-6 with random weights in float32 (tests/train/rollout/architectures.py) and by
# 6e-5 for SmolLM2. The smallest known fault, a missing soft cap, differs by 0.06 with random weights.
TOLERANCE = 5e-3
# As a share of the largest hidden state. Causal models with random weights differ by 2e-7, a small BERT by 2e-3.
CRITIC_TOLERANCE = 3e-4
OTHER_MODEL = (
    "Choose another model: one that attends to earlier tokens only and computes logits with an output layer"
)
# What a model raises for inputs that it does not expect. Running out of memory is a RuntimeError too, and passes on.
_NOT_FITTING = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def check_policy(model: Any, max_tokens: int, *, sampled: bool, trained: bool) -> None:
    """Refuse a language model if trainer or sampler compute other log-probabilities than the model itself. The model's
    weights and mode and the random state do not change. ``max_tokens`` are those of the longest trajectory; ``sampled``
    says whether ``TransformersSampler`` samples from the model, ``trained`` whether it is trained, so that
    log-probabilities are also computed in training mode, without dropout. Raises ``UserError`` if they differ; the
    message has the reason, the size of the difference and what to do."""
    check_length(model, max_tokens)
    with _undisturbed(model), short_spans(model, SPAN):
        rows = _random_rows(model, max_tokens)
        own = [_own_log_probs(model, row) for row in rows]
        model.train(trained)
        _compare(_trainer_gap, model, rows, own, "the trainer", OTHER_MODEL)
        model.eval()
        if sampled:
            _compare(_sampler_gap, model, rows, own, "sampler.backend=transformers", OTHER_SAMPLER)


def try_packing(model: Any, max_tokens: int, *, sampled: bool = False) -> str | None:
    """Give a model that ``check_policy`` passed the attention of ``packing``, if it then computes the same. The trainer
    then packs rows, and on a CPU both it and the sampler are faster. If our sampler draws from the model (``sampled``),
    it is compared, too. Returns why the model keeps its own attention, in words, or None."""

    def gap(model: Any, rows: list[Tensor], own: list[Tensor]) -> float:
        trainer = _trainer_gap(model, rows, own)
        return max(trainer, _sampler_gap(model, rows, own)) if sampled else trainer

    return _try_packing(model, max_tokens, _own_log_probs, gap, TOLERANCE, "log-probabilities")


def try_packing_critic(critic: Any, max_tokens: int) -> str | None:
    """The same for a critic that ``check_critic`` passed, by its hidden states."""
    return _try_packing(
        critic.backbone, max_tokens, _own_states, _states_gap, CRITIC_TOLERANCE, "hidden states"
    )


def _try_packing(
    model: Any,
    max_tokens: int,
    alone: Callable[[Any, Tensor], Tensor],
    gap: Callable[[Any, list[Tensor], list[Tensor]], float],
    tolerance: float,
    what: str,
) -> str | None:
    before = model.config._attn_implementation
    if before == packing.PACKED:
        return None
    if before != "sdpa":
        return f"it has {before!r} attention"
    with _undisturbed(model), short_spans(model, SPAN):
        rows = _random_rows(model, max_tokens)
        length = len(rows[0])
        # two rows with the prompt of the first, one of them with its turn, too
        for shared in (length // 2, length * 3 // 4):
            rows.append(torch.cat([rows[0][:shared], rows[1].repeat(2)])[:length])
        own = [alone(model, row) for row in rows]
        packing.enable_packing(model)
        try:
            found = gap(model, rows, own)
        except torch.OutOfMemoryError:
            raise
        except _NOT_FITTING as error:
            model.set_attn_implementation(before)
            return f"{type(error).__name__}: {error}"
    if not found <= tolerance:
        model.set_attn_implementation(before)
        return f"{what} would differ by up to {found:.2g}"
    return None


def check_critic(critic: Any, max_tokens: int) -> None:
    """Refuse a critic whose values depend on later tokens or on other rows. Raises as ``check_policy`` does."""
    model = critic.backbone
    check_length(model, max_tokens)
    with _undisturbed(model), short_spans(model, SPAN), torch.no_grad():
        rows = _random_rows(model, max_tokens)
        own = [_own_states(model, row) for row in rows]
        padded = model(input_ids=_padded(rows), use_cache=False).last_hidden_state
        gap = max(float((padded[i, : len(row)] - own[i]).abs().max()) for i, row in enumerate(rows))
        scale = max(float(states.abs().max()) for states in own)
        if not gap <= CRITIC_TOLERANCE * scale:
            raise UserError(
                f"the critic {model_name(model)} computes another hidden state for a token when its row is padded (the "
                f"difference is {gap:.2g}), so it is not a causal model. Choose another one with critic=FOLDER"
            )


@contextmanager
def _undisturbed(model: Any) -> Iterator[None]:
    device = next(model.parameters()).device
    was_training = model.training
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            model.eval()
            yield
        finally:
            model.train(was_training)


def _random_rows(model: Any, max_tokens: int) -> list[Tensor]:
    """Two sequences of ids from the middle of the vocabulary; ids that stand for an image are at its ends."""
    size = len(model.get_input_embeddings().weight)
    length = max(24, min(LENGTH, max_tokens, position_table(model) or LENGTH))
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(size // 4, max(size // 4 + 1, size * 3 // 4), (2, length), generator=draws)
    return [row.to(next(model.parameters()).device) for row in (ids[0], ids[1, : length * 3 // 5])]


def _padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _scored(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """A padded batch (B, L) of rows, and a mask (B, T) of some of their tokens."""
    token_ids = _padded(rows)
    mask = torch.zeros(token_ids[:, 1:].shape, dtype=torch.bool, device=token_ids.device)
    for i, row in enumerate(rows):
        mask[i, len(row) // 4 : len(row) - 1] = True
    return token_ids, mask


@torch.no_grad()
def _own_log_probs(model: Any, row: Tensor) -> Tensor:
    """The model's log-probabilities (L, V) for one sequence, without padding, cache or masks from outside. They are
    computed with plain attention, which each model writes out; faster kernels may leave something out."""
    faster = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        logits: Tensor = model(input_ids=row[None], use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(faster)
    return torch.log_softmax(logits.float(), dim=-1)


@torch.no_grad()
def _own_states(backbone: Any, row: Tensor) -> Tensor:
    """The last hidden states (L, H) of a critic's model for one sequence."""
    states: Tensor = backbone(input_ids=row[None], use_cache=False).last_hidden_state[0]
    return states


def _compare(
    gap: Callable[[Any, list[Tensor], list[Tensor]], float],
    model: Any,
    rows: list[Tensor],
    own: list[Tensor],
    who: str,
    advice: str,
) -> None:
    try:
        found = gap(model, rows, own)
    except (UserError, torch.OutOfMemoryError):
        raise
    except _NOT_FITTING as error:
        raise UserError(
            f"{model_name(model)} does not work with {who} ({type(error).__name__}: {error}). {advice}"
        ) from error
    if not found <= TOLERANCE:
        raise UserError(
            f"{model_name(model)} is not exact with {who}: on random sequences of {len(rows[0])} and {len(rows[1])} "
            f"tokens the log-probabilities differ from the model's own by up to {found:.2g} (limit {TOLERANCE:g}). "
            f"{advice}"
        )


@torch.no_grad()
def _trainer_gap(model: Any, rows: list[Tensor], own: list[Tensor]) -> float:
    token_ids, mask = _scored(rows)
    found = action_stats(model, token_ids, mask).log_probs
    gaps = []
    for i, row in enumerate(rows):
        expected = own[i][:-1].gather(1, row[1:, None])[:, 0]
        gaps.append((found[i, : len(row) - 1] - expected)[mask[i, : len(row) - 1]].abs().max())
    return float(torch.stack(gaps).max())


@torch.no_grad()
def _states_gap(backbone: Any, rows: list[Tensor], own: list[Tensor]) -> float:
    """The largest difference of packed rows' hidden states on some tokens, as a share of the largest state."""
    token_ids, mask = _scored(rows)
    packed = packing.pack(token_ids, mask)
    assert packed is not None
    states = backbone(**packing.inputs(packed)).last_hidden_state[0]
    gaps = [
        (states[packed.where[i][mask[i]]] - own[i][:-1][mask[i, : len(row) - 1]]).abs().max()
        for i, row in enumerate(rows)
    ]
    return float(torch.stack(gaps).max() / max(float(alone.abs().max()) for alone in own))


def _sampler_gap(model: Any, rows: list[Tensor], own: list[Tensor]) -> float:
    cache, decoder = RowCache(model, len(rows), torch.float32, COLUMNS), decoding_model(model, torch.float32)
    gaps = []
    for parts in zip(*(_parts(len(row)) for row in rows), strict=True):
        new = [row[part].tolist() for row, part in zip(rows, parts, strict=True)]
        log_probs = torch.log_softmax(feed(decoder, cache, slice(0, len(rows)), new).float(), dim=-1)
        expected = torch.stack([own[i][part.stop - 1] for i, part in enumerate(parts)])
        gaps.append((log_probs - expected).abs().max())
    return float(torch.stack(gaps).max())


def _parts(length: int) -> list[slice]:
    """The parts in which the sampler reads a sequence: a prompt, single tokens, a longer reply, single tokens."""
    prompt, reply = length // 3, length - 6 - length // 3
    ends = [prompt, prompt + 1, prompt + 2, prompt + 3]
    ends += [ends[-1] + reply, ends[-1] + reply + 1, ends[-1] + reply + 2, length]
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
