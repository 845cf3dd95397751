"""A simulation of OpenRLHF's pipeline: throughput and staleness, synchronous, one step off and fully asynchronous.

Engines, seats, the retriever, the queue of batches, its slots and the lock of the weights are as OpenRLHF 0.11.2 has
them (``ppo_trainer_async.py``). Trajectories have the lengths of a recorded run. Times come from the roofline of
``sorl_train/preflight/duration.py``, or from a recorded run that the simulation is compared with.

    python benchmarks/pipeline.py lengths EVALUATION/results.jsonl --model FOLDER --out docs/scaling/lengths.json
    python benchmarks/pipeline.py plan docs/scaling/lengths.json --longer --json docs/scaling/pipeline.jsonl
    python benchmarks/pipeline.py compare RUN # an asynchronous run: its later half beside a simulation with its earlier
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import simpy
import yaml

from sorl_train.preflight.duration import ASSUMED, GPUS, SEATS
from sorl_train.run.files import read_jsonl

CHUNK = 32  # tokens that are decoded at the speed of one moment
Turns = Sequence[tuple[int, int]]  # of each turn, tokens read (prompt or observation) and tokens written
Process = Generator[simpy.Event, Any, Any]


class Costs(NamedTuple):
    """Seconds."""

    read: float  # a token of a prompt or an observation, in an engine
    step: float  # of decoding, however many trajectories are in an engine
    seat: float  # more for each of them
    tool: float  # a call
    train: float  # a token of a trajectory: scoring and update
    batch: float  # more for each batch: optimizer, Ray, metrics
    weights: float  # to the engines


class Layout(NamedTuple):
    """``queue`` is 0 for a synchronous run, else OpenRLHF's ``async_queue_size``; ``partial``: sampling goes on while
    weights arrive. ``calls`` is how many the retriever answers at once."""

    engines: int
    batch: int
    queue: int = 0
    partial: bool = False
    calls: int = 1_000_000
    seats: int = SEATS


@dataclass
class Pipeline:
    """One run. ``ends`` are the seconds at which training steps end, ``staleness`` has the mean over turns of each."""

    layout: Layout
    costs: Costs
    lengths: Sequence[Turns]
    seed: int = 0
    env: simpy.Environment = field(default_factory=simpy.Environment)
    version: int = 0
    ends: list[float] = field(default_factory=list)
    staleness: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)  # of the trainer, for a batch
    sampling: list[float] = field(default_factory=list)  # a batch

    def run(self, steps: int) -> Pipeline:
        """Simulate the run up to the end of training step ``steps``."""
        env, layout = self.env, self.layout
        self._engines = [simpy.Resource(env, layout.seats) for _ in range(layout.engines)]
        self._retriever = simpy.Resource(env, layout.calls)
        self._queue = simpy.Store(env)
        self._slots = simpy.Store(env)
        self._slots.items += [None] * max(1, layout.queue)
        self._lock = simpy.Resource(env)
        self._resumed: simpy.Event | None = None
        self._rng = random.Random(self.seed)
        env.process(self._generate())
        env.run(env.process(self._train(steps)))
        return self

    def _generate(self) -> Process:
        while True:
            yield self._slots.get()
            held = None if self.layout.partial else self._lock.request()
            if held:
                yield held
            began = self.env.now
            drawn = self._rng.choices(self.lengths, k=self.layout.batch)
            engines = itertools.cycle(self._engines)
            playing = [self.env.process(self._play(turns, next(engines))) for turns in drawn]
            done = yield simpy.AllOf(self.env, playing)
            self.sampling.append(self.env.now - began)
            if held:
                self._lock.release(held)
            yield self._queue.put(list(done.values()))

    def _play(self, turns: Turns, engine: simpy.Resource) -> Process:
        """A trajectory: returns its tokens, and the versions of the weights that its turns began with."""
        versions = []
        for number, (read, written) in enumerate(turns):
            if number:
                with self._retriever.request() as call:
                    yield call
                    yield self.env.timeout(self.costs.tool)
            with engine.request() as seat:
                yield seat
                yield self.env.timeout(read * self.costs.read)
                versions.append(self.version)
                for start in range(0, written, CHUNK):
                    if self._resumed:
                        yield self._resumed
                    tokens = min(CHUNK, written - start)
                    yield self.env.timeout(tokens * (self.costs.step + self.costs.seat * engine.count))
        return sum(map(sum, turns)), versions

    def _train(self, steps: int) -> Process:
        for _ in range(steps):
            asked = self.env.now
            batch = yield self._queue.get()
            self.waits.append(self.env.now - asked)
            if self.layout.queue:  # the next batch is sampled meanwhile
                yield self._slots.put(None)
            ages = [self.version - version for _, versions in batch for version in versions]
            tokens = sum(size for size, _ in batch)
            yield self.env.timeout(self.costs.batch + self.costs.train * tokens)
            with self._lock.request() as held:
                yield held
                if self.layout.partial:
                    self._resumed = self.env.event()
                yield self.env.timeout(self.costs.weights)
                self.version += 1
                if self._resumed:
                    self._resumed.succeed()
                    self._resumed = None
            self.staleness.append(statistics.fmean(ages))
            self.ends.append(self.env.now)
            if not self.layout.queue:
                yield self._slots.put(None)

    def figures(self) -> dict[str, float]:
        """Means over the later half of the steps."""
        half = len(self.ends) // 2
        step = (self.ends[-1] - self.ends[half - 1]) / (len(self.ends) - half)
        return {
            "step_s": step,
            "trajectories_per_s": self.layout.batch / step,
            "staleness": statistics.fmean(self.staleness[half:]),
            "trainer_waits": statistics.fmean(self.waits[half:]) / step,
        }


# --- plan: the 7B run of the paper on H100 ---

PARAMETERS, LAYERS, WIDTH, KEY_VALUE = 7.6e9, 28, 3584, 512  # Qwen2.5-7B
GPUS_OF = (8, 64, 512)
CALLS = (1_000_000, 256)
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "one step off": {"queue": 1},
    "fully asynchronous": {"queue": 2, "partial": True},
}


def roofline(lengths: Sequence[Turns], trainers: int) -> Costs:
    """The expected column of ``duration.py``, for ``trainers`` GPUs that train and engines of one GPU."""
    gpu, given = GPUS["H100"], {name: values[1] for name, values in ASSUMED.items()}
    tokens = statistics.fmean(sum(map(sum, turns)) for turns in lengths)
    forward = 2 * PARAMETERS + 2 * LAYERS * WIDTH * tokens
    bandwidth = gpu.bandwidth * given["decode_bandwidth"]
    return Costs(
        read=forward / gpu.flops / given["mfu_prefill"],
        step=given["decode_step_s"] + 2 * PARAMETERS / bandwidth,
        seat=tokens / 2 * 4 * LAYERS * KEY_VALUE / bandwidth,
        tool=given["tool_s"],
        # policy and critic: scored once, trained with recomputed activations
        train=2 * (1 / given["mfu_score"] + 4 / given["mfu_update"]) * forward / gpu.flops / trainers,
        batch=given["other_s"],
        weights=2 * PARAMETERS / given["link_gb_s"] / 1e9,
    )


def longer(lengths: Sequence[Turns], most: int = 500) -> list[Turns]:
    """The same questions with ten times the tokens, spread as those of models that think (lognormal, sigma .8)."""
    rng = random.Random(0)
    return [
        [(read, min(most, round(10 * written * rng.lognormvariate(-0.32, 0.8)))) for read, written in turns]
        for turns in lengths
    ]


def plan(lengths: Sequence[Turns], per_gpu: int, steps: int) -> list[dict[str, Any]]:
    """A row for each number of GPUs, mode and retriever; an asynchronous run samples on the share of the GPUs that is
    best for it."""
    rows = []
    for gpus, (mode, settings), calls in itertools.product(GPUS_OF, MODES.items(), CALLS):
        found: list[dict[str, Any]] = []
        for eighths in (8,) if mode == "synchronous" else (1, 2, 3, 4):
            engines = gpus * eighths // 8
            trainers = gpus if mode == "synchronous" else gpus - engines
            layout = Layout(engines, per_gpu * gpus, calls=calls, **settings)
            figures = Pipeline(layout, roofline(lengths, trainers), lengths).run(steps).figures()
            found.append({"gpus": gpus, "mode": mode, "calls": calls, "engines": engines, **figures})
        rows.append(max(found, key=lambda row: row["trajectories_per_s"]))
        print(json.dumps(rows[-1]), flush=True)
    return rows


# --- lengths, and a recorded run beside its simulation ---


def recorded_lengths(rows: Sequence[dict[str, Any]], model: str) -> list[Turns]:
    """Of trajectories that ``sorl-eval`` or a training step wrote; ``model`` is the folder of the tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def count(text: str | None) -> int:
        return len(tokenizer.encode(text or "", add_special_tokens=False))

    lengths: list[Turns] = []
    for row in rows:
        read, turns = count(row["prompt"]), []
        for turn in row["turns"]:
            turns.append((read, count(turn["text"])))
            read = count(turn["observation"])
        lengths.append(turns)
    return lengths


