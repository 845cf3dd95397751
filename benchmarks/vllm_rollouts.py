"""Multi-turn rollouts on a CPU: our sampler next to vLLM, with the same model, prompts and lengths.

    .venv-openrlhf/bin/python benchmarks/vllm_rollouts.py --model models/SmolLM2-135M-Instruct

Needs the second environment (``make openrlhf``). Each dialogue has a prompt, and turns with an observation between two
of them, in tokens drawn at random; the policy's turns end at ``--turn`` tokens, or at an end-of-text token before that.
Groups of 8 share a prompt, as in training. Both sides get all dialogues at once and take turns, each in a process of
its own: in one that vLLM has set up, our sampler is half as fast. Weights do not change, because on a CPU vLLM packs
them for its matrix products and cannot load new ones after that. vLLM keeps earlier turns in its prefix cache, ours in
the rows of its own; both begin a round with nothing in it.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from sorl_env.rollout import SamplingParams
from sorl_train.config.files import load_config
from sorl_train.models.policy import load_policy
from sorl_train.rollout.model_check import try_packing
from sorl_train.rollout.sampler import TransformersSampler
from sorl_train.rollout.vllm_sampler import VllmSampler

GROUP = 8


class FixedVllm(VllmSampler):
    """vLLM at its best: it keeps the weights that it packed when it started."""

    @contextmanager
    def session(self) -> Iterator[VllmSampler]:
        """Around one batch: drops what was cached in earlier ones."""
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("a request of an earlier round still runs")
        yield self
        self._driver = None


async def dialogue(sampler: Any, name: str, prompt: list[int], args: argparse.Namespace, seed: int) -> int:
    """Play one dialogue; returns the tokens that the policy wrote."""
    draws = random.Random(seed)
    tokens, written = list(prompt), 0
    for turn in range(args.turns):
        if turn:
            tokens += [draws.randrange(1000, 40000) for _ in range(args.observation)]
        params = SamplingParams(max_new_tokens=args.turn, seed=seed * args.turns + turn)
        sampled = await sampler.generate(name, tokens, params)
        tokens += sampled.token_ids
        written += len(sampled.token_ids)
    sampler.release(name)
    return written


def play(sampler: Any, args: argparse.Namespace, number: int) -> tuple[int, float]:
    """All dialogues of a round; returns the policy's tokens and the seconds."""
    draws = random.Random(number)
    prompts = [
        [draws.randrange(1000, 40000) for _ in range(args.prompt)] for _ in range(args.dialogues // GROUP)
    ]

    async def all_of_them() -> int:
        jobs = (
            dialogue(sampler, f"{number}-{i}", prompts[i // GROUP], args, number * args.dialogues + i)
            for i in range(args.dialogues)
        )
        return sum(await asyncio.gather(*jobs))

    started = time.perf_counter()
    with sampler.session():
        written = asyncio.run(all_of_them())
    return written, time.perf_counter() - started


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", type=Path, required=True, help="folder of the policy")
    sizes = {"dialogues": (32, "a multiple of 8"), "turns": (2, "of a dialogue"), "prompt": (160, "tokens")}
    sizes |= {"observation": (370, "tokens"), "turn": (45, "tokens"), "rounds": (3, "after one to warm up")}
    for name, (default, text) in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: %(default)s)")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="(default: both)")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if args.dialogues % GROUP:
        parser.error(f"--dialogues is a multiple of {GROUP}, not {args.dialogues}")
    figures: dict[str, Any] = {name: version(name) for name in ("torch", "transformers")}
    figures["vllm"] = importlib.import_module("vllm").__version__  # its package has other names on a CPU
    for dtype in args.dtypes:
        figures[dtype] = compare(args, dtype)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


def serve(name: str, args: argparse.Namespace, dtype: str, rounds: Connection) -> None:
    """One side in its own process: plays each round whose number comes, and answers with its tokens and seconds."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    longest = args.prompt + args.turns * (args.turn + args.observation)
    settings = {
        "model": str(args.model),
        "hardware.dtype": dtype,
        "sampler.max_concurrency": args.dialogues,
        "limits.max_trajectory_tokens": longest,
    }
    config = load_config("minihop", settings)
    policy = load_policy(str(args.model), "cpu").eval()
    if why := try_packing(policy, longest, sampled=True):  # as the engine does when it loads a policy
        print(f"rows of attention stay as they are: {why}")
    if name == "vllm":
        sampler: Any = FixedVllm(policy, str(args.model), longest, config.sampler, dtype=dtype, seed=0)
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        sampler = TransformersSampler(policy, tokenizer, args.dialogues, dtype)
    while (number := rounds.recv()) is not None:
        rounds.send(play(sampler, args, number))


def compare(args: argparse.Namespace, dtype: str) -> dict[str, float]:
    """Tokens a second of both sides, medians over rounds, and the median of the rounds' ratios."""
    spawn = get_context("spawn")
    sides: dict[str, Connection] = {}
    processes = []
    for name in ("sorl", "vllm"):
        sides[name], theirs = spawn.Pipe()
        processes.append(spawn.Process(target=serve, args=(name, args, dtype, theirs), daemon=True))
        processes[-1].start()
        theirs.close()  # if the process dies, receiving from it ends with an error
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(args.rounds + 1):
        for name in sides if number % 2 else reversed(sides):
            sides[name].send(number)
            written, seconds = sides[name].recv()
            if number:
                speeds[name].append(written / seconds)
    for side, process in zip(sides.values(), processes, strict=True):
        side.send(None)
        process.join()
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    ratio = statistics.median(a / b for a, b in zip(speeds["sorl"], speeds["vllm"], strict=True))
    print(f"{dtype}: sorl {medians['sorl']:.0f} tokens/s, vLLM {medians['vllm']:.0f}, ratio {ratio:.2f}")
    return {**medians, "ratio": ratio}


if __name__ == "__main__":
    main()
