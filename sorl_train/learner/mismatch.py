"""Stops a run in which sampler and trainer compute different log-probabilities for the same tokens.

With the same weights both should agree up to rounding. If they do not, the sampler used another context or other
weights, or drew from another distribution than it reports. Then every ratio and every gradient is wrong, although all
metrics may look healthy. Two figures are compared with the limit ``sampler.max_mismatch``:

- the mean absolute difference over all tokens, which finds small errors that are everywhere;
- that in the worst turn, with a limit ``TURN_FACTOR`` times as high, which finds errors in a few turns, such as a cache
  that rows share by mistake.

A single token of very low probability may differ by more than a nat in bfloat16, so a turn of fewer than ``SHORT_TURN``
tokens is averaged as if it were that long.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sorl_env.errors import UserError
from sorl_env.trajectory import Trajectory
from sorl_train.config.settings import SamplerConfig
from sorl_train.learner.batch import Batch
from sorl_train.run.files import atomic_write

TURN_FACTOR = 10.0
SHORT_TURN = 8  # tokens
MAX_SAVED = 64  # trajectories
# Limits in nats, by sampler and precision. Rounding stays far below them: it is 7e-6 in float32 and 0.04 in bfloat16
# for SmolLM2 on random tokens, which are harder than text (see docs/decisions.md).
_LIMITS = {
    ("transformers", torch.float32): 0.001,
    ("transformers", torch.bfloat16): 0.1,
    ("vllm", torch.float32): 0.01,
    ("vllm", torch.bfloat16): 0.15,
}
_CAUSES = """Likely causes:
  - some turns are wrong, the others exact: the sampler reads another context (cache, positions, attention masks);
  - all turns are wrong, and more so with each step: new weights do not reach the sampler;
  - all turns are wrong from the first step on: temperature, top_p or the model folder differ between the two;
  - all turns differ a little: precision or kernels; try hardware.dtype=float32.
Training on these figures would be wrong, so the run ends here. sampler.max_mismatch sets the limit; 0 turns the check
off."""


def mismatch_limit(sampler: SamplerConfig, dtype: torch.dtype, *, served: bool) -> float:
    """``sampler.max_mismatch``, or a default for forward passes in ``dtype``, higher if vLLM samples (``served``)."""
    default = _LIMITS["vllm" if served else "transformers", dtype]
    return default if sampler.max_mismatch is None else sampler.max_mismatch


def sampled_by(version: int, trajectories: Sequence[Trajectory], batch: Batch) -> Tensor:
    """The loss tokens (B, T) before the first turn that other weights than those of ``version`` sampled.

    ``trajectories`` are those of ``batch``, in its order. Turns of older weights are expected to differ, and later
    turns are left out with them.
    """
    mask = batch.loss_mask.clone()
    for row, trajectory in enumerate(trajectories):
        stale = [i for i, turn in enumerate(trajectory.turns) if turn.policy_version != version]
        if stale:
            mask[row] &= batch.turn_ids[row] < stale[0]
    return mask


def _difference(log_probs: Tensor, batch: Batch, top_p: float) -> Tensor:
    """How far the trainer's log-probabilities are from those that the sampler's allow, (B, T).

    The sampler's are higher by -log of the mass that ``top_p`` kept, which is anything from 0 to -log(top_p).
    """
    gap = (log_probs - batch.rollout_log_probs).double()
    return (gap - gap.clamp(math.log(top_p), 0.0)).abs()


def turn_mismatch(log_probs: Tensor, batch: Batch, mask: Tensor, top_p: float = 1.0) -> Tensor:
    """Mean absolute difference to the sampler's log-probabilities by turn (B, K), over the tokens of ``mask``."""
    gap = _difference(log_probs, batch, top_p).masked_fill(~mask, 0.0)
    turns = batch.turn_ids.clamp(min=0)
    empty = torch.zeros((len(batch), int(turns.max()) + 1), dtype=torch.float64)
    return empty.scatter_add(1, turns, gap) / empty.scatter_add(1, turns, mask.double()).clamp(min=SHORT_TURN)


def check_mismatch(
    log_probs: Tensor,
    batch: Batch,
    mask: Tensor,
    step: int,
    *,
    limit: float,
    top_p: float,
    decode: Callable[[list[int]], str],
    folder: Path,
) -> None:
    """Compare the trainer's ``log_probs`` (B, T) with the sampler's, over the tokens of ``mask``.

    ``limit`` is that of the mean difference, 0 turns the check off. By as much as ``top_p`` explains, which the sampler
    drew with, the two may differ. If a limit is exceeded, the worst trajectories are written to a file of ``folder``,
    one JSON object a line, with the text that ``decode`` makes of token ids; ``UserError`` names file and causes.
    """
    if not limit or not mask.any():
        return
    mean = float(_difference(log_probs, batch, top_p)[mask].mean())
    turns = turn_mismatch(log_probs, batch, mask, top_p)
    worst = float(turns.max())
    if mean <= limit and worst <= TURN_FACTOR * limit:
        return
    by_row = turns.max(dim=1).values
    order = torch.argsort(by_row, descending=True, stable=True).tolist()
    bad = [row for row in order if not float(by_row[row]) <= TURN_FACTOR * limit] or order
    path = folder / f"mismatch_{step:06d}.jsonl"
    records = [_record(row, log_probs, batch, mask, turns, decode) for row in bad[:MAX_SAVED]]
    atomic_write(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    names = ", ".join(record["id"] for record in records[:8]) + (", .." if len(bad) > 8 else "")
    raise UserError(
        f"step {step}: sampler and trainer disagree about what was sampled. Their log-probabilities differ by "
        f"{mean:.3g} nats on average over {int(mask.sum())} tokens (limit {limit:.3g}) and by {worst:.3g} in the worst "
        f"turn (limit {TURN_FACTOR * limit:.3g}). Worst trajectories: {names}; with tokens and both log-probabilities "
        f"they are in {path}.\n{_CAUSES}"
    )


def _record(
    row: int, log_probs: Tensor, batch: Batch, mask: Tensor, turns: Tensor, decode: Callable[[list[int]], str]
) -> dict[str, Any]:
    """One line of the file: the trajectory's turns with tokens and both log-probabilities, and all of its tokens."""
    found = []
    for turn in range(turns.shape[1]):
        places = (mask[row] & (batch.turn_ids[row] == turn)).nonzero()[:, 0]
        if len(places):
            ids = batch.token_ids[row, places + 1].tolist()
            figures = {
                "sampler_log_probs": batch.rollout_log_probs[row, places].tolist(),
                "trainer_log_probs": log_probs[row, places].tolist(),
            }
            texts = {"token_ids": ids, "tokens": [decode([i]) for i in ids]}
            found.append({"turn": turn, "mean_difference": float(turns[row, turn]), **texts, **figures})
    token_ids = batch.token_ids[row, : int(batch.lengths[row])].tolist()
    return {"id": batch.ids[row], "turns": found, "token_ids": token_ids, "text": decode(token_ids)}
