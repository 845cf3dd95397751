"""Draw tokens from logits, each with its row's own temperature, nucleus and random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sorl_train.rollout.slots import ActiveRollout


@torch.inference_mode()
def draw(logits: Tensor, rows: Sequence[ActiveRollout]) -> tuple[list[int], list[float]]:
    """Sample one token for each row from logits (b, V).

    Returns the tokens and their log-probabilities in the distribution that they were drawn from: after the temperature
    and ``top_p``, which is 1 where a row is greedy. vLLM can report no others after the temperature.
    """
    temperatures = [row.params.temperature for row in rows]
    scale = torch.tensor([t or 1.0 for t in temperatures], device=logits.device)
    log_probs = torch.log_softmax(logits.float() / scale[:, None], dim=-1)
    limits = [row.params.top_p if row.params.temperature else 1.0 for row in rows]
    if not any(temperatures):
        tokens = log_probs.argmax(dim=-1)
    else:
        uniforms = torch.tensor(
            [row.draws.random() if row.params.temperature else 0.0 for row in rows],
            dtype=torch.float64,
            device=logits.device,
        )
        probs = log_probs.exp()
        if min(limits) < 1.0:
            probs, log_mass = _nucleus(probs, limits)
            log_probs = log_probs - log_mass[:, None]
        cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
        points = (uniforms * cumulative[:, -1])[:, None]
        tokens = torch.searchsorted(cumulative, points, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
        if not all(temperatures):
            greedy = torch.tensor([not t for t in temperatures], device=logits.device)
            tokens = torch.where(greedy, log_probs.argmax(dim=-1), tokens)
    return tokens.tolist(), log_probs.gather(-1, tokens[:, None])[:, 0].tolist()


def _nucleus(probs: Tensor, limits: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Zero all but the most likely tokens whose probabilities add up to the limit (the first one always stays).

    Returns (b, V), and the log (b,) of the mass that stays. All of it stays where the limit is 1.
    """
    top_p = torch.tensor(limits, dtype=torch.float64, device=probs.device)
    ordered, order = probs.double().sort(dim=-1, descending=True, stable=True)
    dropped = (ordered.cumsum(dim=-1) - ordered) >= top_p[:, None]
    ordered[dropped & (top_p < 1.0)[:, None]] = 0.0
    mass = torch.where(top_p < 1.0, ordered.sum(dim=-1), 1.0)
    return torch.zeros_like(ordered).scatter(-1, order, ordered), mass.log().float()
