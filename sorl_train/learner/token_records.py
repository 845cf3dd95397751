"""What the loss made of each token in a step's last epoch, for the trajectory viewer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sorl_train.algorithms import Algorithm
from sorl_train.config.settings import LossConfig
from sorl_train.learner.batch import Batch
from sorl_train.losses.ratios import clipped_tokens, segment_ratios
from sorl_train.losses.segments import Segments
from sorl_train.run.token_stats import TokenRecord


def token_records(
    batch: Batch,
    seen: Mapping[str, tuple[Tensor, Tensor]],
    algorithm: Algorithm,
    loss: LossConfig,
    texts: Mapping[str, Sequence[str]],
) -> list[TokenRecord]:
    """A record for each trajectory of ``batch`` that an actor's step was taken on.

    Args:
        seen: by trajectory id, log-probabilities and entropies (T,) at the trajectory's last visit.
        texts: by trajectory id, the text of each of its tokens.
    """
    assert batch.old_log_probs is not None and batch.advantages is not None
    log_probs, entropy = torch.zeros_like(batch.old_log_probs), torch.zeros_like(batch.old_log_probs)
    for row, name in enumerate(batch.ids):
        if name in seen:
            width = min(len(seen[name][0]), log_probs.shape[1])
            log_probs[row, :width], entropy[row, :width] = (part[:width] for part in seen[name])
    segments = Segments.of(algorithm.ratio, batch.loss_mask, batch.turn_ids)
    token_ratio = segments.pick(log_probs, torch.float32) - segments.pick(batch.old_log_probs, torch.float32)
    advantage = segments.pick(batch.advantages, torch.float32)
    ratio = segments.spread(segment_ratios(segments, token_ratio))
    clipped = clipped_tokens(ratio, advantage, loss.clip_eps, loss.clip_eps_high)
    columns = {
        "turn": segments.pick(batch.turn_ids, torch.int64),
        "log_ratio": token_ratio,
        "ratio": ratio,
        "advantage": advantage,
        "entropy": segments.pick(entropy, torch.float32),
        "clipped": clipped,
    }
    lengths = segments.row_lengths.tolist()
    pieces = {name: values.split(lengths) for name, values in columns.items()}
    records = []
    for row, name in enumerate(batch.ids):
        if name in seen:
            own = {column: parts[row].tolist() for column, parts in pieces.items()}
            records.append(TokenRecord(id=name, tokens=texts[name], **own))
    return records
