"""Which divergence should a trust region limit? Several candidates, measured and tried.

    python benchmarks/trust_divergence.py measure --json docs/stability/trust_divergence_measured.json
    python benchmarks/trust_divergence.py train --out runs/trust_divergence --json docs/stability/trust_divergence.json

``measure`` takes steps on a batch until the mean token KL is about .01, and reads each candidate on parts of the batch
of 8 to 256 trajectories, with turns of several lengths, at two sizes of policy. A limit carries over where the reading
does not change. ``train`` runs the trust region with each candidate in place of the mean token KL, at rates at which
the algorithm alone loses everything. Limits are those that read as a mean token KL of .01 in the first setting of
``measure``; nothing is tuned afterwards. Runs that are finished are not run again.

With ``--model`` (a folder, as ``make model`` makes it) ``measure`` reads a pretrained model, too, on text of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sorl_env.figures import markdown_table
from sorl_train import cli
from sorl_train.learner import update as update_module
from sorl_train.learner.batch import Batch
from sorl_train.learner.scored_batch import estimate_advantages
from sorl_train.learner.scoring import score
from sorl_train.losses.policy import LossSettings, policy_loss
from sorl_train.losses.segments import Segments
from sorl_train.run.files import atomic_write
from sorl_train.run.folder import RunDir
from sorl_train.run.stability import measure as stability

AIM = 0.01  # the mean token KL at which candidates are read
SIZES = (8, 32, 128, 256)  # trajectories
DRAWS = 20  # parts of each size
CLIPPED = LossSettings(ratio_level="turn")  # as so_ppo

Divergence = Callable[[Tensor, Batch], float]


def _log_ratios(log_probs: Tensor, batch: Batch) -> tuple[Tensor, Segments]:
    """(N,) log-ratios of the loss tokens to the policy that the update began with, and their turns."""
    began = batch.old_log_probs if batch.start_log_probs is None else batch.start_log_probs
    began = log_probs if began is None else began
    turns = Segments.of("turn", batch.loss_mask, batch.turn_ids)
    return turns.pick((log_probs.cpu() - began.cpu()).double()), turns


def token(log_probs: Tensor, batch: Batch) -> float:
    """The mean token KL, which the trust region uses."""
    log_ratio, _ = _log_ratios(log_probs, batch)
    return 0.5 * float(log_ratio.square().mean())


def turn_mean(log_probs: Tensor, batch: Batch) -> float:
    """The same of the paper's turn ratio, the geometric mean of a turn's token ratios."""
    log_ratio, turns = _log_ratios(log_probs, batch)
    return 0.5 * float(turns.mean(log_ratio).square().mean())


def turn_sum(log_probs: Tensor, batch: Batch) -> float:
    """The mean KL of whole turns: the same of the product of a turn's token ratios."""
    log_ratio, turns = _log_ratios(log_probs, batch)
    assert turns.lengths is not None
    return 0.5 * float((turns.mean(log_ratio) * turns.lengths).square().mean())


def largest_turn(log_probs: Tensor, batch: Batch) -> float:
    """The mean token KL of the turn in which it is largest."""
    log_ratio, turns = _log_ratios(log_probs, batch)
    return 0.5 * float(turns.mean(log_ratio.square()).max())


def quantile(log_probs: Tensor, batch: Batch) -> float:
    """The 99% quantile of the absolute log-ratio, squared and halved."""
    log_ratio, _ = _log_ratios(log_probs, batch)
    return 0.5 * float(log_ratio.abs().quantile(0.99)) ** 2


def clip_bias(log_probs: Tensor, batch: Batch) -> float:
    """The paper's signal: the root mean square of the clipping bias."""
    if batch.old_log_probs is None:
        return 0.0
    assert batch.advantages is not None
    output = policy_loss(
        log_probs.cpu(),
        batch.old_log_probs.cpu(),
        batch.advantages.cpu(),
        batch.loss_mask.cpu(),
        batch.turn_ids.cpu(),
        CLIPPED,
        denominator=1.0,
    )
    return output.clip_bias.norm("rms")


DIVERGENCES: Mapping[str, Divergence] = {
    each.__name__: each for each in (token, turn_mean, turn_sum, largest_turn, quantile, clip_bias)
}
LIMITS = dict.fromkeys(DIVERGENCES, 0.01)

# --- measure ---------------------------------------------------------------------------------------------------------


