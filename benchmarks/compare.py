"""Two revisions side by side: is the newer one slower?

    python benchmarks/compare.py BASE [HEAD] --rounds 10 --json compare.json

Checks both revisions out into temporary folders, makes one tiny policy and one index for both, and measures each
headline figure in turns, every measurement in a process of its own:

- environment: steps a second of ``gym.make``'s environment with one tool, of processor time;
- loss: forward and backward passes a second of the turn-level policy loss on (16, 2048), of processor time;
- training: tokens a second of whole SO-PPO steps of ``sorl-train`` on MiniHop;
- search: queries a second that a ``sorl-serve`` answers to eight clients.

A row shows the median ratio HEAD / BASE of the rates and a 95% interval for the mean ratio (Student's t over the
logarithms of the rounds' ratios). The exit status is 1 if an interval lies wholly below 1: HEAD is slower. What is
measured goes through commands and public functions that both revisions must have.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
CLIENTS, SECONDS = 8, 2.0
TASK = '''
from sorl_env import Example, Task

def look_up(query: str) -> str:
    """Find passages."""
    return "\\n".join(f"{number}. A passage of some words about {query}, the sea and a harbour." for number in range(9))

look_up.inline = True
EXAMPLES = [Example(id=str(i), question=f"What is {i}?", golden_answers=(str(i),)) for i in range(100)]
TASK = Task(
    name="compare",
    env_id="sorl/Compare-v0",
    prompt=lambda example: f"Use <look_up> and <answer>. {example.question}",
    reward=lambda example, turns: {"exact_match": float(turns[-1].content in example.golden_answers)},
    parse_row=lambda row: Example(id=str(row["id"]), question=str(row["question"])),
    tools=lambda settings: [look_up],
    embedded=lambda split: EXAMPLES,
)
'''


def rate(run: Callable[[], int], clock: Callable[[], float] = time.process_time) -> float:
    """What ``run`` does a second, over ``SECONDS`` seconds after one call that is not counted."""
    run()
    done, started = 0, clock()
    while clock() - started < SECONDS:
        done += run()
    return done / (clock() - started)


def environment(folder: Path) -> float:
    import gymnasium as gym

    from sorl_env import load_task
    from sorl_env.task.registry import register_task

    task = load_task(str(folder / "task.py"))
    register_task(task)
    env = gym.make(str(task.env_id))
    think = "<think>I should find out where the river meets the sea first.</think>\n"
    episode = [f"{think}<look_up>river and sea</look_up>"] * 3 + [f"{think}<answer>the harbour</answer>"]

    def play() -> int:
        env.reset()
        for action in episode:
            ended = env.step(action)[2]
        assert ended
        return len(episode)

    return rate(play)


def loss(folder: Path) -> float:
    import torch

    from sorl_train.losses.policy import LossSettings, policy_loss

    torch.set_num_threads(1)
    rows, columns = 16, 2048
    generator = torch.Generator().manual_seed(0)
    turn_ids = (torch.arange(columns) // 64 // 2).repeat(rows, 1)
    mask = (torch.arange(columns) // 64 % 2 == 0).repeat(rows, 1)
    new = (-torch.rand(rows, columns, generator=generator)).requires_grad_()
    old = new.detach() + 0.3 * torch.randn(rows, columns, generator=generator)
    advantages = torch.randn(rows, columns, generator=generator)
    settings = LossSettings("turn")

    def step() -> int:
        new.grad = None
        output = policy_loss(new, old, advantages, mask, turn_ids, settings, denominator=float(rows))
        output.loss.backward()
        return 1

    return rate(step)


def training(folder: Path) -> float:
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        options = f"--algo so_ppo --model {folder / 'policy'} --run_dir {run} --rollout.batch_size 64"
        options += " --update.steps 3 --eval.every 0 --eval.num_examples_final 1"
        command = [sys.executable, "-m", "sorl_train.cli", *options.split()]
        subprocess.run(command, check=True, capture_output=True)
        rows = [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()]
    return statistics.median(row["time/tokens_per_s"] for row in rows if "time/tokens_per_s" in row)


def search(folder: Path) -> float:
    import httpx

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "sorl_tools.serve.cli", str(folder / "index"), "--port", port]
    with (
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as client,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):

        def ask(number: int) -> None:
            words = " ".join(f"w{(number * step) % 997}" for step in (3, 7, 11, 31))
            asked = {"queries": [words], "topk": 3, "return_scores": True}
            client.post("/retrieve", json=asked).raise_for_status()

        def batch() -> int:
            list(pool.map(ask, range(64)))
            return 64

        try:
            wait_for(client, server)
            return rate(batch, time.perf_counter)
        finally:
            server.terminate()


def wait_for(client: Any, server: subprocess.Popen[bytes]) -> None:
    """Return when the server answers that it is ready, within a minute."""
    import httpx

    for _ in range(600):
        with contextlib.suppress(httpx.TransportError):
            if client.get("/ready").is_success:
                return
        if server.poll() is not None:
            break
        time.sleep(0.1)
    raise RuntimeError("sorl-serve has ended, or is not ready after a minute")


MEASURES = {measure.__name__: measure for measure in (environment, loss, training, search)}


def python(tree: Path, *arguments: str) -> str:
    """What a Python process of a revision prints."""
    # tasks/ and tools/ are linked there under the names that they are installed as
    paths = os.pathsep.join([str(tree), str(tree / ".ci" / "typings")])
    environ = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], env=environ, capture_output=True, text=True, cwd=tree)
    if done.returncode:
        raise SystemExit(f"{tree.parent.name}: {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def prepare(commit: str, folder: Path) -> Path:
    """Check a commit out; the path of its tree, with the task and the index that it measures beside it."""
    tree, corpus = folder / "tree", folder / "corpus.jsonl"
    folder.mkdir()
    subprocess.run(["git", "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(tree)], check=True)
    subprocess.run(["git", "checkout", "--quiet", commit], check=True, cwd=tree)
    (folder / "task.py").write_text(TASK)
    with corpus.open("w") as lines:
        for number in range(20_000):
            words = " ".join(f"w{(number * step + step) % 997}" for step in range(1, 80))
            lines.write(json.dumps({"id": str(number), "contents": f'"Passage {number}"\n{words}'}) + "\n")
    python(
        tree, "-m", "sorl_tools.index.cli", "build", str(corpus), "--out", str(folder / "index"), "--quiet"
    )
    return tree


def make_policy(tree: Path, folder: Path) -> Path:
    """A tiny policy that both revisions train: a short cold start on MiniHop."""
    run = folder / "cold_start"
    options = "--stage sft --sft.steps 150 --eval.num_examples 1 --eval.num_examples_final 1"
    python(tree, "-m", "sorl_train.cli", *options.split(), "--run_dir", str(run))
    return max(run.rglob("model.safetensors"), key=lambda path: path.stat().st_mtime).parent


def measured(rounds: int, only: Sequence[str], folder: Path, trees: Mapping[str, Path]) -> dict[str, Any]:
    """The rates of both sides by measure, in turns that begin with either side alternately."""
    rates: dict[str, dict[str, list[float]]] = {name: {side: [] for side in trees} for name in only}
    if "training" in only:
        policy = make_policy(trees["head"], folder)
        for side in trees:
            shutil.copytree(policy, folder / side / "policy")
    for number in tqdm(range(rounds), unit="round"):
        for name, sides in rates.items():
            for side in sorted(trees, reverse=number % 2 == 0):
                printed = python(trees[side], __file__, name, "--measure", str(folder / side))
                sides[side].append(float(printed.split()[-1]))
    rows = {}
    for name, sides in rates.items():
        ratios = [head / base for base, head in zip(sides["base"], sides["head"], strict=True)]
        medians = {side: statistics.median(values) for side, values in sides.items()}
        rows[name] = {**medians, "ratio": statistics.median(ratios), "interval": interval(ratios)}
    return rows


def show(figures: Mapping[str, Any]) -> None:
    print(", ".join(f"{name} {value}" for name, value in figures.items() if name != "measures"))
    print(f"\n{'rate a second':14} {'base':>11} {'head':>11} {'head/base':>10} {'95% interval':>16}")
    for name, row in figures["measures"].items():
        low, high = row["interval"]
        verdict = "slower" if high < 1 else "faster" if low > 1 else ""
        rates = f"{row['base']:11,.1f} {row['head']:11,.1f} {row['ratio']:10.3f}"
        print(f"{name:14} {rates} {low:7.3f} to {high:5.3f}  {verdict}")


def interval(ratios: list[float]) -> tuple[float, float]:
    """95% interval of the mean ratio, from the logarithms."""
    logs = np.log(ratios)
    low, high = stats.t.interval(0.95, len(logs) - 1, logs.mean(), stats.sem(logs))
    return math.exp(low), math.exp(high)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", help="the older revision, as git names it")
    parser.add_argument("head", nargs="?", default="HEAD", help="the newer one (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="pairs of measurements (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES), help="what to measure")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:  # in a process of one revision
        print(MEASURES[args.base](args.measure))
        return 0
    if args.rounds < 2:
        parser.error("--rounds: an interval takes at least 2")

    commits = {}
    for side in ("base", "head"):
        command = ["git", "rev-parse", "--verify", "--short", f"{getattr(args, side)}^{{commit}}"]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if found.returncode:
            parser.error(f"git knows no revision {getattr(args, side)!r}")
        commits[side] = found.stdout.strip()
    packages = {name: version(name) for name in ("torch", "gymnasium")}
    where = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    figures = {**commits, **where, **packages, "rounds": args.rounds}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trees = {side: prepare(commit, folder / side) for side, commit in commits.items()}
        figures["measures"] = measured(args.rounds, args.only, folder, trees)
    show(figures)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return int(any(row["interval"][1] < 1 for row in figures["measures"].values()))


if __name__ == "__main__":
    sys.exit(main())
