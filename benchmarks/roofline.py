"""How much of a pass are its matrix products: what is left to save, in an update and in decoding, on this machine.

    python benchmarks/roofline.py                     # random weights in the sizes of SmolLM2-135M
    python benchmarks/roofline.py --model FOLDER --prompt 40 --shortest 60 --longest 60   # such as the quickstart's

Beside each pass run its matrix products alone: the same shapes with random numbers, as many as the pass has, nothing in
between. No change of our code can make the pass faster than they are, as long as it computes the same tokens in the
same precision. Attention, norms and the sums over the vocabulary come on top and are not in that bound.

- update: forward and backward of a group of 8 trajectories in packed rows, as in ``language_model.py``.
- decoding: one step of 8, 32 and 128 dialogues of 250 tokens.

Also printed: the machine's rate of products (operations a second, in the shapes of the update) and of reading weights
(bytes a second, a decoding step of one row).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from language_model import DTYPES, GROUP, smollm2
from losses import Step, measure
from torch import Tensor, nn

from sorl_train.models import packed_attention
from sorl_train.models.compute_copy import compute_copy
from sorl_train.models.forward import action_stats, autocast
from sorl_train.models.policy import load_policy
from sorl_train.rollout.kv_cache import RowCache, feed

WRITTEN = 40  # tokens of each of a trajectory's two turns
CONTEXT = 250  # tokens of a dialogue that is decoded


def layers(model: nn.Module) -> tuple[Counter[tuple[int, int]], tuple[int, int]]:
    """How often each shape (out, in) of a matrix occurs in the blocks, and the shape of the output layer."""
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    shapes = Counter(
        (module.out_features, module.in_features)
        for module in model.modules()
        if isinstance(module, nn.Linear) and module is not head
    )
    return shapes, (head.out_features, head.in_features)


def products(
    model: nn.Module, rows: int, picked: int, dtype: torch.dtype, train: bool
) -> tuple[Step, float, float]:
    """The products of a pass over ``rows`` tokens of which ``picked`` pass the output layer; operations, bytes."""
    blocks, head = layers(model)
    work: list[tuple[Tensor, list[Tensor], Tensor]] = []
    operations = size = 0.0
    for (out, into), count, n in [*((shape, c, rows) for shape, c in blocks.items()), (head, 1, picked)]:
        weights = [torch.randn(out, into).to(dtype) for _ in range(count)]  # each its own: read from memory
        work.append((torch.randn(n, into).to(dtype), weights, torch.randn(n, out).to(dtype)))
        operations += 2.0 * n * out * into * count * (3 if train else 1)
        size += out * into * count * weights[0].element_size()

    def step() -> None:
        with torch.inference_mode():
            for x, weights, gradient in work:
                for weight in weights:
                    nn.functional.linear(x, weight)
                    if train:
                        gradient @ weight
                        gradient.t() @ x

    return step, operations, size


def update(model: Any, dtype: str, lengths: list[int], prompt: int) -> tuple[Step, int, int]:
    """Forward and backward of a group; its packed tokens, and how many of them were written by the policy."""
    vocabulary = len(model.get_input_embeddings().weight)
    token_ids = torch.randint(3, vocabulary, (len(lengths), max(lengths)))
    token_ids[:, :prompt] = token_ids[0, :prompt]
    mask = torch.zeros(len(lengths), max(lengths) - 1, dtype=torch.bool)
    for row, length in enumerate(lengths):
        written = min(WRITTEN, (length - prompt) // 2)
        mask[row, prompt - 1 : prompt - 1 + written] = True
        mask[row, length - 1 - written : length - 1] = True
    model.set_attn_implementation(packed_attention.PACKED)

    def step() -> None:
        with autocast(dtype, torch.device("cpu")):
            action_stats(model, token_ids, mask, entropy=True).log_probs.sum().backward()
        model.zero_grad()

    return step, prompt + sum(length - prompt for length in lengths), int(mask.sum())


def decoding(model: Any, dtype: str, dialogues: int) -> Step:
    """One token of each dialogue, all of which have the same context."""
    decoder = compute_copy(model, DTYPES[dtype])
    decoder.set_attn_implementation(packed_attention.PACKED)
    cache = RowCache(decoder, dialogues, DTYPES[dtype], CONTEXT + 8)
    with torch.inference_mode(), autocast(dtype, torch.device("cpu")):
        feed(decoder, cache, slice(0, dialogues), [list(range(3, 3 + CONTEXT))] * dialogues)

    def step() -> None:
        cache.lengths[:] = CONTEXT
        with torch.inference_mode(), autocast(dtype, torch.device("cpu")):
            feed(decoder, cache, slice(0, dialogues), [[7]] * dialogues)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of a policy (default: random weights in SmolLM2's sizes)")
    parser.add_argument("--prompt", type=int, default=230, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument(
        "--shortest", type=int, default=450, help="tokens of a trajectory (default: %(default)s)"
    )
    parser.add_argument(
        "--longest", type=int, default=650, help="tokens of a trajectory (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load_policy(args.model, "cpu").eval() if args.model else smollm2(30)
    lengths = [int(length) for length in torch.linspace(args.shortest, args.longest, GROUP)]
    figures: dict[str, Any] = {"settings": {**vars(args), "json": None, "torch": torch.__version__}}
    print(f"{'':36} {'ms':>9} {'products, ms':>13} {'share':>6}")
    for dtype in DTYPES:
        step, tokens, written = update(model, dtype, lengths, args.prompt)
        alone, operations, _ = products(model, tokens, written, DTYPES[dtype], train=True)
        found = compare(f"update of {tokens} tokens, {dtype}", step, alone, args.rounds)
        rate = operations / found["products_ms"] / 1e6
        figures[f"update_{dtype}"] = found | {"products_gflops": rate}
        for dialogues in (8, 32, 128):
            alone, _, _ = products(model, dialogues, dialogues, DTYPES[dtype], train=False)
            name = f"decoding, {dialogues} dialogues, {dtype}"
            figures[f"decoding_{dialogues}_{dtype}"] = compare(
                name, decoding(model, dtype, dialogues), alone, 4 * args.rounds
            )
        read, _, size = products(model, 1, 1, DTYPES[dtype], train=False)
        milliseconds = measure({"read": read}, 4 * args.rounds, memory=False)["read"]["milliseconds"]
        figures[f"memory_{dtype}"] = size / milliseconds / 1e6
        print(f"{dtype}: products {rate:.0f} GFLOP/s, weights read at {size / milliseconds / 1e6:.1f} GB/s")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


def compare(name: str, step: Step, alone: Step, rounds: int) -> dict[str, float]:
    """Milliseconds of a pass and of its products, and the median of the rounds' shares."""
    found = measure({"pass": step, "products": alone}, rounds, memory=False)
    whole, part = found["pass"]["milliseconds"], found["products"]["milliseconds"]
    share = found["products"]["time_ratio"]
    print(f"{name:36} {whole:9.1f} {part:13.1f} {share:6.2f}")
    return {"ms": whole, "products_ms": part, "share": share}


if __name__ == "__main__":
    main()
