"""Decoding on a CPU: prepared matrices and the attention of one token compute what the model and torch compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from sorl_train.models import attention as module
from sorl_train.models import packing
from sorl_train.models.attention import LARGE, decoding_model
from sorl_train.models.forward import autocast

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
each_packed_dtype = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                not module._packs(CPU, getattr(torch, name)),
                reason=f"oneDNN packs no matrices of {name} on this processor",
            ),
        )
        for name in ("float32", "bfloat16")
    ],
)


def models() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "llama": LlamaForCausalLM(LlamaConfig(**SIZES)),
        "tied": LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
        "biases": Qwen2ForCausalLM(Qwen2Config(**SIZES)),
        "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_embd=256, n_layer=2, n_head=4)),
    }


def packed_layers(model: nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if "forward" in vars(layer)]


@each_packed_dtype
@pytest.mark.parametrize("name", ["llama", "tied", "biases", "gpt2"])
def test_a_copy_computes_what_the_model_computes(name: str, dtype: str) -> None:
    model = models()[name].eval()
    for parameter in model.parameters():  # biases start at 0
        parameter.data.add_(torch.randn_like(parameter) * 0.02)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    copied = decoding_model(model, getattr(torch, dtype))
    assert packed_layers(copied) and not packed_layers(model)
    for shape in ((1, 1), (3, 7), (2, 150)):
        token_ids = torch.randint(0, 1000, shape)
        with torch.inference_mode(), autocast(dtype, CPU):
            wanted, found = (one(input_ids=token_ids).logits for one in (model, copied))
        assert wanted.dtype == found.dtype
        rounding = 1e-5 if dtype == "float32" else 2**-8  # one of bfloat16, where oneDNN emulates it
        torch.testing.assert_close(found, wanted, rtol=rounding, atol=rounding)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    model(input_ids=torch.tensor([[1, 2]])).logits.sum().backward()  # the model itself still trains


@each_packed_dtype
def test_only_large_matrices_of_plain_layers_are_packed(dtype: str) -> None:
    class Adapted(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    side = int(LARGE**0.5)
    model = nn.ModuleDict(
        {"large": nn.Linear(side, side), "small": nn.Linear(side, side - 1), "adapted": Adapted(side, side)}
    )
    copied = decoding_model(model, getattr(torch, dtype))
    assert packed_layers(copied) == ["large"]
    inputs = torch.randn(5, 2 * side)[:, ::2]  # not contiguous
    with torch.inference_mode(), autocast(dtype, CPU):
        for name in model:
            torch.testing.assert_close(copied[name](inputs), model[name](inputs), rtol=1e-5, atol=1e-5)


def test_with_nothing_to_prepare_it_is_the_model_itself() -> None:
    model = LlamaForCausalLM(
        LlamaConfig(**{**SIZES, "vocab_size": 100, "hidden_size": 96, "intermediate_size": 256})
    )
    assert decoding_model(model, torch.float32) is model


@each_packed_dtype
def test_a_layer_with_lora_keeps_its_adapter(dtype: str) -> None:
    peft = pytest.importorskip("peft", reason="needs peft: pip install -e '.[train]'")
    model = peft.get_peft_model(
        models()["llama"], peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    ).eval()
    token_ids = torch.randint(0, 1000, (2, 9))
    copied = decoding_model(model, getattr(torch, dtype))
    assert any("base_layer" in name for name in packed_layers(copied))
    with torch.inference_mode(), autocast(dtype, CPU):
        wanted, found = (one(input_ids=token_ids).logits for one in (model, copied))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_without_packing_matrices_are_only_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an ARM processor, or a GPU."""
    monkeypatch.setattr(module, "_packs", lambda device, dtype: False)
    model = models()["llama"].eval()
    assert decoding_model(model, torch.float32) is model
    copied = decoding_model(model, torch.bfloat16)
    assert not packed_layers(copied)
    assert copied.lm_head.weight.dtype == torch.bfloat16 and model.lm_head.weight.dtype == torch.float32
    token_ids = torch.randint(0, 1000, (2, 9))
    with torch.inference_mode(), autocast("bfloat16", CPU):
        assert torch.equal(copied(input_ids=token_ids).logits, model(input_ids=token_ids).logits)


# --- attention of one new token in each row -----------------------------------------------------------
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
        found, _ = packing.attention(None, **given, scaling=scaling)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    assert found.dtype == given["query"].dtype and found.shape == (ROWS, queries, heads, DEPTH)
    torch.testing.assert_close(found.double(), exact(given, scaling), rtol=tolerance, atol=tolerance)


def test_scores_of_a_decoding_step_are_not_rounded_by_autocast() -> None:
    """Scores of a few hundred, whose difference decides, would be multiples of 2 in bfloat16."""
    given = case(6, 2, 1, torch.bfloat16)
    given["query"] = given["query"] * 60
    with torch.inference_mode(), autocast("bfloat16", CPU):
        found, _ = packing.attention(None, **given)
    torch.testing.assert_close(found.double(), exact(given), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("why", ["a gradient", "a bool mask", "a cap of the scores"])
def test_only_plain_decoding_steps_are_written_out(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []
    written_out = packing._one_token
    monkeypatch.setattr(packing, "_one_token", lambda *args: called.append(True) or written_out(*args))
    monkeypatch.setattr(  # the cap is for torch's attention of transformers to refuse or to ignore
        packing, "sdpa_attention_forward", lambda *args, **kwargs: (args[1].transpose(1, 2), None)
    )
    given = case(6, 2, 1, torch.float32)
    extra: dict[str, Any] = {}
    with torch.inference_mode():
        packing.attention(None, **given)
    assert called == [True]
    if why == "a bool mask":
        given["attention_mask"] = given["attention_mask"] == 0
    elif why == "a cap of the scores":
        extra = {"softcap": 50.0}
    with torch.inference_mode(why != "a gradient"):
        packing.attention(None, **given, **extra)
    assert called == [True]
