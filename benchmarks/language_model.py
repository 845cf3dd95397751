"""What saves time with a language model of SmolLM2's sizes: packed rows, and decoding as the sampler does.

    python benchmarks/language_model.py --rounds 3

- A group of 8 trajectories that share a prompt, forward and backward (an update) and forward alone (scoring), in padded
  rows and packed. The prompt is as long as that of ``smollm2_hotpotqa`` (about 230 tokens), the rest 220 to 420 tokens,
  of which the policy wrote 90: a thought with a query, an observation, an answer. Then such a group whose rollouts
  all searched for the same, of as many tokens: only their answers are their own.
- Decoding steps of 8 and 32 dialogues of 250 tokens in float32 and in bfloat16 under autocast, each with torch's own
  kernels and as the sampler takes them: with matrices prepared once, and its own attention.

The sides take turns in one process; ratios are medians over rounds. Weights are random: time does not depend on them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from losses import Step, measure, show
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from sorl_train.models import packed_attention
from sorl_train.models.compute_copy import compute_copy
from sorl_train.models.forward import action_stats, autocast
from sorl_train.rollout.kv_cache import RowCache, feed

GROUP, PROMPT, SHORTEST, LONGEST, ANSWER = 8, 230, 220, 420, 40
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def smollm2(layers: int) -> Any:
    """Random weights in the sizes of SmolLM2-135M."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    }
    config = LlamaConfig(
        vocab_size=49152,
        num_hidden_layers=layers,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        **sizes,
    )
    return LlamaForCausalLM(config).eval()


def group(alike: bool = False) -> tuple[Tensor, Tensor]:
    """Token ids (B, L) of a group's trajectories, and the mask (B, T) of what the policy wrote.

    Args:
        alike: whether all searched for the same, so that all but their answers is equal, and their lengths are.
    """
    rest = [(SHORTEST + LONGEST) / 2] * GROUP if alike else torch.linspace(SHORTEST, LONGEST, GROUP).tolist()
    lengths = [PROMPT + int(tokens) for tokens in rest]
    token_ids = torch.randint(3, 49152, (GROUP, max(lengths)))
    shared = lengths[0] - ANSWER if alike else PROMPT
    token_ids[:, :shared] = token_ids[0, :shared]
    mask = torch.zeros(GROUP, max(lengths) - 1, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, PROMPT - 1 : PROMPT + 49] = True
        mask[row, length - ANSWER : length - 1] = True
    return token_ids, mask


def rows(model: Any, dtype: str, train: bool) -> dict[str, Step]:
    """A pass over the group in padded and in packed rows, and over one with equal first turns in packed rows."""
    different, equal = group(), group(alike=True)

    def step(attention: str, rows: tuple[Tensor, Tensor] = different) -> None:
        token_ids, mask = rows
        model.set_attn_implementation(attention)
        with torch.set_grad_enabled(train), autocast(dtype, torch.device("cpu")):
            stats = action_stats(model, token_ids, mask, entropy=train)
            if train:
                stats.log_probs.sum().backward()
        model.zero_grad()

    return {
        "padded": lambda: step("sdpa"),
        "packed": lambda: step(packed_attention.PACKED),
        "packed, first turns alike": lambda: step(packed_attention.PACKED, equal),
    }


def decoding(model: Any, dialogues: int, steps: int = 8) -> dict[str, Step]:
    """Decoding steps of dialogues that have 250 tokens, by torch's own kernels and as the sampler takes them."""
    sides: dict[str, Step] = {}
    for name, dtype, prepared in (
        ("float32", "float32", False),
        ("bfloat16", "bfloat16", False),
        ("float32, as the sampler", "float32", True),
        ("bfloat16, as the sampler", "bfloat16", True),
    ):
        decoder = compute_copy(model, DTYPES[dtype]) if prepared else model
        if prepared:
            decoder.set_attn_implementation(packed_attention.PACKED)
        cache = RowCache(model, dialogues, DTYPES[dtype], 320)
        with torch.inference_mode(), autocast(dtype, torch.device("cpu")):
            feed(decoder, cache, slice(0, dialogues), [list(range(3, 253))] * dialogues)

        def step(decoder: Any = decoder, dtype: str = dtype, cache: RowCache = cache) -> None:
            cache.lengths[:] = 250
            for _ in range(steps):
                with torch.inference_mode(), autocast(dtype, torch.device("cpu")):
                    feed(decoder, cache, slice(0, dialogues), [[7]] * dialogues)

        sides[name] = step
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=30, help="of the model (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = smollm2(args.layers)
    figures: dict[str, Any] = {"settings": {**vars(args), "json": None, "torch": torch.__version__}}
    for dtype in DTYPES:
        for what, train in (("update", True), ("scoring", False)):
            figures[f"{what}_{dtype}"] = found = measure(rows(model, dtype, train), args.rounds, memory=False)
            show(f"{what} of a group of {GROUP}, {dtype}", found)
    model.set_attn_implementation("sdpa")
    for dialogues in (8, 32):
        found = measure(decoding(model, dialogues), args.rounds, memory=False)
        figures[f"decoding_{dialogues}"] = found
        show(f"8 decoding steps of {dialogues} dialogues", found)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
