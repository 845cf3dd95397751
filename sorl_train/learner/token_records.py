"""Ratio, advantage and clipping of each token in a training step's last epoch, for the trajectory viewer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sorl_train.learner.batch import Batch
from sorl_train.losses.policy import LossSettings
from sorl_train.losses.segments import Segments, importance_ratio
from sorl_train.run.metrics_log import TokenRecord


def token_records(
    batch: Batch,
    seen: Mapping[str, tuple[Tensor, Tensor]],
    settings: LossSettings,
    texts: Mapping[str, Sequence[str]],
) -> list[TokenRecord]:
    """A record for each trajectory of ``batch`` that the policy took an optimizer step on.

    Args:
        seen: by trajectory id, log-probabilities and entropies (T,) at its last optimizer step.
        texts: by trajectory id, the text of each of its tokens.
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
