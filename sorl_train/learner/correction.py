"""Puts the weights that correct for the sampler into a scored batch (``sorl_train.losses.correction``)."""

from __future__ import annotations

from sorl_train.config.settings import TrainConfig
from sorl_train.learner.batch import Batch
from sorl_train.losses.correction import CorrectionSettings, correction_weights

DEFAULT_HIGH = {"none": 1.0, "truncate": 2.0, "band": 5.0}  # of TIS and IcePop; none has no limit to set
DEFAULT_LOW = 0.5


def correction_settings(config: TrainConfig) -> CorrectionSettings:
    """The settings of a run, with the published limits where it gives none."""
    given = config.correction
    return CorrectionSettings(
        mode=given.mode,
        level=config.algorithm.ratio if given.level == "auto" else given.level,
        low=DEFAULT_LOW if given.low is None else given.low,
        high=DEFAULT_HIGH[given.mode] if given.high is None else given.high,
        sequence_mask=given.sequence_mask,
    )


def correct(batch: Batch, config: TrainConfig) -> tuple[Batch, dict[str, float]]:
    """Fill in ``correction`` as configured; also returns its ``loss/`` metrics. It is the same batch if that is off.

    The whole rollout batch is corrected at once, so that mini-batches, micro-batches and ranks only carry the weights.
    """
    if not config.correction.is_on:
        return batch, {}
    assert batch.old_log_probs is not None  # the engine computes them before the update if ``is_on``
    found = correction_weights(
        batch.old_log_probs,
        batch.rollout_log_probs,
        batch.loss_mask,
        batch.turn_ids,
        correction_settings(config),
    )
    return batch.with_fields(correction=found.weights), found.metrics()
