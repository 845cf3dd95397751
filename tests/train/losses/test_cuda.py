"""The pure-torch modules give on a GPU what they give on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sorl_train.losses.log_probs import token_log_probs

from .keywords import drawn, policy_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def inputs(device: str) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    tensors = drawn(0, 6, 200) | {
        "turns": (torch.rand(6, 200, generator=g) < 0.05).cumsum(1),
        "scale": torch.rand(6, 200, generator=g),
        "logits": torch.randn(6, 20, 300, generator=g),
        "targets": torch.randint(0, 300, (6, 20), generator=g),
    }
    tensors["mask"][2] = False
    return {name: tensor.detach().to(device) for name, tensor in tensors.items()}


@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
def test_policy_loss(level: str) -> None:
    results = []
    for device in ("cpu", "cuda"):
        x = inputs(device)
        log_probs = x["log_probs"].requires_grad_()
        tensors = (log_probs, x["old"], x["advantages"], x["mask"], x["turns"])
        output = policy_loss(*tensors, ratio_level=level, logit_scale=x["scale"])
        gradient = torch.autograd.grad(output.loss, log_probs)[0]
        results.append((gradient.cpu(), output.stats.norms(), output.stats.metrics()))
    torch.testing.assert_close(results[1][0], results[0][0], atol=1e-7, rtol=1e-4)
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-4)
    assert results[1][2] == pytest.approx(results[0][2], rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs(dtype: torch.dtype) -> None:
    results = []
    for device in ("cpu", "cuda"):
        x = inputs(device)
        logits = x["logits"].to(dtype).requires_grad_()
        stats = token_log_probs(logits, x["targets"], temperature=0.8, entropy=True, logit_scale=True)
        assert stats.entropy is not None and stats.logit_scale is not None
        (stats.log_probs + stats.entropy).sum().backward()
        assert logits.grad is not None
        results.append(
            [t.detach().cpu() for t in (stats.log_probs, stats.entropy, stats.logit_scale, logits.grad)]
        )
    torch.testing.assert_close(
        results[1], results[0], atol=1e-4, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4
    )
