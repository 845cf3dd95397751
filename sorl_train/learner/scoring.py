"""What is known of each token: scores before a batch is trained on, and a record for the viewer after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sorl_train.learner.backend import Backend
from sorl_train.learner.batch import Batch
from sorl_train.learner.optimizer_step import NonFiniteError, on_device
from sorl_train.losses.policy import LossSettings
from sorl_train.losses.segments import Segments, importance_ratio
from sorl_train.run.metrics_log import TokenRecord

_WHAT = {"rollout_log_probs": "a sampled log-probability", "old_log_probs": "a recomputed log-probability"}


@torch.no_grad()
def score(batch: Batch, backends: Mapping[str, Backend], size: int) -> dict[str, Tensor]:
    """Fields of the batch, (B, T) float32 on the CPU, each computed by its backend in micro-batches of ``size`` rows.

    A critic computes ``values``; the other fields are log-probabilities of the policy's tokens.
    """
    fields = {name: torch.zeros(batch.action_mask.shape) for name in backends}
    for name, backend in backends.items():
        for rows, micro, _ in on_device(batch, size, backend):
            mask = micro.action_mask
            part = (
                backend.values(micro, mask) if name == "values" else backend.log_probs(micro, mask).log_probs
            )
            fields[name][rows, : mask.shape[1]] = part.float().cpu()
    return fields


def with_scores(batch: Batch, fields: Mapping[str, Tensor]) -> Batch:
    """The batch with these fields (B, T); raises ``NonFiniteError`` if one, or one of the sampler's, is not finite."""
    for name, figures in {"rollout_log_probs": batch.rollout_log_probs, **fields}.items():
        broken = (~torch.isfinite(figures)).any(dim=1).nonzero()[:, 0].tolist()
        if broken:
            raise NonFiniteError(_WHAT.get(name, f"one of the {name}"), tuple(batch.ids[i] for i in broken))
    return batch.with_fields(**fields)


def token_records(
    batch: Batch,
    seen: Mapping[str, tuple[Tensor, Tensor]],
    settings: LossSettings,
    texts: Mapping[str, Sequence[str]],
) -> list[TokenRecord]:
    """A record for each trajectory of ``batch`` that the policy took an optimizer step on.

    By trajectory id, ``seen`` has log-probabilities and entropies (T,) at its last step, ``texts`` each token's text.
    """
    assert batch.old_log_probs is not None and batch.advantages is not None
    log_probs, entropy = torch.zeros_like(batch.old_log_probs), torch.zeros_like(batch.old_log_probs)
    for row, name in enumerate(batch.ids):
        if name in seen:
            width = min(len(seen[name][0]), log_probs.shape[1])
            log_probs[row, :width], entropy[row, :width] = (part[:width] for part in seen[name])
    segments = Segments.of(settings.ratio_level, batch.loss_mask, batch.turn_ids)
    log_ratio = segments.pick(log_probs) - segments.pick(batch.old_log_probs)
    ratio = segments.spread(importance_ratio(segments.mean(log_ratio)))
    advantage = segments.pick(batch.advantages)
    columns = {
        "turn": segments.pick(batch.turn_ids),
        "log_ratio": log_ratio,
        "ratio": ratio,
        "advantage": advantage,
        "entropy": segments.pick(entropy),
        "clipped": settings.clip.clips(ratio, advantage),
    }
    if batch.correction is not None:  # a token of weight 0 has no gradient that clipping could take away
        columns["weight"] = segments.pick(batch.correction)
        columns["clipped"] &= columns["weight"] > 0
    lengths = segments.row_lengths.tolist()
    pieces = {name: values.split(lengths) for name, values in columns.items()}
    records = []
    for row, name in enumerate(batch.ids):
        if name in seen:
            own = {column: parts[row].tolist() for column, parts in pieces.items()}
            records.append(TokenRecord(id=name, tokens=texts[name], **own))
    return records
