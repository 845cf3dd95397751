"""The memory estimate against hand arithmetic and real models."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sorl_env.task import Limits
from sorl_train.config.run_settings import HardwareConfig
from sorl_train.config.settings import RolloutConfig, SamplerConfig, TrainConfig, UpdateConfig
from sorl_train.models.policy import ModelShape, model_shape
from sorl_train.preflight.memory import estimate_memory

SHAPE = ModelShape(
    parameters=1000,
    backbone_parameters=900,
    trained=1000,
    layers=2,
    hidden=10,
    intermediate=20,
    key_value_width=5,
    vocabulary=50,
)
LIMITS = Limits(max_turns=2, max_new_tokens=30, max_trajectory_tokens=100, max_prompt_tokens=20)
CONFIG = TrainConfig(
    sampler=SamplerConfig(max_concurrency=7),
    rollout=RolloutConfig(batch_size=8),
    update=UpdateConfig(
        mini_batch_size=4, micro_batch_size=2, critic_micro_batch_size=1, log_prob_micro_batch_size=8
    ),
)


def test_the_estimate_by_hand() -> None:
    need = estimate_memory(CONFIG, SHAPE, LIMITS, compute_bytes=4)
    both = 1000 + 900 + 10 + 1
    assert need.lasting == {
        "weights": 4 * both,
        "gradients": 4 * both,
        "optimizer": 8 * both,
        "reference": 4 * 1000,
    }
    sampling = 3 * 7 * 100 * (2 * 2 * 5 * 4)
    assert need.phases == {
        "sampling": sampling,  # so small a cache is kept beside what follows
        "scoring": sampling + 4 * 8 * (100 * (4 * 10 + 3 * 20) + 60 * 50),
        "updating": sampling + 4 * 2 * (100 * 2 * (12 * 10 + 4 * 20) + 2 * 60 * 50),
    }
    assert need.peak == "scoring" and need.total("scoring") == 16 * both + 4000 + need.phases["scoring"]
    assert need.host == {"trust region": 0}


def test_what_makes_it_smaller() -> None:
    full = estimate_memory(CONFIG, SHAPE, LIMITS, 4)
    group = estimate_memory(dataclasses.replace(CONFIG, algo="so_grpo"), SHAPE, LIMITS, 4).lasting
    assert group["weights"] == 4 * 1000 and group["optimizer"] == 8 * 1000
    checkpointed = dataclasses.replace(CONFIG, hardware=HardwareConfig(gradient_checkpointing=True))
    assert estimate_memory(checkpointed, SHAPE, LIMITS, 4).phases["updating"] < full.phases["updating"]
    # in bfloat16 the sampler decodes with a copy of the weights
    in_bfloat16 = estimate_memory(CONFIG, SHAPE, LIMITS, 2).phases["sampling"]
    assert in_bfloat16 == full.phases["sampling"] // 2 + 2 * 1000
    no_kl = dataclasses.replace(CONFIG, loss=dataclasses.replace(CONFIG.loss, kl_coef=0.0))
    assert estimate_memory(no_kl, SHAPE, LIMITS, 4).lasting["reference"] == 0
    lora = dataclasses.replace(SHAPE, trained=10)
    region = dataclasses.replace(CONFIG, update=dataclasses.replace(CONFIG.update, trust_kl=0.01))
    need = estimate_memory(region, lora, LIMITS, 4)
    assert need.lasting["optimizer"] == 8 * (10 + 911) and need.host["trust region"] == 4 * 10


def llama(**settings: Any) -> LlamaForCausalLM:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**(sizes | {"num_attention_heads": 4} | settings)))


@pytest.mark.parametrize("tied", [True, False])
def test_the_shape_of_a_real_model(tmp_path: Path, tied: bool) -> None:
    model = llama(num_key_value_heads=2, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    shape = model_shape(str(tmp_path))
    assert shape.parameters == shape.trained == sum(p.numel() for p in model.parameters())
    assert shape.backbone_parameters == sum(p.numel() for p in model.model.parameters())
    assert (shape.layers, shape.key_value_width, shape.vocabulary) == (2, 2 * 4, 64)


def test_lora_counts_the_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = llama()
    model.save_pretrained(tmp_path)
    expected = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules="all-linear"))
    adapters = sum(p.numel() for name, p in expected.named_parameters() if "lora_" in name)
    assert model_shape(str(tmp_path), lora_rank=3).trained == adapters


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_bounded_by_the_estimate_and_not_far_from_it(checkpointing: bool) -> None:
    """The bytes that autograd really keeps in one forward pass of a micro-batch, the logits left out."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6}
    model = llama(**sizes, attn_implementation="sdpa").train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: list[torch.Tensor] = []  # alive, so that no storage is counted under another one's address

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(input_ids=torch.zeros((2, 100), dtype=torch.long), use_cache=False)
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    measured = sum(size for address, size in sizes.items() if address not in weights)

    shape = dataclasses.replace(SHAPE, layers=6, hidden=64, intermediate=256, vocabulary=0)
    settings = dataclasses.replace(
        CONFIG, algo="grpo", hardware=HardwareConfig(gradient_checkpointing=checkpointing)
    )
    phases = estimate_memory(settings, shape, LIMITS, compute_bytes=4).phases
    estimate = phases["updating"] - phases["sampling"]  # the cache that is kept
    # one block computed again, in the backward pass
    again = 4 * 2 * 100 * (12 * 64 + 4 * 256) if checkpointing else 0
    assert 0.6 * (estimate - again) < measured <= estimate