def moved(reasoning: int, layers: int, folder: Path) -> tuple[Batch, Tensor]:
    """256 trajectories of a cold-started policy, and their log-probabilities after steps to about the KL ``AIM``."""
    from diagnostics import make_engine

    changes = {"rollout.batch_size": 256, "task_args.reasoning": reasoning, "tiny.num_layers": layers}
    engine = make_engine("ppo", folder, {**changes, "optim.lr": 4e-4, "optim.max_grad_norm": None})
    batch = engine.collect(1).batch
    assert batch is not None
    batch = estimate_advantages(batch, engine.config.algorithm.advantage, engine.config.loss)
    if batch.old_log_probs is None:
        batch = score(batch, {"old_log_probs": engine.policy}, None, engine.config, engine.device)
    while True:
        now = score(batch, {"old_log_probs": engine.policy}, None, engine.config, engine.device).old_log_probs
        assert now is not None
        if token(now, batch) > AIM:
            return batch, now
        engine.update(batch, 1)


def sampled_text(model_folder: Path, rows: int = 32, tokens: int = 512) -> tuple[Batch, Tensor]:
    """Text sampled from a pretrained model, and its log-probabilities after steps of Adam on random advantages."""
    from transformers import AutoModelForCausalLM

    from sorl_train.losses.log_probs import token_log_probs

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    begin = torch.full((rows, 1), model.config.bos_token_id or 1)
    ids = model.generate(
        begin, do_sample=True, min_new_tokens=tokens, max_new_tokens=tokens, top_k=0, top_p=1.0
    )

    def log_probs() -> Tensor:
        return torch.cat(
            [token_log_probs(model(part).logits[:, :-1], part[:, 1:]).log_probs for part in ids.split(4)]
        )

    advantages = torch.randn(rows, 1).sign().expand(rows, tokens)
    with torch.no_grad():
        old = log_probs()
    mask = torch.ones_like(old, dtype=torch.bool)
    batch = Batch(
        token_ids=ids,
        lengths=torch.full((rows,), tokens + 1),
        action_mask=mask,
        loss_mask=mask,
        turn_ids=torch.zeros_like(ids[:, 1:]),
        rollout_log_probs=old,
        rewards=torch.zeros(rows),
        token_rewards=torch.zeros_like(old),
        included=torch.ones(rows, dtype=torch.bool),
        group_ids=torch.arange(rows),
        ids=tuple(map(str, range(rows))),
        old_log_probs=old,
        advantages=advantages.float(),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-6)
    while True:
        for part in torch.arange(rows).split(4):
            now = token_log_probs(model(ids[part]).logits[:, :-1], ids[part, 1:]).log_probs
            (-((now - old[part]).exp() * advantages[part]).mean() * len(part) / rows).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            now = log_probs()
        print(f"mean token KL {token(now, batch):.5f}", file=sys.stderr)
        if token(now, batch) > AIM:
            return batch, now


def read_on_parts(batch: Batch, now: Tensor) -> dict[str, Any]:
    """Each candidate over the mean token KL of the whole batch, on parts of it: mean and spread."""
    generator = torch.Generator().manual_seed(0)
    whole = token(now, batch)
    lengths = Segments.of("turn", batch.loss_mask, batch.turn_ids).lengths
    assert lengths is not None
    figures: dict[str, Any] = {"mean_token_kl": whole, "turn_tokens": float(lengths.double().mean())}
    for size in [size for size in SIZES if size <= len(batch)]:
        parts = [torch.randperm(len(batch), generator=generator)[:size] for _ in range(DRAWS)]
        for name, divergence in DIVERGENCES.items():
            values = torch.tensor(
                [
                    divergence(now[part][:, : rows.loss_mask.shape[1]], rows) / whole
                    for part in parts
                    for rows in [batch.rows(part)]
                ]
            )
            figures.setdefault(name, {})[size] = (float(values.mean()), float(values.std()))
    return figures


