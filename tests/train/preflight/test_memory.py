"""The memory estimates by hand, against real models, and against what DeepSpeed really holds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers (the train extra)")

import torch
from transformers import Gemma3Config, LlamaConfig, LlamaForCausalLM

from sorl_env.task import Limits
from sorl_train.config.run_settings import HardwareConfig, RolloutConfig
from sorl_train.config.settings import ClusterConfig, LossConfig, SamplerConfig, TrainConfig, UpdateConfig
from sorl_train.models.policy import ModelShape, model_shape
from sorl_train.preflight.memory import (
    H100,
    PROCESS,
    VLLM_WORK,
    Memory,
    estimate_cluster_memory,
    estimate_memory,
)

from ..openrlhf.conftest import run_ranks

SIZES = {"layers": 2, "hidden": 10, "intermediate": 20, "key_value_width": 5, "vocabulary": 50}
SHAPE = ModelShape(parameters=1000, backbone_parameters=900, trained=1000, **SIZES)
LIMITS = Limits(max_turns=2, max_new_tokens=30, max_trajectory_tokens=100, max_prompt_tokens=20)
CPU = torch.device("cpu")
CONFIG = TrainConfig(
    sampler=SamplerConfig(max_concurrency=7),
    rollout=RolloutConfig(batch_size=8),
    update=UpdateConfig(
        mini_batch_size=4, micro_batch_size=2, critic_micro_batch_size=1, log_prob_micro_batch_size=8
    ),
)


def test_the_estimate_by_hand() -> None:
    need = estimate_memory(
        CONFIG, SHAPE, LIMITS, CPU
    )  # a mask has 1 + 4 bytes for each pair of tokens of a row
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
        "scoring": sampling + 4 * 8 * (100 * (4 * 10 + 3 * 20) + 60 * 50) + 8 * 100**2 * 5,
        "updating": sampling + 4 * 2 * (100 * 2 * (12 * 10 + 4 * 20) + 2 * 60 * 50) + 2 * 100**2 * 5,
    }
    assert need.peak == "scoring" and need.total("scoring") == 16 * both + 4000 + need.phases["scoring"]
    assert need.host == {"trust region": 0}
    # on a GPU a mask is a list of pairs of blocks of 128 tokens: 8 rows of 100 tokens are 7
    on_gpu = dataclasses.replace(CONFIG, hardware=HardwareConfig(dtype="float32"))
    pairs = estimate_memory(on_gpu, SHAPE, LIMITS, torch.device("cuda")).phases["scoring"]
    assert pairs == need.phases["scoring"] - 8 * 100**2 * 5 + 32 * 7**2


def test_what_makes_it_smaller() -> None:
    full = estimate_memory(CONFIG, SHAPE, LIMITS, CPU)
    group = estimate_memory(dataclasses.replace(CONFIG, algo="so_grpo"), SHAPE, LIMITS, CPU).lasting
    assert group["weights"] == 4 * 1000 and group["optimizer"] == 8 * 1000
    checkpointed = dataclasses.replace(CONFIG, hardware=HardwareConfig(gradient_checkpointing=True))
    assert estimate_memory(checkpointed, SHAPE, LIMITS, CPU).phases["updating"] < full.phases["updating"]
    # in bfloat16 the sampler decodes with a copy of the weights
    halved = dataclasses.replace(CONFIG, hardware=HardwareConfig(dtype="bfloat16"))
    in_bfloat16 = estimate_memory(halved, SHAPE, LIMITS, CPU).phases["sampling"]
    assert in_bfloat16 == full.phases["sampling"] // 2 + 2 * 1000
    no_kl = dataclasses.replace(CONFIG, loss=dataclasses.replace(CONFIG.loss, kl_coef=0.0))
    assert estimate_memory(no_kl, SHAPE, LIMITS, CPU).lasting["reference"] == 0
    lora = dataclasses.replace(SHAPE, trained=10)
    region = dataclasses.replace(CONFIG, update=dataclasses.replace(CONFIG.update, trust_kl=0.01))
    need = estimate_memory(region, lora, LIMITS, CPU)
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


def test_the_shape_of_a_model_that_also_reads_images(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = sizes | {"vocab_size": 64, "num_key_value_heads": 2, "head_dim": 8}
    Gemma3Config(text_config=text, vision_config=sizes | {"image_size": 28}).save_pretrained(tmp_path)
    shape = model_shape(str(tmp_path))
    assert (shape.layers, shape.hidden, shape.heads, shape.key_value_width) == (2, 16, 4, 2 * 8)


def test_lora_counts_the_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft (the train extra)")
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
    phases = estimate_memory(settings, shape, LIMITS, CPU).phases
    estimate = phases["updating"] - phases["sampling"]  # the cache that is kept
    # one block computed again, in the backward pass
    again = 4 * 2 * 100 * (12 * 64 + 4 * 256) if checkpointing else 0
    assert 0.6 * (estimate - again) < measured <= estimate


# --- with OpenRLHF --------------------------------------------------------------------------------------------
LARGE = dataclasses.replace(
    SHAPE, parameters=8000, backbone_parameters=7000, trained=8000, key_value_width=40, key_value_heads=4
)
CLUSTER = TrainConfig(
    engine="openrlhf",
    rollout=RolloutConfig(batch_size=64),
    update=UpdateConfig(mini_batch_size=32, micro_batch_size=4, log_prob_micro_batch_size=2),
    hardware=HardwareConfig(gradient_checkpointing=True),
)  # 8 ranks, ZeRO-3, everything offloaded, 2 vLLM engines of 4 GPUs


def estimate(config: TrainConfig = CLUSTER, **cluster: Any) -> Memory:
    settings = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, **cluster))
    return estimate_cluster_memory(settings, LARGE, LIMITS, bucket=100)


def test_zero_3_with_offloading_by_hand() -> None:
    memory = estimate()
    critic = 7000 + 10
    # an eighth of the weights in bfloat16, and a bucket of 100; policy, critic, reference and vLLM are processes
    assert memory.lasting == {
        "policy": 2 * 1000 + 2 * 100,
        "critic": 2 * (critic // 8) + 2 * 100,
        "reference": 0,
        "processes": 4 * PROCESS,
    }
    # 4 rows of 100 tokens, 60 of them the policy's; all weights fit into what ZeRO-3 keeps gathered
    stored = 2 * 4 * 100 * (2 * 10 + 5 * 10)
    logits = 2 * 4 * (100 + 60) * 50
    of_actions = 4 * 60 * 50
    chunks = 4 * 60 * 50 * 4 * 4
    block = 2 * 4 * 100 * (12 * 10 + 4 * 20)
    # so small a vocabulary fits into one chunk of float32
    assert 4 * of_actions + chunks > block + 2 * 8000 + 2 * 100 > logits
    assert memory.phases["policy update"] == 2 * 8000 + stored + 4 * of_actions + chunks
    assert memory.phases["critic update"] == 2 * critic + stored + block + 2 * 100
    assert memory.phases["scoring, reference"] == 2 * 8000 + 2 * 2 * 100 * 10 + 60 * 50 * 2 * (2 + 4 * 4)
    # two rows, as of the reference, beside weights that arrive
    assert memory.phases["scoring, critic"] == 2 * 2 * critic + 2 * 2 * 100 * (4 * 10 + 3 * 20)
    assert memory.host == {
        "policy": 24 * 8000,
        "critic": 24 * (critic // 8) * 8,
        "reference": 2 * 8000,
        "trust region": 0,
        "vLLM asleep": 2 * 8000 // 4 * 8,
        "a policy being saved": 2 * 8000,
    }
    assert memory.total("policy update") == sum(memory.lasting.values()) + memory.phases["policy update"]
    assert memory.peak == "sampling"


@pytest.mark.openrlhf
def test_the_host_has_room_for_what_deepspeed_allows() -> None:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as needs

    how = {"num_gpus_per_node": 8, "cpu_offload": True, "cpu_offload_params": False, "zero_init": True}
    allowed = sum(needs(total, 500, **how)[0] for total in (8000, 7008))
    host = estimate().host
    assert host["policy"] + host["critic"] == allowed


def test_vllm_by_hand() -> None:
    memory = estimate()
    assert memory.vllm == memory.phases["sampling"] == 0.6 * H100
    cache = memory.vllm - 2 * 8000 // 4 - VLLM_WORK
    # two numbers of 2 bytes in 2 layers of width 40, a quarter of it on each GPU
    assert memory.cache_tokens == cache // (4 * 2 * 40 // 4)
    # two heads cannot be cut into four parts
    few = dataclasses.replace(LARGE, key_value_heads=2)
    tokens = estimate_cluster_memory(CLUSTER, few, LIMITS).cache_tokens
    assert tokens == cache // (4 * 2 * 40 // 2)
    assert estimate(vllm_memory=0.02).cache_tokens == 0


def test_without_offloading_what_does_not_work_sleeps() -> None:
    memory = estimate(offload_optimizer=False, offload_reference=False)
    assert memory.lasting["policy"] == 2 * 1000  # the weights alone
    assert memory.lasting["reference"] == 2 * 1000
    for phase in ("policy update", "scoring, policy"):
        assert memory.phases[phase] == estimate().phases[phase] + (12 + 2) * 1000 + 2 * 100
    assert memory.host["policy"] == (12 + 2) * 8000
    assert memory.host["reference"] == 0


def test_zero_2() -> None:
    region = dataclasses.replace(CLUSTER, update=dataclasses.replace(CLUSTER.update, trust_kl=0.01))
    memory = estimate(region, zero_stage=2, offload_optimizer=False)
    assert memory.host["trust region"] == 4 * 8000
    assert memory.lasting["policy"] == 2 * 8000
    assert memory.lasting["reference"] == 2 * 8000  # offload_reference has no effect
    # the optimizer's states wake up and gradients are there; no weights have to be gathered
    sharded = estimate().phases["policy update"]
    assert memory.phases["policy update"] == sharded + 12 * 1000 + 2 * 100 + 2 * 1000 - 2 * 8000
    offloaded = estimate(zero_stage=2)
    assert offloaded.lasting["policy"] == 2 * 8000 + 2 * 100 + 2 * 500
    assert offloaded.host["policy"] == 8 * max(24 * 1000, 20 * 1000 + 2 * 500)


def test_gpus_of_their_own() -> None:
    config = dataclasses.replace(CLUSTER, rollout=RolloutConfig(batch_size=64, max_staleness=1))
    memory = estimate(config, async_rollout=True, vllm_engines=1, offload_optimizer=False)
    assert "sampling" not in memory.phases  # vLLM is elsewhere
    assert memory.lasting["policy"] == (2 + 12 + 2) * 2000 + 2 * 100  # 4 ranks, nobody sleeps
    assert memory.lasting["processes"] == 3 * PROCESS
    assert memory.host["vLLM asleep"] == 0


def test_what_is_not_there_takes_nothing() -> None:
    group = dataclasses.replace(
        CLUSTER,
        algo="so_grpo",
        loss=LossConfig(kl_coef=0.0),
        rollout=RolloutConfig(batch_size=64, group_size=8),
    )
    memory = estimate(group)
    assert memory.lasting["critic"] == memory.lasting["reference"] == 0
    assert memory.lasting["processes"] == 2 * PROCESS
    assert not any("critic" in phase or "reference" in phase for phase in memory.phases)


# --- against DeepSpeed ----------------------------------------------------------------------------------------
CASE = {
    "vocabulary": 16384,
    "hidden": 384,
    "intermediate": 1024,
    "layers": 6,
    "heads": 6,
}  # 23.2 million parameters
CASE |= {"rows": 8, "micro": 4, "tokens": 385, "actions": 192}
CASE["bucket"] = 7_000_000  # more than the largest weight, as in a real model
LARGEST = 16384 * 384


def estimated(case: dict[str, Any], held: dict[str, int], ranks: int, device: str = "cpu") -> Memory:
    """The estimate of a case."""
    policy, critic = held["policy parameters"], held["critic parameters"] - case["hidden"]
    sizes = {name: case[name] for name in SIZES if name in case} | {"key_value_width": case["hidden"]}
    shape = ModelShape(parameters=policy, backbone_parameters=critic, trained=policy, **sizes)
    config = TrainConfig(
        engine="openrlhf",
        rollout=RolloutConfig(batch_size=case["rows"] * ranks),
        update=UpdateConfig(
            mini_batch_size=case["rows"] * ranks,
            micro_batch_size=case["micro"],
            log_prob_micro_batch_size=case["micro"],
        ),
        hardware=HardwareConfig(device=device, gradient_checkpointing=case["checkpointing"]),
        cluster=ClusterConfig(
            gpus_per_node=ranks, vllm_engines=ranks, vllm_tensor_parallel=1, zero_stage=case["stage"]
        ),
    )
    limits = Limits(
        max_turns=1,
        max_new_tokens=case["actions"],
        max_trajectory_tokens=case["tokens"],
        max_prompt_tokens=case["tokens"] - case["actions"],
    )
    return estimate_cluster_memory(config, shape, limits, bucket=case["bucket"])


def measured(folder: Path, ranks: int, **settings: Any) -> tuple[dict[str, Any], dict[str, int]]:
    """A case, and what rank 0 held in it."""
    case = CASE | settings
    (folder / "case.json").write_text(json.dumps(case))
    run_ranks(Path(__file__).with_name("deepspeed_memory.py"), folder, ranks)
    return case, json.loads((folder / "result.json").read_text())


@pytest.mark.openrlhf
@pytest.mark.parametrize(("stage", "ranks", "checkpointing"), [(2, 1, False), (2, 2, True), (3, 2, True)])
def test_the_estimate_is_within_15_percent_of_what_deepspeed_holds(
    tmp_path: Path, stage: int, ranks: int, checkpointing: bool
) -> None:
    case, held = measured(tmp_path, ranks, stage=stage, checkpointing=checkpointing, offload=False)
    memory = estimated(case, held, ranks)
    for role in ("policy", "critic"):
        for phase in (f"{role} update", f"scoring, {role}"):
            own = memory.lasting[role] + memory.phases[phase]
            print(f"{phase}: {own / 1e6:.1f} MB, {held[phase] / 1e6:.1f} MB, {own / held[phase]:.3f}")
            # an upper bound, and a close one
            assert 0.99 <= own / held[phase] <= 1.15, (phase, held)


@pytest.mark.openrlhf
@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_offloaded_goes_to_the_host(tmp_path: Path, stage: int) -> None:
    """On a CPU the two memories are one, which holds what the estimate gives to the GPU and to the host."""
    case, held = measured(tmp_path, 1, stage=stage, checkpointing=True, offload=True)
    memory = estimated(case, held, 1, device="auto")
    bucket = 2 * case["bucket"] if stage == 2 else 0  # which ZeRO-2 has only while it reduces gradients
    for role in ("policy", "critic"):
        # the estimate has room for pinned memory in powers of two, which a CPU's own memory does not take
        parameters = held[f"{role} parameters"]
        rounding = memory.host[role] - (18 * parameters if stage == 3 else 20 * parameters + 2 * LARGEST)
        both = memory.lasting[role] + memory.host[role] - rounding - bucket
        assert both == pytest.approx(held[f"{role} between steps"], rel=0.01)
