"""Time and memory of the losses: each ratio level, and log-probabilities beside the plain formulas.

    python benchmarks/losses.py                     # (64, 4096), one thread
    python benchmarks/losses.py --json losses.json

The turn-level loss should take at most 1.15 times the time of the token-level one and 1.1 times its peak memory. Rounds
are interleaved and ratios are medians over rounds, so that other load on the machine slows all sides alike. Peak memory
is what torch's allocator hands out during one forward and backward pass, without the inputs.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sorl_train.losses.log_probs import token_log_probs
from sorl_train.losses.policy import LossSettings, policy_loss

Step = Callable[[], Any]


def turn_layout(rows: int, columns: int, turns: int, generator: torch.Generator) -> Tensor:
    """Turn ids (B, T) of agent trajectories: a prompt, then turns and observations by turns, then padding."""
    ids = torch.full((rows, columns), -1, dtype=torch.int32)
    unit = columns // (2 * turns + 1)
    for row in ids:
        t = int(torch.randint(unit // 2, unit + 1, (), generator=generator))
        for turn in range(turns):
            length, observation = torch.randint(unit // 3, unit + 1, (2,), generator=generator).tolist()
            row[t : t + length] = turn
            t += length + observation
    return ids


def loss_inputs(rows: int, columns: int, turns: int) -> tuple[list[Tensor], Tensor]:
    """Random inputs of the policy loss, log-probabilities with gradient first; the logit scale."""
    generator = torch.Generator().manual_seed(0)
    turn_ids = turn_layout(rows, columns, turns, generator)
    log_probs = (-torch.rand(rows, columns, generator=generator)).requires_grad_()
    old_log_probs = log_probs.detach() + 0.3 * torch.randn(rows, columns, generator=generator)
    advantages = torch.randn(rows, columns, generator=generator)
    logit_scale = torch.rand(rows, columns, generator=generator)
    return [log_probs, old_log_probs, advantages, turn_ids >= 0, turn_ids], logit_scale


def loss_steps(rows: int, columns: int, turns: int) -> dict[str, Step]:
    """Forward and backward pass of the policy loss at each ratio level, as the trainer calls it."""
    (log_probs, old, advantages, mask, turn_ids), logit_scale = loss_inputs(rows, columns, turns)

    def step(level: Any) -> None:
        log_probs.grad = None
        inputs = log_probs, old, advantages, mask, turn_ids, LossSettings(level)
        policy_loss(*inputs, denominator=float(rows), logit_scale=logit_scale).loss.backward()

    return {level: functools.partial(step, level) for level in ("token", "turn", "sequence")}


def log_prob_steps(positions: int, vocabulary: int, dtype: torch.dtype) -> dict[str, Step]:
    """Forward and backward of log-probability and entropy, next to the plain formulas on a float32 copy."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(positions, vocabulary, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (positions,), generator=generator)

    def plain() -> None:
        logits.grad = None
        log_p = torch.log_softmax(logits.float(), -1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        (log_p.gather(1, targets[:, None]).squeeze(1) + entropy).sum().backward()

    def chunked() -> None:
        logits.grad = None
        stats = token_log_probs(logits, targets, entropy=True)
        assert stats.entropy is not None
        (stats.log_probs + stats.entropy).sum().backward()

    return {"log_softmax, gather": plain, "token_log_probs": chunked}


def measure(steps: Mapping[str, Step], rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds, MiB and their ratios to those of the first step, by name."""
    names = list(steps)
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        for name in names if index % 2 else reversed(names):
            start = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - start)
    mib = {name: peak_mib(step) for name, step in steps.items()}
    return {
        name: {
            "milliseconds": 1e3 * statistics.median(seconds[name]),
            "time_ratio": statistics.median(
                a / b for a, b in zip(seconds[name], seconds[names[0]], strict=True)
            ),
            "peak_mib": mib[name],
            "peak_ratio": mib[name] / mib[names[0]],
        }
        for name in names
    }


def peak_mib(step: Step) -> float:
    """The most memory held at once, from the profiler's record of allocations and releases."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]") / 2**20


def show(title: str, results: Mapping[str, Mapping[str, float]]) -> None:
    print(f"\n{title}")
    print(f"{'':22} {'ms':>9} {'x':>7} {'peak MiB':>10} {'x':>6}")
    for name, row in results.items():
        print(
            f"{name:22} {row['milliseconds']:9.2f} {row['time_ratio']:7.3f}"
            f" {row['peak_mib']:10.2f} {row['peak_ratio']:6.2f}"
        )


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    sizes = {"rows": (64, "trajectories"), "columns": (4096, "scored positions"), "turns": (6, "of each")}
    sizes |= {"positions": (512, "of the log-probabilities"), "vocabulary": (32768, "of these, too")}
    sizes |= {"rounds": (101, "interleaved rounds"), "threads": (1, "CPU threads of torch")}
    for name, (default, text) in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    losses = measure(loss_steps(args.rows, args.columns, args.turns), args.rounds)
    show(f"policy loss, forward and backward, ({args.rows}, {args.columns}), {args.turns} turns", losses)
    time_ratio, peak_ratio = (losses["turn"][name] for name in ("time_ratio", "peak_ratio"))
    print(f"turn / token: time {time_ratio:.2f} (at most 1.15), peak {peak_ratio:.2f} (at most 1.1)")
    figures: dict[str, Any] = {"torch": torch.__version__, "losses": losses}
    for dtype in (torch.bfloat16, torch.float32):
        steps = log_prob_steps(args.positions, args.vocabulary, dtype)
        figures[f"log_probs, {dtype}"] = results = measure(steps, max(args.rounds // 20, 1))
        show(f"log-probability and entropy, ({args.positions}, {args.vocabulary}) {dtype}", results)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
