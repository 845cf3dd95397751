"""What is known of each token: scores before a batch is trained on, and a record for the viewer after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sorl_train.config.settings import TrainConfig
from sorl_train.learner.batch import Batch
from sorl_train.learner.optimizer_step import NonFiniteError
from sorl_train.losses.policy import LossSettings
from sorl_train.losses.segments import Segments, importance_ratio
from sorl_train.models.forward import action_stats, autocast
from sorl_train.models.packed_attention import packs
from sorl_train.run.metrics_log import TokenRecord


@torch.no_grad()
def score(
    batch: Batch, policies: Mapping[str, Any], critic: Any, config: TrainConfig, device: torch.device
) -> Batch:
    """Fill in log-probabilities, one field for each of ``policies``, and the critic's values if there is one.

    Raises ``NonFiniteError`` if a log-probability of the sampler or of the policy is NaN or infinite.
    """
    fields = {name: torch.zeros(batch.action_mask.shape) for name in policies}
    if critic is not None:
        fields["values"] = torch.zeros(batch.action_mask.shape)
    models = [*policies.values(), *([] if critic is None else [critic.backbone])]
    by_group = all(map(packs, models))
    for index, micro in batch.micro_batches(config.update.log_prob_micro_batch_size, by_group=by_group):
        micro = micro.to(device)
        columns = slice(0, micro.action_mask.shape[1])
        with autocast(config.hardware.dtype, device):
            for name, model in policies.items():
                temperature = config.sampler.temperature
                stats = action_stats(model, micro.token_ids, micro.action_mask, temperature=temperature)
                fields[name][index, columns] = stats.log_probs.float().cpu()
            if critic is not None:
                fields["values"][index, columns] = critic(micro.token_ids, micro.action_mask).float().cpu()
    checked = {"a sampled": batch.rollout_log_probs, "a recomputed": fields.get("old_log_probs")}
    for name, figures in checked.items():
        if figures is None:
            continue
        broken = (~torch.isfinite(figures)).any(dim=1)
        if broken.any():
            ids = tuple(batch.ids[i] for i in broken.nonzero()[:, 0].tolist())
            raise NonFiniteError(f"{name} log-probability", ids)
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
