"""The checks of ``sorl-doctor``. Each looks at one thing and says what it found; none changes anything."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement

from sorl_env.data import load_examples
from sorl_env.errors import UserError
from sorl_env.registry import load_task
from sorl_tools.corpus import cache_dir
from sorl_train.cold_start import TINY
from sorl_train.config import CRITIC_ALGOS, TrainConfig
from sorl_train.doctor_finding import Check, Finding, Run
from sorl_train.doctor_search import check_corpus, check_index, check_server
from sorl_train.environments import limits
from sorl_train.memory import estimate_memory, gigabytes
from sorl_train.models import compute_dtype, load_tokenizer, pick_device
from sorl_train.plan import model_shape

LIBRARIES = 1_500_000_000  # bytes that the interpreter, torch and transformers take themselves


def examine(config: TrainConfig, index: Path | None = None) -> Iterator[Finding]:
    """All findings, in order. ``index`` is the folder that the server at ``search.url`` should hold."""
    run = Run(config, index)
    checks: dict[str, tuple[Check, str]] = {
        "versions": (_versions, ""),
        "data": (_data, "correct --task, --data, --eval_data or --split"),
        "model": (
            _model,
            "give --model a transformers folder (config.json, tokenizer, weights) or a hub name",
        ),
        "memory": (_memory, "correct hardware.device"),
        "disk": (_disk, ""),
        "corpus": (check_corpus, "correct --search.corpus"),
        "index": (check_index, "correct --index"),
        "server": (check_server, "correct --search.url"),
    }
    for name, (check, move) in checks.items():
        try:
            yield from check(run)
        except UserError as error:
            yield Finding(name, "fail", str(error), move)


def _versions(run: Run) -> Iterator[Finding]:
    """Python and the packages that this run needs, against what the project asks for."""
    try:
        wanted = [Requirement(text) for text in metadata.requires("sorl") or []]
    except metadata.PackageNotFoundError:
        yield Finding("versions", "warn", "sorl is not installed as a package", "pip install -e '.[train]'")
        return
    extras = ["", "train"] + (["openrlhf"] if run.config.engine == "openrlhf" else [])
    bad = []
    for requirement in wanted:
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras):
            continue
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            bad.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            bad.append(f"{requirement.name} is {found}, wanted {requirement.specifier}")
    if bad:
        extra = "openrlhf" if run.config.engine == "openrlhf" else "train"
        yield Finding("versions", "fail", "; ".join(bad), f"pip install -U 'sorl[{extra}]'")
    else:
        python = ".".join(map(str, sys.version_info[:3]))
        versions = f"torch {torch.__version__}, transformers {metadata.version('transformers')}"
        yield Finding("versions", "ok", f"Python {python}, {versions}")


def _data(run: Run) -> Iterator[Finding]:
    """The task, and every row of its data."""
    config = run.config
    task = load_task(config.task, **config.task_args)
    run.limits = limits(task, config.limits)
    for name, source, split in (
        ("data", config.data, config.split),
        ("eval data", config.eval_data or config.data, config.eval.split),
    ):
        examples = load_examples(task, source, split)
        detail = f"{len(examples.examples):,} examples of {examples.source}, split {split}"
        if examples.is_sample:
            yield Finding(
                name, "warn", f"{detail}: the task's embedded sample, not the benchmark", "give --data"
            )
        else:
            yield Finding(name, "ok", detail)


def _model(run: Run) -> Iterator[Finding]:
    """The model's configuration and tokenizer, without its weights."""
    model = run.config.model
    if model == TINY:
        yield Finding("model", "ok", "tiny, built for the task when the run starts")
        return
    run.shape = model_shape(model, run.config.hardware.lora_rank)
    load_tokenizer(model)
    folder = Path(model)
    if folder.is_dir() and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        yield Finding(
            "model",
            "fail",
            f"{folder} holds no weights",
            "copy its *.safetensors there, or name another --model",
        )
        return
    yield Finding("model", "ok", f"{model}: {run.shape.parameters:,} parameters")


def _memory(run: Run) -> Iterator[Finding]:
    """The upper bound of --dry_run against what is free."""
    config = run.config
    if run.shape is None or run.limits is None or config.engine != "local":
        free = _free_memory()
        yield Finding("memory", "ok", f"{gigabytes(free)} free" if free else "not known on this system")
        return
    device = pick_device(config.hardware.device)
    need = estimate_memory(
        config, run.shape, run.limits, compute_dtype(config.hardware, device).itemsize
    ).peak
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if config.sampler.backend == "vllm":
            free = int(free * (1 - config.sampler.gpu_memory))
        yield _fits("GPU memory", need, free)
        need = (
            2 * 4 * run.shape.parameters
        )  # weights on their way to the GPU, and a checkpoint on its way to disk
    yield _fits("memory", need + LIBRARIES, _free_memory())


def _fits(name: str, need: int, free: int | None) -> Finding:
    if free is None:
        return Finding(name, "warn", f"up to {gigabytes(need)} needed; what is free is not known here")
    detail = f"up to {gigabytes(need)} needed, {gigabytes(free)} free"
    if need <= free:
        return Finding(name, "ok", detail)
    move = (
        "sorl-train --dry_run shows what takes it; smaller: sampler.max_concurrency, update.micro_batch_size, "
        "limits.max_trajectory_tokens, hardware.lora_rank, hardware.gradient_checkpointing"
    )
    return Finding(
        name, "fail" if need > 1.5 * free else "warn", detail, move
    )  # the estimate is an upper bound


def _free_memory() -> int | None:
    """Bytes that can be had without swapping, in this container if there is one."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
        return free if limit == "max" else min(free, int(limit) - int(used))
    except (OSError, ValueError):
        return free


def _disk(run: Run) -> Iterator[Finding]:
    """Room for checkpoints where the run goes, and a cache folder that can be written."""
    config = run.config
    folder = _existing(Path(config.run_dir or "runs").absolute())
    need = 100_000_000  # trajectories, metrics, the report
    if run.shape is not None:
        critic = run.shape.backbone_parameters if config.algo in CRITIC_ALGOS else 0
        one = 4 * (run.shape.parameters + critic) + 8 * (run.shape.trained + critic)
        need += one * (config.checkpoint.keep + 2)  # the best one besides, and one that is being written
    free = shutil.disk_usage(folder).free
    detail = f"up to {gigabytes(need)} for checkpoints, {gigabytes(free)} free at {folder}"
    if not os.access(folder, os.W_OK):
        yield Finding("disk", "fail", f"{folder} cannot be written", "give another --run_dir")
    elif free < need:
        yield Finding("disk", "fail", detail, "give a --run_dir on a larger disk, or lower checkpoint.keep")
    else:
        yield Finding("disk", "ok", detail)
    cache = _existing(cache_dir().absolute())
    try:
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        yield Finding("cache", "fail", f"{cache}: {error}", "set SORL_CACHE to a folder that can be written")


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    while not path.is_dir():
        path = path.parent
    return path
