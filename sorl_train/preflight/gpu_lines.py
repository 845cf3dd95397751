"""The lines of ``gpu_check``, each in a process of its own: ``python -m sorl_train.preflight.gpu_lines LINE FOLDER``.

A line trains a model of Qwen2's sizes with random weights, made here, on a game of random words: nothing is downloaded.
Turns do not end by themselves, so that all trajectories are equally long. A reward for even numbers gives the groups
something to compare. A line returns what it found; what it raises is in its log, which ``gpu_check`` reads.
"""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import load_file

from sorl_env.bridges.session_env import Reply, seeded_examples, session_task
from sorl_env.errors import UserError, install_command
from sorl_env.task import Example, Limits, Task
from sorl_env.trajectory import StopReason
from sorl_train.config.files import load_config
from sorl_train.engine import LocalEngine
from sorl_train.learner.batch import Batch, Collected
from sorl_train.learner.mismatch import mismatch_limit
from sorl_train.models.forward import compute_dtype, pick_device
from sorl_train.models.policy import model_shape
from sorl_train.models.tiny import word_tokenizer
from sorl_train.openrlhf.engine_limits import check_versions
from sorl_train.preflight.memory import estimate_memory
from sorl_train.preflight.preflight import LIBRARIES
from sorl_train.run.display import Display
from sorl_train.run.files import read_jsonl
from sorl_train.run.folder import RunDir
from sorl_train.run.manifest import environment_facts
from sorl_train.run.stability import peak_rss
from sorl_train.train_rl import train

# width, width of the MLP, layers, heads; and with --tiny: vLLM on a CPU has no heads narrower than 32
SIZES = {"0.5B": (896, 4864, 24, 14), "1.5B": (1536, 8960, 28, 12)}
TINY = {"0.5B": (64, 128, 2, 2), "1.5B": (64, 128, 3, 2)}
RATE = 1e-2  # moves random weights far; a trust region takes back all but ``VISIBLE``
VISIBLE = 0.5  # limit of the KL: an update that a sampler with the old weights could not hide
TOLERANCE = 1.1  # measured memory over the plan's upper bound
KILLED_AFTER, STEPS = 5, 6
TO_US = "send gpu_check.json and the log to the project"

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Found:
    """What a line found: in words, what to do about it, and figures."""

    status: Literal["pass", "fail", "skipped"]
    detail: str
    fix: str = ""
    figures: Row = field(default_factory=dict)
    name: str = ""
    seconds: float = 0.0


class _Words:
    """A ``Session`` that replies with random words, and rewards the share of even numbers in a turn."""

    def __init__(self, words: int, length: int) -> None:
        self.words, self.length, self.draw = words, length, random.Random()

    def _text(self) -> str:
        return " ".join(f"w{self.draw.randrange(self.words)}" for _ in range(2 * self.length))

    async def reset(self, example: Example, seed: int) -> tuple[str, Example]:
        self.draw.seed(int(example.metadata["seed"]))
        return self._text(), example

    async def step(self, action: str) -> Reply:
        numbers = [int(number) for number in re.findall(r"w(\d+)", action)]
        return Reply(self._text(), sum(n % 2 == 0 for n in numbers) / max(len(numbers), 1) / 3)

    async def truncate(self, reason: StopReason) -> None: ...

    def close(self) -> None: ...


def TASK(words: int, length: int) -> Task:
    """Three turns of ``length`` random words, with twice as many in the prompt and in each reply."""
    name, tokens = "random_words", {"max_new_tokens": length, "max_trajectory_tokens": 9 * length}
    return session_task(
        name,
        "random words for gpu_check",
        Limits(max_turns=3, max_prompt_tokens=2 * length, max_observation_tokens=2 * length, **tokens),
        lambda: _Words(words, length),
        lambda split: seeded_examples(name, split, 1000),
        format="raw",
        stop=(),
        instruction="",
    )


