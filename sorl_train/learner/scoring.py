"""Log-probabilities and values of a collected batch, computed before it is trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sorl_train.config.settings import TrainConfig
from sorl_train.learner.batch import Batch
from sorl_train.learner.optimizer_step import NonFiniteError
from sorl_train.models.forward import action_stats, autocast
from sorl_train.models.packed_attention import packs


@torch.no_grad()
def score(
    batch: Batch, policies: Mapping[str, Any], critic: Any, config: TrainConfig, device: torch.device
) -> Batch:
    """Fill in log-probabilities, one field for each of ``policies``, and the critic's values if there is one.

    Raises:
        NonFiniteError: a log-probability of the sampler or of the policy is NaN or infinite.
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
