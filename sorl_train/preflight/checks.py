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
from safetensors import SafetensorError, safe_open

from sorl_env.data import load_examples
from sorl_env.errors import UserError
from sorl_env.folders import cache_folder
from sorl_env.registry import load_task
from sorl_train.config.checks import check_tiny
from sorl_train.config.settings import CRITIC_ALGOS, TINY, TrainConfig
from sorl_train.models.forward import compute_dtype, pick_device
from sorl_train.models.policy import load_tokenizer
from sorl_train.models.shape import model_shape
from sorl_train.preflight.finding import Check, Finding, Run, existing
from sorl_train.preflight.memory import estimate_memory, gigabytes
from sorl_train.preflight.search_checks import (
    check_corpus,
    check_index,
    check_replies,
    check_server,
    check_tools,
)
from sorl_train.rollout.environments import limits
from sorl_train.run.folder import RunDir

LIBRARIES = 1_500_000_000  # bytes that the interpreter, torch and transformers take themselves


def examine(config: TrainConfig, index: Path | None = None, *, new: bool = True) -> Iterator[Finding]:
    """All findings, in order.

    Args:
        index: the folder that the server at ``search.url`` should hold.
        new: the run begins a folder of its own, in which no other run may be.
    """
    run = Run(config, index, new=new)
    checks: dict[str, tuple[Check, str]] = {
        "versions": (_versions, ""),
        "task": (_task, "correct --task or --task_args"),
        "data": (_data, ""),
        "model": (
            _model,
            "give --model a transformers folder (config.json, tokenizer, weights), or a name on the Hugging Face hub "
            "where that can be reached",
        ),
        "memory": (_memory, "correct hardware.device"),
        "disk": (_disk, ""),
        "corpus": (check_corpus, "correct --search.corpus"),
        "index": (check_index, "correct --index"),
        "server": (check_server, "correct --search.url"),
        "search": (check_tools, ""),
        "replies": (check_replies, "correct --search.cache"),
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


def _task(run: Run) -> Iterator[Finding]:
    """The task, on which other checks build; it is worth a line only where it fails."""
    run.task = load_task(run.config.task, **run.config.task_args)
    run.limits = limits(run.task, run.config.limits)
    yield from ()


def _data(run: Run) -> Iterator[Finding]:
    """Every row of training and evaluation."""
    config = run.config
    if run.task is None:
        return
    sources = (
        ("data", "--data", config.data, config.split),
        ("eval data", "--eval_data", config.eval_data or config.data, config.eval.split),
    )
    hub = " (hf: is the benchmark on the hub)" if run.task.hub is not None else ""
    hashes: list[str] = []
    for name, option, source, split in sources:
        try:
            examples = load_examples(run.task, source, split)
        except UserError as error:
            yield Finding(
                name, "fail", str(error), f"correct {option} or the file it names, --task or the split"
            )
            if source == sources[1][2]:
                return  # evaluation would say the same again
            continue
        where = f"split {split} of {'the task' if source is None else examples.source}"
        detail = f"{len(examples.examples):,} examples, {where}"
        hashes.append(examples.sha256)
        if examples.is_sample:
            detail += ": its embedded sample, not the benchmark"
            yield Finding(name, "warn", detail, f"give {option} a file or a folder{hub}")
        elif len(hashes) > len(set(hashes)):
            detail += ": these are the training questions, too"
            yield Finding(
                name, "warn", detail, "give --eval_data, or --data a folder with a file for each split"
            )
        else:
            yield Finding(name, "ok", detail)


def _model(run: Run) -> Iterator[Finding]:
    """The model's configuration and tokenizer; of its weights, whether the files are whole."""
    model = run.config.model
    if model == TINY:
        check_tiny(run.config.hardware.tiny)
    if model == TINY and run.task is not None and None in (run.task.vocabulary, run.task.expert):
        detail = f"tiny is built from a task's vocabulary and expert, which {run.task.name} does not have"
        yield Finding("model", "fail", detail, "give --model a transformers folder or a hub name")
        return
    if model == TINY:
        yield Finding("model", "ok", "tiny, built for the task when the run starts")
        return
    folder = Path(model)
    run.shape = model_shape(model, run.config.hardware.lora_rank)
    try:
        load_tokenizer(model)
    except UserError as error:
        move = "copy the model's tokenizer.json and tokenizer_config.json there, or name another --model"
        yield Finding("model", "fail", str(error), move)
        return
    if folder.is_dir() and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        yield Finding(
            "model",
            "fail",
            f"{folder} holds no weights",
            "copy its *.safetensors there, or name another --model",
        )
        return
    for file in sorted(folder.glob("*.safetensors")):
        if (damage := _damage(file)) is not None:
            yield Finding("model", "fail", f"{file}: {damage}", "copy it again, or name another --model")
            return
    yield Finding("model", "ok", f"{model}: {run.shape.parameters:,} parameters")


def _damage(file: Path) -> str | None:
    """What is wrong with a file of weights, as far as its header and its size tell; None where it is whole."""
    try:
        with safe_open(file, "pt"):
            return None
    except (OSError, SafetensorError) as error:
        return f"not a whole safetensors file ({error})"


def _memory(run: Run) -> Iterator[Finding]:
    """The upper bound of --dry_run against what is free."""
    config = run.config
    device = pick_device(config.hardware.device) if config.engine == "local" else torch.device("cpu")
    if run.shape is None or run.limits is None or config.engine != "local":
        free = _free_memory()
        detail = f"{gigabytes(free)} free" if free else "what is free is not known on this system"
        if config.model == TINY:
            yield Finding("memory", "ok", f"{detail}; the tiny policy needs little more than torch itself")
        elif config.engine != "local":
            yield Finding("memory", "ok", f"{detail} here; sorl-train --dry_run tells what each GPU needs")
        return  # without a model or a task there is nothing to compare, and that has been said
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
    if config.run_dir is not None and run.new:
        try:
            RunDir(Path(config.run_dir)).check_free()
        except UserError as error:
            yield Finding("run folder", "fail", str(error), "give another --run_dir")
            return
    folder = existing(Path(config.run_dir or "runs").absolute())
    need = 100_000_000  # trajectories, metrics, the report
    if run.shape is not None:
        critic = run.shape.backbone_parameters if config.algo in CRITIC_ALGOS else 0
        one = 4 * (run.shape.parameters + critic) + 8 * (run.shape.trained + critic)
        need += one * (config.checkpoint.keep + 2)  # the best one besides, and one that is being written
    free = shutil.disk_usage(folder).free
    detail = f"{gigabytes(free)} free at {folder}"
    if run.shape is not None or config.model == TINY:
        detail = f"up to {gigabytes(need)} for checkpoints, {detail}"
    if (problem := _not_writable(Path(config.run_dir or "runs").absolute())) is not None:
        yield Finding("disk", "fail", problem, "give another --run_dir")
    elif free < need:
        yield Finding("disk", "fail", detail, "give a --run_dir on a larger disk, or lower checkpoint.keep")
    else:
        yield Finding("disk", "ok", detail)
    if (problem := _not_writable(cache_folder().absolute())) is not None:
        yield Finding("cache", "fail", problem, "set SORL_CACHE to a folder that can be written")


def _not_writable(folder: Path) -> str | None:
    """Why nothing can be written to a folder that may not exist yet; None where it can."""
    file = next((part for part in (folder, *folder.parents) if part.exists() and not part.is_dir()), None)
    if file is not None:
        return f"{folder}: {file} is no folder"
    if not os.access(existing(folder), os.W_OK | os.X_OK):
        return f"{existing(folder)} cannot be written"
    try:
        with tempfile.TemporaryFile(dir=existing(folder)):
            return None
    except OSError as error:
        return f"{existing(folder)} cannot be written ({error})"