class Place(NamedTuple):
    """Where lines keep models and runs, and whether they rehearse on a CPU."""

    folder: Path
    tiny: bool

    @property
    def device(self) -> str:
        """The setting ``hardware.device``."""
        return "cpu" if self.tiny else "cuda"

    def model(self, size: str, words: int) -> str:
        """The folder of a model of that size. It is a Llama: transformers gives a Qwen2 a tokenizer of its own."""
        from transformers import LlamaConfig, LlamaForCausalLM

        folder = self.folder / f"model-{size}"
        if folder.is_dir():
            return str(folder)
        hidden, inner, layers, heads = (TINY if self.tiny else SIZES)[size]
        tokenizer = word_tokenizer([" ".join(f"w{i}" for i in range(words))], 2048)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=2,
            attention_bias=True,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        torch.manual_seed(0)
        with torch.device(self.device):
            model = LlamaForCausalLM(config).to(torch.bfloat16)
        part = folder.with_suffix(".part")  # a process that is killed leaves no half of a model
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        part.rename(folder)
        return str(folder)

    def settings(self, size: str, **changes: Any) -> dict[str, Any]:
        """The settings of a run that differ from the config minihop's; ``a__b=1`` changes ``a.b``."""
        # with three other tokens as many words as Qwen2's vocabulary
        words, length, batch, micro = (500, 8, 16, 4) if self.tiny else (151_933, 128, 64, 8)
        given = {
            "algo": "so_grpo",
            "task": "sorl_train.preflight.gpu_lines:TASK",
            "task_args": {"words": words, "length": length},
            "model": self.model(size, words),
            "hardware.device": self.device,
            "hardware.gradient_checkpointing": True,
            "rollout.batch_size": batch,
            "rollout.group_size": 8,
            "update.mini_batch_size": batch // 2,
            "update.micro_batch_size": micro,
            "update.log_prob_micro_batch_size": micro,
            "update.steps": 3,
            "optim.lr": 1e-6,
            "optim.schedule": "constant",
            "eval.search_off": False,
            "eval.every": 0,
            "eval.num_examples_final": 1,
            "log.tensorboard": False,
        }
        return given | {name.replace("__", "."): value for name, value in changes.items()}


class Measured(LocalEngine):
    """A local engine that measures the memory of the two halves of a step, in bytes. It writes no checkpoint, which
    would be 18 GB of a model of 1.5B."""

    peaks: dict[str, int]

    def collect(self, step: int) -> Collected:
        with self._peak("sampling and scoring"):
            return super().collect(step)

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        with self._peak("updating"):
            return super().update(batch, step)

    def save(self) -> None: ...

    def save_best(self) -> None: ...

    @contextmanager
    def _peak(self, part: str) -> Iterator[None]:
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        yield
        here = torch.cuda.max_memory_allocated() if on_gpu else peak_rss()
        self.peaks[part] = max(self.peaks.get(part, 0), here)


def _rows(run: Path) -> list[Row]:
    """Metrics and timings of each training step."""
    timings = {line["step"]: line for line in read_jsonl(run / "timings.jsonl")}
    lines = [line for line in read_jsonl(run / "metrics.jsonl") if line["step"]]
    return [timings[line["step"]] | line for line in lines]


