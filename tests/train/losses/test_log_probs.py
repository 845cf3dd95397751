"""Token statistics from logits: values, gradients, memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sorl_train.losses import log_probs as module
from sorl_train.losses.log_probs import token_log_probs

F64 = torch.float64


def plain(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """The definitions, on a copy of everything."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_p = torch.log_softmax(logits.to(dtype) / temperature, -1)
    log_probs = log_p.gather(-1, targets[..., None]).squeeze(-1)
    p = log_p.exp()
    scale = (torch.nn.functional.one_hot(targets, logits.shape[-1]) - p).norm(dim=-1)
    return log_probs, -(p * log_p).sum(-1), scale


def example(dtype: torch.dtype = F64, vocabulary: int = 11) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(3, 5, vocabulary, dtype=F64, generator=g)
    return logits.to(dtype).requires_grad_(), torch.randint(0, vocabulary, (3, 5), generator=g)


@pytest.mark.parametrize("positions", [1, 4, 15, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_in_any_chunks(
    positions: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, targets = example()
    monkeypatch.setattr(module, "CPU_CHUNK", positions * logits.shape[-1])
    stats = token_log_probs(logits, targets, temperature=temperature, entropy=True, logit_scale=True)
    expected = plain(logits, targets, temperature)
    weights = torch.rand(2, 3, 5, dtype=F64)
    for value, reference in zip((stats.log_probs, stats.entropy, stats.logit_scale), expected, strict=True):
        torch.testing.assert_close(value, reference, atol=1e-12, rtol=0)
    assert stats.logit_scale is not None and not stats.logit_scale.requires_grad
    (gradient,) = torch.autograd.grad(
        (stats.log_probs * weights[0] + stats.entropy * weights[1]).sum(), logits
    )
    (reference,) = torch.autograd.grad((expected[0] * weights[0] + expected[1] * weights[1]).sum(), logits)
    torch.testing.assert_close(gradient, reference, atol=1e-12, rtol=0)


@pytest.mark.parametrize("which", ["log_probs", "entropy"])
def test_either_output_alone(which: str) -> None:
    logits, targets = example()
    stats = token_log_probs(logits, targets, entropy=True)
    expected = dict(zip(("log_probs", "entropy"), plain(logits, targets), strict=False))
    (gradient,) = torch.autograd.grad(getattr(stats, which).sum(), logits)
    (reference,) = torch.autograd.grad(expected[which].sum(), logits)
    torch.testing.assert_close(gradient, reference, atol=1e-12, rtol=0)


def test_only_what_is_asked_for() -> None:
    logits, targets = example()
    stats = token_log_probs(logits, targets)
    assert stats.entropy is None and stats.logit_scale is None
    assert token_log_probs(logits, targets, logit_scale=True).entropy is None
    assert token_log_probs(logits[:0], targets[:0], entropy=True).log_probs.shape == (0, 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    logits, targets = example(dtype)
    stats = token_log_probs(logits, targets, entropy=True, logit_scale=True)
    assert stats.log_probs.dtype == torch.float32
    for value, reference in zip(
        (stats.log_probs, stats.entropy, stats.logit_scale), plain(logits, targets), strict=True
    ):
        torch.testing.assert_close(value, reference, atol=1e-5, rtol=1e-5)
    stats.log_probs.sum().backward()
    assert logits.grad is not None and logits.grad.dtype == dtype


def test_impossible_tokens_and_huge_logits() -> None:
    logits = torch.tensor([[[0.0, -math.inf, 0.0], [1e4, 0.0, -1e4]]], requires_grad=True)
    stats = token_log_probs(logits, torch.tensor([[0, 0]]), entropy=True, logit_scale=True)
    assert stats.log_probs[0].tolist() == pytest.approx([-math.log(2), 0.0])
    assert stats.entropy is not None and stats.logit_scale is not None
    assert stats.entropy[0].tolist() == pytest.approx([math.log(2), 0.0], abs=1e-6)
    assert stats.logit_scale[0].tolist() == pytest.approx([math.sqrt(0.5), 0.0])
    (stats.log_probs - 9.0 * stats.entropy).sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[0, 0], torch.tensor([0.5, 0.0, -0.5]))
    assert not logits.grad[0, 1].any()


def test_a_view_that_is_not_contiguous() -> None:
    logits, targets = example()
    stats = token_log_probs(logits[:, :-1], targets[:, 1:])
    torch.testing.assert_close(stats.log_probs, plain(logits[:, :-1], targets[:, 1:])[0])
    stats.log_probs.sum().backward()
    assert logits.grad is not None and not logits.grad[:, -1].any()


def test_clear_errors() -> None:
    logits, targets = example()
    with pytest.raises(ValueError, match=r"targets has shape \(3, 4\), logits \(3, 5, 11\)"):
        token_log_probs(logits, targets[:, 1:])
    with pytest.raises(ValueError, match="temperature must be positive, not 0"):
        token_log_probs(logits, targets, temperature=0)


def peak_bytes(function: Callable[[], None], folder: Path) -> int:
    """Most bytes that ``function`` held at once, by the record of torch's own allocator."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        function()
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]")


def test_no_float32_copy_of_the_logits(tmp_path: Path) -> None:
    """bf16 logits of 20 MiB: beyond their gradient, of the same size, only chunks of a few MiB."""
    logits = torch.randn(2, 160, 32768, dtype=torch.bfloat16).requires_grad_()
    targets = torch.zeros(2, 160, dtype=torch.long)
    size = logits.numel() * logits.element_size()

    def forward_only() -> None:
        with torch.no_grad():
            token_log_probs(logits, targets, entropy=True, logit_scale=True)

    def forward_and_backward() -> None:
        stats = token_log_probs(logits, targets, entropy=True, logit_scale=True)
        (stats.log_probs + stats.entropy).sum().backward()

    assert peak_bytes(forward_only, tmp_path) < 9 * 2**20  # four chunks of 2 MiB
    assert peak_bytes(forward_and_backward, tmp_path) < size + 10 * 2**20
    copied = peak_bytes(lambda: plain(logits.detach(), targets) and None, tmp_path)
    assert copied > 2 * size, "the measure is to notice a copy"