def compare(run: Path) -> dict[str, dict[str, float]]:
    """Times of the earlier half of an asynchronous run, put into a simulation; its later half beside what comes out."""
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    steps = {row["step"]: row for row in read_jsonl(run / "timings.jsonl")}
    rows = [steps[row["step"]] | row for row in read_jsonl(run / "metrics.jsonl") if row["step"] > 1]
    earlier, later = rows[: len(rows) // 2], rows[len(rows) // 2 :]

    def mean(part: Sequence[dict[str, Any]], name: str) -> float:
        return statistics.fmean(row[name] for row in part)

    written = [row for path in (run / "trajectories").glob("step_*.jsonl") for row in read_jsonl(path)]
    lengths = recorded_lengths(written, str(run / "checkpoints" / "best" / "policy"))
    tokens = statistics.fmean(sum(map(sum, turns)) for turns in lengths)
    batch = config["rollout"]["batch_size"]
    trained = mean(earlier, "time/log_probs_s") + mean(earlier, "time/update_s")
    layout = Layout(
        config["cluster"]["vllm_engines"],
        batch,
        max(1, config["rollout"]["max_staleness"]),
        config["cluster"]["partial_rollout"],
    )

    def simulated(step: float) -> Pipeline:
        costs = Costs(0.0, step, 0.0, 0.0, trained / batch / tokens, 0.0, mean(earlier, "time/broadcast_s"))
        return Pipeline(layout, costs, lengths).run(40)

    # seconds of a decoding step, such that a batch takes as long as it took
    low, high = 0.0, mean(earlier, "time/rollout_s")
    for _ in range(30):
        middle = (low + high) / 2
        if statistics.fmean(simulated(middle).sampling[1:]) < mean(earlier, "time/rollout_s"):
            low = middle
        else:
            high = middle
    found = simulated(high).figures()
    recorded = {
        "step_s": statistics.fmean(row["time/step_s"] - row.get("time/eval_s", 0.0) for row in later),
        "staleness": mean(later, "rollout/staleness"),
    }
    return {"recorded": recorded, "simulated": {name: found[name] for name in recorded}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    reading = commands.add_parser("lengths", help="lengths of recorded trajectories")
    reading.add_argument("trajectories", type=Path, help="results.jsonl of sorl-eval")
    reading.add_argument("--model", required=True, help="the folder of its tokenizer")
    reading.add_argument("--out", type=Path, required=True)
    planning = commands.add_parser("plan", help="8, 64 and 512 H100 with the paper's 7B")
    planning.add_argument("lengths", type=Path)
    planning.add_argument(
        "--per_gpu", type=int, default=32, help="trajectories of a batch for each GPU (default: 32)"
    )
    planning.add_argument("--steps", type=int, default=6, help="training steps (default: 6)")
    planning.add_argument("--longer", action="store_true", help="ten times the tokens, with a long tail")
    planning.add_argument("--json", type=Path)
    comparing = commands.add_parser("compare", help="a recorded asynchronous run beside its simulation")
    comparing.add_argument("run", type=Path)
    args = parser.parse_args()
    if args.command == "lengths":
        lengths = recorded_lengths(read_jsonl(args.trajectories), args.model)
        args.out.write_text(json.dumps(lengths) + "\n", encoding="utf-8")
    elif args.command == "compare":
        print(json.dumps(compare(args.run), indent=1))
    else:
        lengths = json.loads(args.lengths.read_text(encoding="utf-8"))
        rows = plan(longer(lengths) if args.longer else lengths, args.per_gpu, args.steps)
        if args.json:
            args.json.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