def _train(place: Place, name: str, settings: Row) -> tuple[Sequence[Row], Found]:
    """Train without checkpoints. Returns the steps, and what memory says: figures, and a failure where more was used
    than planned. No step is taken where the plan needs more than this GPU has."""
    config, device = load_config("minihop", settings), pick_device(place.device)
    engine = Measured(config, RunDir.create(place.folder / name, config), Display(sys.stderr), config.model)
    plan = estimate_memory(config, model_shape(config.model), engine.env.limits, device)
    besides = LIBRARIES
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        besides = int(config.sampler.gpu_memory * total) if config.sampler.backend == "vllm" else 0
        if (most := plan.total(plan.peak) + besides) > total:
            said = f"up to {most / 1e9:.0f} GB are needed, this GPU has {total / 1e9:.0f} GB"
            return [], Found("skipped", said, "take a larger GPU to see this line")
    engine.peaks = {}
    engine.recorder.display.start(name, config.update.steps)
    engine.load(None)
    with closing(engine.env), closing(engine.eval_env), closing(engine.recorder):
        train(engine, threading.Event())
    figures: dict[str, float] = {}
    over = ""
    for part, phases in (("sampling and scoring", ("sampling", "scoring")), ("updating", ("updating",))):
        measured, planned = engine.peaks[part], besides + max(map(plan.total, phases))
        figures |= {f"GB {part}": measured / 1e9, f"GB {part}, planned": planned / 1e9}
        if measured > TOLERANCE * planned:
            over = f"{part} took {measured / 1e9:.2f} GB, more than the {planned / 1e9:.2f} GB planned"
    return _rows(place.folder / name), Found("fail" if over else "pass", over, TO_US if over else "", figures)


def synchronized(rows: Sequence[Row], limit: float, memory: Found) -> Found:
    """Whether the sampler had the new weights after the first update. The engine ends a run with a mismatch above
    ``limit``; here an update has to go far enough that old weights would exceed it."""
    if not rows or memory.status == "fail":
        return memory
    before, after = (row["rollout/mismatch_mean"] for row in rows[:2])
    moved = math.sqrt(2 * rows[0]["loss/trust_kl"])
    figures = {"mismatch before an update": before, "mismatch after it": after, "limit": limit}
    figures |= {"the update moved log-probabilities by": moved, **memory.figures}
    if moved < 2 * limit:
        return Found("fail", f"the update moved too little to tell: {moved:.3g} nats", TO_US, figures)
    return Found("pass", f"{after:.2g} nats after an update of {moved:.2g}, limit {limit:g}", "", figures)


# -- the lines --------------------------------------------------------------------------------------------------------


def _machine(place: Place) -> Found:
    facts = environment_facts()
    figures: dict[str, Any] = {**facts["versions"], **facts["hardware"], "git": facts["git"]}
    if place.tiny:
        return Found("pass", "a rehearsal on a CPU", "", figures)
    if not torch.cuda.is_available():
        fix = "nvidia-smi has to list the GPU; then install torch for CUDA and a driver for it (docs/scaling_out.md)"
        return Found("fail", f"torch {torch.__version__} sees no GPU", fix, figures)
    free, total = torch.cuda.mem_get_info()
    figures |= {"cuda": torch.version.cuda, "GB of the GPU": total / 1e9, "GB free": free / 1e9}
    if free < 0.9 * total:
        fix = "end the other processes that nvidia-smi lists, or choose another GPU with CUDA_VISIBLE_DEVICES"
        return Found("fail", f"{free / 1e9:.0f} of {total / 1e9:.0f} GB are free", fix, figures)
    return Found("pass", f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}", "", figures)


