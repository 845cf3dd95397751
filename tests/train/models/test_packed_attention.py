"""Attention of one new token in each row beside torch's, whose kernel is slow for it on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sorl_train.models import packed_attention
from sorl_train.models.forward import autocast

CPU = torch.device("cpu")
ROWS, WIDTH, DEPTH = 5, 40, 16


def case(heads: int, key_heads: int, queries: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Rows of a cache that is wider than what is read, of which each has another length."""
    torch.manual_seed(heads + queries)
    cache = torch.randn(2, ROWS, key_heads, 2 * WIDTH, DEPTH).to(dtype)
    lengths = torch.tensor([1, 7, 20, 39, 40])
    hidden = torch.arange(WIDTH) >= lengths[:, None]
    mask = torch.zeros(ROWS, 1, queries, WIDTH, dtype=dtype)
    return {
        "query": torch.randn(ROWS, queries, heads, DEPTH).to(dtype).transpose(1, 2),
        "key": cache[0, :, :, :WIDTH],
        "value": cache[1, :, :, :WIDTH],
        "attention_mask": mask.masked_fill(hidden[:, None, None], -torch.inf),
    }


def exact(given: dict[str, torch.Tensor], scaling: float | None = None) -> torch.Tensor:
    """Torch's attention in float64, (rows, queries, heads, depth)."""
    query, key, value, mask = (tensor.double() for tensor in given.values())
    shared = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(shared, dim=1) for tensor in (key, value))
    return scaled_dot_product_attention(query, key, value, mask, scale=scaling).transpose(1, 2)


@pytest.mark.parametrize(("heads", "key_heads"), [(6, 2), (4, 4), (8, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("queries", "scaling"), [(1, None), (3, 0.5), (1, 0.5)])
def test_it_is_torchs_attention(
    heads: int, key_heads: int, dtype: str, queries: int, scaling: float | None
) -> None:
    given = case(heads, key_heads, queries, getattr(torch, dtype))
    with torch.inference_mode(), autocast(dtype, CPU):
        found, _ = packed_attention.attention(None, **given, scaling=scaling)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    assert found.dtype == given["query"].dtype and found.shape == (ROWS, queries, heads, DEPTH)
    torch.testing.assert_close(found.double(), exact(given, scaling), rtol=tolerance, atol=tolerance)


def test_scores_of_a_decoding_step_are_not_rounded_by_autocast() -> None:
    """Scores of a few hundred, whose difference decides, would be multiples of 2 in bfloat16."""
    given = case(6, 2, 1, torch.bfloat16)
    given["query"] = given["query"] * 60
    with torch.inference_mode(), autocast("bfloat16", CPU):
        found, _ = packed_attention.attention(None, **given)
    torch.testing.assert_close(found.double(), exact(given), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("why", ["a gradient", "a bool mask", "a cap of the scores"])
def test_only_plain_decoding_steps_are_written_out(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []
    written_out = packed_attention._one_token
    monkeypatch.setattr(
        packed_attention, "_one_token", lambda *args: called.append(True) or written_out(*args)
    )
    monkeypatch.setattr(  # the cap is for torch's attention of transformers to refuse or to ignore
        packed_attention, "sdpa_attention_forward", lambda *args, **kwargs: (args[1].transpose(1, 2), None)
    )
    given = case(6, 2, 1, torch.float32)
    extra: dict[str, Any] = {}
    with torch.inference_mode():
        packed_attention.attention(None, **given)
    assert called == [True]
    if why == "a bool mask":
        given["attention_mask"] = given["attention_mask"] == 0
    elif why == "a cap of the scores":
        extra = {"softcap": 50.0}
    with torch.inference_mode(why != "a gradient"):
        packed_attention.attention(None, **given, **extra)
    assert called == [True]
