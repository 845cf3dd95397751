"""Draw tokens from logits, each with its row's own temperature, nucleus and random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sorl_train.rollout.slots import Row


@torch.inference_mode()
def draw(logits: Tensor, rows: Sequence[Row]) -> tuple[list[int], list[float]]:
    """Sample one token for each row from logits (b, V).

    Returns the tokens and their log-probabilities, after the temperature and before ``top_p``.
    """
    temperatures = [row.params.temperature for row in rows]
    scale = torch.tensor([t or 1.0 for t in temperatures], device=logits.device)
    log_probs = torch.log_softmax(logits.float() / scale[:, None], dim=-1)
    if not any(temperatures):
        tokens = log_probs.argmax(dim=-1)
    else:
        uniforms = torch.tensor(
            [row.draws.random() if row.params.temperature else 0.0 for row in rows],
            dtype=torch.float64,
            device=logits.device,
        )
        probs = _nucleus(log_probs.exp(), [row.params.top_p for row in rows])
        cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
        points = (uniforms * cumulative[:, -1])[:, None]
        tokens = torch.searchsorted(cumulative, points, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
        if not all(temperatures):
            greedy = torch.tensor([not t for t in temperatures], device=logits.device)
            tokens = torch.where(greedy, log_probs.argmax(dim=-1), tokens)
    return tokens.tolist(), log_probs.gather(-1, tokens[:, None])[:, 0].tolist()


def _nucleus(probs: Tensor, top_p: Sequence[float]) -> Tensor:
    """Zero all but the most likely tokens whose probabilities add up to ``top_p`` (the first one always stays)."""
    if all(p >= 1.0 for p in top_p):
        return probs
    limits = torch.tensor(top_p, dtype=torch.float64, device=probs.device)[:, None]
    ordered, order = probs.double().sort(dim=-1, descending=True, stable=True)
    ordered[(ordered.cumsum(dim=-1) - ordered) >= limits] = 0.0
    return torch.zeros_like(ordered).scatter(-1, order, ordered)