def _tests(place: Place) -> Found:
    folder = Path(__file__).resolve().parents[2] / "tests/train"
    files = [path for path in sorted(folder.rglob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    if not files or not find_spec("pytest"):
        missing = "pytest" if files else "the tests, which only a clone has"
        return Found("skipped", f"without {missing}", "git clone the project, and make gpu-check there")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", *map(str, files)]
    done = subprocess.run(command, cwd=folder.parents[1], stdout=subprocess.PIPE, text=True, check=False)
    sys.stdout.write(done.stdout)
    said = done.stdout.strip().splitlines()[-1].strip("= ")
    if done.returncode:
        return Found("fail", said, TO_US)
    return Found("pass" if "passed" in said else "skipped", said)


def _sampler(place: Place, backend: str, **changes: Any) -> Found:
    if backend == "vllm" and not find_spec("vllm"):
        return Found("skipped", "vLLM is not installed", install_command("vllm"))
    far = {"optim__lr": RATE, "update__trust_kl": VISIBLE, "update__steps": 2}
    settings = place.settings("0.5B", sampler__backend=backend, **far, **changes)
    rows, memory = _train(place, backend, settings)
    dtype = compute_dtype("auto", pick_device(place.device))
    served = backend == "vllm"
    return synchronized(
        rows, mismatch_limit(load_config("minihop", settings).sampler, dtype, served=served), memory
    )


def _trust_region(place: Place) -> Found:
    limit = 0.01
    rows, memory = _train(place, "trust", place.settings("0.5B", optim__lr=10 * RATE, update__trust_kl=limit))
    if not rows:
        return memory
    moves, kls = sum(row["loss/trust_moves_back"] for row in rows), [row["loss/trust_kl"] for row in rows]
    figures = {"moves back": moves, "KL after each step": kls, "scale": rows[-1]["loss/trust_scale"]}
    good = moves and 0 < max(kls) <= limit
    detail = f"{moves:.0f} moves back, KL at most {max(kls):.2g} of {limit:g}"
    return Found("pass" if good else "fail", detail, "" if good else TO_US, figures)


def _speed(place: Place, size: str) -> Found:
    from torch.utils.benchmark import Timer

    backend, device = "vllm" if find_spec("vllm") else "transformers", pick_device(place.device)
    settings = place.settings(size, sampler__backend=backend)
    rows, memory = _train(place, f"speed-{size}", settings)
    if not rows:
        return memory
    last, shape, batch = rows[-1], model_shape(settings["model"]), settings["rollout.batch_size"]
    tokens, actions = (batch * last[f"rollout/{name}_tokens"] for name in ("trajectory", "response"))
    output = shape.vocabulary * shape.hidden  # which only the policy's own tokens pass
    done = 6 * ((shape.parameters - output) * tokens + output * actions) / last["time/update_s"]
    n = 512 if place.tiny else 8192
    square = torch.randn(n, n, device=device, dtype=compute_dtype("auto", device))
    peak = 2 * n**3 / Timer("square @ square", globals={"square": square}).timeit(20).mean
    sampled, updated = last["time/rollout_tokens_per_s"], tokens / last["time/update_s"]
    figures = {"sampler": backend, "rollout tokens/s": sampled, "update tokens/s": updated}
    figures |= {"update TFLOP/s": done / 1e12, "matrix product TFLOP/s": peak / 1e12, "MFU": done / peak}
    figures |= {f"{name} s": last[f"time/{name}_s"] for name in ("rollout", "log_probs", "update")}
    detail = f"{backend} {sampled:,.0f} tokens/s, updates {updated:,.0f} tokens/s, MFU {done / peak:.0%}"
    return Found(memory.status, memory.detail or detail, memory.fix, {**figures, **memory.figures})


def _command(run: Path, settings: Row | None) -> list[str]:
    """``sorl-train``; without settings it resumes."""
    words = ["--resume"] if settings is None else ["--config", "minihop"]
    for name, value in (settings or {}).items():
        words += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    return [sys.executable, "-m", "sorl_train.cli", "--run_dir", str(run), *words]


def _resume(place: Place) -> Found:
    small = Place(place.folder / "small", tiny=True)  # and so are its checkpoints
    settings = small.settings("0.5B", algo="so_ppo", optim__lr=RATE, update__trust_kl=0.01)
    settings |= {"hardware.device": place.device, "update.steps": STEPS, "checkpoint.every": 1}
    whole, killed = (RunDir(place.folder / name) for name in ("whole", "killed"))
    subprocess.run(_command(whole.path, settings), check=True)
    process = subprocess.Popen(_command(killed.path, settings))
    while not (killed.checkpoints / f"step_{KILLED_AFTER:06d}").is_dir() and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    if process.wait() >= 0:
        return Found("fail", f"the run ended by itself with status {process.returncode}", TO_US)
    subprocess.run(_command(killed.path, None), check=True)
    files = [run.checkpoints / f"step_{STEPS:06d}/policy/model.safetensors" for run in (whole, killed)]
    first, one, other = (load_file(file) for file in (Path(settings["model"], "model.safetensors"), *files))
    gap, way = (
        math.sqrt(sum(float((one[n].double() - to[n].double()).square().sum()) for n in one))
        for to in (other, first)
    )
    equal = gap == 0 and whole.metrics.read_bytes() == killed.metrics.read_bytes()
    # Sums on a GPU are not reproducible. A last step in another direction leaves .6 of the way, lost weights .9.
    good = equal or (not place.tiny and gap < 0.75 * way)
    detail = "equal to the byte" if equal else f"off by {gap / way:.2%} of the way that the weights went"
    return Found("pass" if good else "fail", detail, "" if good else TO_US, {"gap": gap, "way": way})


def _openrlhf(place: Place) -> Found:
    try:
        check_versions()
    except UserError as error:
        return Found("skipped", str(error).splitlines()[1].strip(" -"), install_command("openrlhf"))
    far = {"optim__lr": 2 * RATE, "update__trust_kl": VISIBLE, "update__steps": 2}
    settings = place.settings("0.5B", algo="so_ppo", engine="openrlhf", **far)
    settings |= {f"cluster.{name}": 1 for name in ("gpus_per_node", "vllm_engines", "vllm_tensor_parallel")}
    settings |= {"cluster.zero_stage": 2, "cluster.vllm_memory": 0.3}
    run = place.folder / "openrlhf"
    subprocess.run(_command(run, settings), check=True)
    rows, limit = _rows(run), mismatch_limit(load_config("minihop").sampler, torch.bfloat16, served=True)
    names = ("rollout_tokens_per_s", "rollout_s", "log_probs_s", "update_s", "broadcast_s")
    return synchronized(rows, limit, Found("pass", "", "", {n: rows[-1].get(f"time/{n}") for n in names}))


class Line(NamedTuple):
    """One check: the most seconds that it may take, what it is, and the function."""

    seconds: int
    about: str
    run: Callable[[Place], Found]


_SPEED = (
    "Speed and memory of a model of {}. MFU is of a matrix product's FLOP/s here, without attention's own."
)
LINES = {
    "machine": Line(60, "Versions and hardware.", _machine),
    "tests": Line(120, "pytest -m gpu, in a clone.", _tests),
    "transformers": Line(
        180,
        "SO-PPO with critic and reference: mismatch of sampler and trainer after an update.",
        partial(_sampler, backend="transformers", algo="so_ppo", loss__kl_coef=0.001),
    ),
    "vllm": Line(300, "The same with vLLM as sampler, and SO-GRPO.", partial(_sampler, backend="vllm")),
    "trust region": Line(
        180, "At ten times the rate weights move back, and the KL stays low.", _trust_region
    ),
    "speed 0.5B": Line(240, _SPEED.format("0.5B"), partial(_speed, size="0.5B")),
    "speed 1.5B": Line(300, _SPEED.format("1.5B"), partial(_speed, size="1.5B")),
    "kill and resume": Line(
        180,
        "A run that is killed and resumed, beside one that is not: the same on a CPU, near it on a GPU.",
        _resume,
    ),
    "openrlhf": Line(
        420, "SO-PPO on OpenRLHF with ZeRO-2 and vLLM on one GPU: mismatch after an update.", _openrlhf
    ),
}


def main() -> None:
    """Run one line, and write what it found to ``FOLDER/LINE.json``."""
    name, folder, *rest = sys.argv[1:]
    found = LINES[name].run(Place(Path(folder), tiny=bool(rest)))
    Path(folder, f"{name}.json").write_text(json.dumps(vars(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
