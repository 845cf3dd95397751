"""Tiny random models of many architectures, and the same dialogues through the sampler, the trainer and the model."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from sorl_env.rollout import SamplingParams
from sorl_train.models.forward import action_stats
from sorl_train.rollout.sampler import TransformersSampler

SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OLD = SIZES | IDS | {"max_position_embeddings": 512}
NEW = OLD | {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [4.0, 5.0, 6.0, 7.0],
    "original_max_position_embeddings": 256,
}
WINDOW = {"sliding_window": 8}
# What the review asked for, each with what makes it hard.
EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", NEW),
    "qwen2": ("qwen2", NEW),
    "qwen2, upper layers with a window": (
        "qwen2",
        NEW | WINDOW | {"use_sliding_window": True, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", NEW),
    "mistral": ("mistral", NEW | WINDOW),
    "gemma2": ("gemma2", NEW | WINDOW | {"final_logit_softcapping": 0.5, "attn_logit_softcapping": 2.0}),
    "gemma3": ("gemma3_text", NEW | WINDOW | {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    "granite": (
        "granite",
        NEW | {"logits_scaling": 0.25, "embedding_multiplier": 12.0, "residual_multiplier": 0.2},
    ),
    "phi3": ("phi3", NEW | {"sliding_window": None}),
    "phi3, window": ("phi3", NEW | WINDOW),
    "phi3, longrope": (
        "phi3",
        NEW | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256, "sliding_window": None},
    ),
    "gpt2": ("gpt2", OLD),
    "smollm3": ("smollm3", NEW | {"no_rope_layers": [1, 0, 1, 0]}),
    "olmo2": ("olmo2", NEW),
    "gpt_oss": ("gpt_oss", NEW | WINDOW | {"num_local_experts": 4}),
    "cohere": ("cohere", NEW | {"logit_scale": 4.0}),
    "llama4, chunks": ("llama4_text", NEW | {"attention_chunk_size": 8, "num_local_experts": 4}),
}
MORE_EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere2": ("cohere2", NEW | WINDOW | {"logit_scale": 4.0}),
    "gemma": ("gemma", NEW),
    "gemma3 with images": ("gemma3", {"text_config": NEW | WINDOW, "image_token_index": 96}),
    "starcoder2": ("starcoder2", NEW | WINDOW),
    "mixtral": ("mixtral", NEW | WINDOW),
    "phimoe": ("phimoe", NEW | WINDOW),
    "ministral": ("ministral", NEW | WINDOW),
    "olmo3": ("olmo3", NEW | WINDOW),
    "exaone4": ("exaone4", NEW | WINDOW),
    "granitemoe": ("granitemoe", NEW | {"logits_scaling": 0.25}),
    "qwen2_moe": ("qwen2_moe", NEW | WINDOW | {"use_sliding_window": True, "max_window_layers": 2}),
    "qwen3, window": ("qwen3", NEW | WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3_moe": ("qwen3_moe", NEW | WINDOW | {"use_sliding_window": True}),
    "smollm3, window": (
        "smollm3",
        NEW
        | WINDOW
        | {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "glm4": ("glm4", NEW),
    "stablelm": ("stablelm", NEW),
    "nemotron": ("nemotron", NEW),
    "gpt_neox": ("gpt_neox", OLD),
    "gptj": ("gptj", OLD | {"rotary_dim": 4}),
    "opt": ("opt", OLD),
    "mpt": ("mpt", OLD),
    "falcon": ("falcon", OLD),
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
# Name: model type, settings, and what the refusal says.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mamba": ("mamba", OLD, "MambaForCausalLM .* keep a state .* sampler.backend=vllm"),
    "jamba": ("jamba", NEW, "JambaForCausalLM .* keep a state"),
    "qwen3_next": ("qwen3_next", NEW, "Qwen3NextForCausalLM .* keep a state"),
    "granitemoehybrid": (
        "granitemoehybrid",
        NEW | MAMBA | {"layer_types": ["mamba", "attention"] * 2},
        "GraniteMoeHybridForCausalLM .* keep a state",
    ),
    "lfm2": ("lfm2", NEW | {"layer_types": ["conv", "full_attention"] * 2}, "Lfm2ForCausalLM .* type conv"),
    "bloom": ("bloom", OLD, "BloomForCausalLM .* does not work with sampler.backend=transformers"),
    "falcon, alibi": ("falcon", OLD | {"alibi": True}, "FalconForCausalLM .* does not work with sampler"),
    "gpt_neo, windows of its own": (
        "gpt_neo",
        OLD | {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "window_size": 8},
        "GPTNeoForCausalLM .* is not exact with sampler.backend=transformers",
    ),
    "bert, which reads what comes later": ("bert", OLD, "BertLMHeadModel .* is not exact with the trainer"),
}


def build(model_type: str, settings: dict[str, Any]) -> Any:
    """A random model whose log-probabilities depend on the context by whole nats."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**settings), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None  # turns are as long as they may be
    return model.eval()


class Numbers:
    """A tokenizer whose text is the ids."""

    eos_token_id: Any = None

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return " ".join(map(str, ids))


@dataclass
class Dialogue:
    """Tokens of one session; ``log_probs`` has an entry for each token that was sampled, by its place."""

    token_ids: list[int]
    log_probs: dict[int, float] = dataclasses.field(default_factory=dict)


def talk(
    model: Any, lengths: Sequence[tuple[int, int, int]], *, turns: int = 3, seed: int = 0
) -> list[Dialogue]:
    """Dialogues drawn together: each with its (prompt, sampled, reply) numbers of tokens in each turn."""
    draws = np.random.default_rng(seed)
    size = 90  # the last ids of the vocabulary may stand for images
    plans = [
        (Dialogue(draws.integers(3, size, prompt).tolist()), new, reply) for prompt, new, reply in lengths
    ]
    replies = [[draws.integers(3, size, reply).tolist() for _ in range(turns)] for _, _, reply in lengths]
    sampler = TransformersSampler(model, Numbers(), len(plans))

    async def session(number: int) -> None:
        dialogue, new, _ = plans[number]
        for turn in range(turns):
            params = SamplingParams(new, temperature=1.0, seed=100 * number + turn)
            drawn = await sampler.generate(f"s{number}", dialogue.token_ids, params)
            start = len(dialogue.token_ids)
            dialogue.log_probs |= dict(enumerate(drawn.log_probs, start))
            dialogue.token_ids += drawn.token_ids + replies[number][turn]

    async def main() -> None:
        await asyncio.gather(*(session(number) for number in range(len(plans))))

    with sampler.session():
        asyncio.run(main())
    return [dialogue for dialogue, _, _ in plans]


@torch.no_grad()
def three_ways(model: Any, dialogues: Sequence[Dialogue]) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of all sampled tokens: the sampler's, the trainer's on a padded batch, the model's own."""
    rows = [torch.tensor(dialogue.token_ids) for dialogue in dialogues]
    token_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.zeros(token_ids.shape, dtype=torch.bool)
    for row, dialogue in enumerate(dialogues):
        mask[row, list(dialogue.log_probs)] = True
    trained = action_stats(model, token_ids, mask[:, 1:]).log_probs[mask[:, 1:]]
    own = []
    for row, dialogue in zip(rows, dialogues, strict=True):
        log_probs = model(input_ids=row[None], use_cache=False).logits[0].float().log_softmax(-1)
        own += [log_probs[place - 1, row[place]] for place in dialogue.log_probs]
    sampled = torch.tensor([value for dialogue in dialogues for value in dialogue.log_probs.values()])
    return sampled, trained, torch.stack(own)