def cut_into_turns(batch: Batch, length: int) -> Batch:
    """The same tokens in turns of another length."""
    return batch.with_fields(
        turn_ids=(torch.arange(batch.loss_mask.shape[1]) // length).expand_as(batch.turn_ids)
    )


def measure(model: Path | None) -> dict[str, Any]:
    """All settings: policy and turns."""
    figures: dict[str, Any] = {}
    for reasoning, layers in ((1, 3), (3, 3)):
        with tempfile.TemporaryDirectory() as folder:
            batch, now = moved(reasoning, layers, Path(folder) / "run")
        figures[f"tiny, {layers} layers, reasoning {reasoning}"] = read_on_parts(batch, now)
    if model is not None:
        batch, now = sampled_text(model)
        for length in (8, 64, 512):
            figures[f"{model.name}, turns of {length}"] = read_on_parts(cut_into_turns(batch, length), now)
    return figures


def measured_table(figures: Mapping[str, Any]) -> str:
    """A line a setting: each candidate on all its trajectories over the mean token KL, and its spread at 8."""
    rows = []
    for setting, found in figures.items():
        row = [setting, f"{found['turn_tokens']:.0f}"]
        for name in DIVERGENCES:
            sizes = {int(size): value for size, value in found[name].items()}
            smallest, largest = sizes[min(sizes)], sizes[max(sizes)]
            row.append(f"{smallest[0]:.2f} ± {smallest[1]:.2f} / {largest[0]:.2f}")
        rows.append(row)
    return markdown_table(["policy and text", "tokens a turn", *DIVERGENCES], rows)


# --- train -----------------------------------------------------------------------------------------------------------

CELLS: Mapping[str, dict[str, Any]] = {
    "ppo, 12 of 8, 1.6e-3": {"algo": "ppo", "optim.lr": 1.6e-3},
    "ppo, 12 of 8, 5e-3": {"algo": "ppo", "optim.lr": 5e-3},
    "ppo, 3 of 32, 5e-3": {"algo": "ppo", "optim.lr": 5e-3, "update.mini_batch_size": 32},
    "grpo, 12 of 8, 1.6e-3": {"algo": "grpo", "optim.lr": 1.6e-3},
    "ppo, long turns, 1.6e-3": {"algo": "ppo", "optim.lr": 1.6e-3, "task_args.reasoning": 3},
}


def run(job: tuple[str, str, int, float, Path]) -> None:
    """Train one cell with one candidate in place of the mean token KL."""
    cell, name, seed, limit, out = job
    folder = run_folder(out, cell, name, seed)
    if RunDir(folder).summary.is_file():
        return
    update_module.token_kl = DIVERGENCES[name]
    settings = CELLS[cell] | {"update.trust_kl": limit, "seed": seed}
    flags = [
        f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()
    ]
    # what a candidate says of a run that has begun is not kept, so it begins again
    status = cli.main(["--config", "off_policy", "--run_dir", str(folder), "--overwrite", *flags])
    print(f"{cell}, {name}, seed {seed}: exit status {status}", file=sys.stderr)


def run_folder(out: Path, cell: str, name: str, seed: int) -> Path:
    return out / f"{cell}, {name}, {seed}".replace(", ", "-").replace(" ", "_")


def train(out: Path, jobs: int, seeds: int) -> list[dict[str, Any]]:
    """Run what has not been run, ``jobs`` at a time; the figures of each run."""
    todo = [
        (cell, name, seed, LIMITS[name], out)
        for seed in range(seeds)
        for cell in CELLS
        for name in DIVERGENCES
    ]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        for done, _ in enumerate(pool.imap_unordered(run, todo), 1):
            print(f"{done} of {len(todo)} runs", file=sys.stderr)
    found = []
    for cell, name, seed, limit, _ in todo:
        figures = stability(run_folder(out, cell, name, seed))
        kept = {key: figures[key] for key in ("final", "peak", "kept_mean", "moves_back")}
        found.append({"cell": cell, "divergence": name, "limit": limit, "seed": seed, **kept})
    return found


def trained_table(runs: list[dict[str, Any]]) -> str:
    """Final success, one figure a seed."""
    rows = []
    for name in dict.fromkeys(run["divergence"] for run in runs):
        own = [run for run in runs if run["divergence"] == name]
        cells = [[run for run in own if run["cell"] == cell] for cell in CELLS]
        rows.append(
            [
                name,
                f"{own[0]['limit']:g}",
                *(" ".join(f"{one['final']:.2f}" for one in cell) for cell in cells),
            ]
        )
    return markdown_table(["", "limit", *CELLS], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("measure", "train"))
    parser.add_argument("--model", type=Path, help="measure: folder of a pretrained model")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/trust_divergence"), help="train: folder of runs"
    )
    parser.add_argument("--jobs", type=int, default=2, help="train: runs at a time (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="train: seeds (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    args = parser.parse_args()
    if args.what == "measure":
        figures: Any = measure(args.model)
        print(measured_table(figures))
    else:
        figures = train(args.out, args.jobs, args.seeds)
        print(trained_table(figures))
    if args.json:
        atomic_write(args.json, json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
