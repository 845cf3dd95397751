"""The checks of ``sorl-doctor``. Each examines one thing and yields what it finds; none changes anything."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement
from safetensors import SafetensorError, safe_open

from sorl_env.data import load_examples
from sorl_env.errors import UserError
from sorl_env.folders import cache_folder
from sorl_env.prompt_tokens import check_prompts
from sorl_env.registry import load_task
from sorl_train.config.settings import TINY, TrainConfig
from sorl_train.models.forward import compute_dtype, pick_device
from sorl_train.models.policy import load_tokenizer
from sorl_train.models.shape import model_shape
from sorl_train.openrlhf.checks import check_model
from sorl_train.preflight.dry_run import model_folder
from sorl_train.preflight.finding import Check, Finding, Run, existing
from sorl_train.preflight.inputs import check_settings, repeats
from sorl_train.preflight.memory import estimate_memory, gigabytes
from sorl_train.preflight.search_checks import (
    UNASKED,
    check_corpus,
    check_index,
    check_replies,
    check_server,
    check_tools,
)
from sorl_train.rollout.environments import limits, make_env
from sorl_train.run.folder import RunDir

LIBRARIES = 1_500_000_000  # bytes that the interpreter, torch and transformers need themselves


def examine(config: TrainConfig, index: Path | None = None, *, new: bool = True) -> Iterator[Finding]:
    """All findings, in order; see ``Run`` for the arguments."""
    run = Run(config, index, new=new)
    checks: dict[str, tuple[Check, str]] = {
        "versions": (_versions, ""),
        "settings": (_settings, ""),
        "task": (_task, "correct --task or --task_args"),
        "data": (_data, ""),
        "model": (
            _model,
            "give --model a transformers folder (config.json, tokenizer, weights), or a name on the Hugging Face hub "
            "where that can be reached",
        ),
        "prompts": (_prompts, ""),
        "memory": (_memory, "correct hardware.device"),
        "disk": (_disk, ""),
        "corpus": (check_corpus, "correct --search.corpus"),
        "index": (check_index, "correct --index"),
        "server": (check_server, "correct --search.url"),
        "search": (check_tools, ""),
        "replies": (check_replies, "correct --search.cache"),
    }
    told: set[str] = set()
    for name, (check, fix) in checks.items():
        try:
            yield from check(run)
        except UserError as error:
            if str(error) not in told:  # two checks may meet one fault
                told.add(str(error))
                yield Finding(name, "fail", str(error), fix)


def _versions(run: Run) -> Iterator[Finding]:
    """Compare the installed packages with those that the project requires for this run."""
    try:
        wanted = [Requirement(text) for text in metadata.requires("sorl") or []]
    except metadata.PackageNotFoundError:
        yield Finding("versions", "warn", "sorl is not installed as a package", "pip install -e '.[train]'")
        return
    extra = "openrlhf" if run.config.engine == "openrlhf" else "train"
    bad = []
    for requirement in wanted:
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": name}) for name in ("", "train", extra)):
            continue
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            bad.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            bad.append(f"{requirement.name} is {found}, wanted {requirement.specifier}")
    if bad:
        yield Finding("versions", "fail", "; ".join(bad), f"pip install -U 'sorl[{extra}]'")
    else:
        python = ".".join(map(str, sys.version_info[:3]))
        versions = f"torch {torch.__version__}, transformers {metadata.version('transformers')}"
        yield Finding("versions", "ok", f"Python {python}, {versions}")


def _settings(run: Run) -> Iterator[Finding]:
    """What the start of a run refuses. It yields no finding: a failure is reported by ``examine``."""
    check_settings(run.config)
    yield from ()


def _task(run: Run) -> Iterator[Finding]:
    """Load the task for later checks. It yields no finding: a failure is reported by ``examine``."""
    run.task = load_task(run.config.task, **run.config.task_args)
    run.limits = limits(run.task, run.config.limits)
    yield from ()


def _data(run: Run) -> Iterator[Finding]:
    """Read every row of the training and the evaluation data."""
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
            fix = f"correct {option} or the file it names, --task or the split"
            yield Finding(name, "fail", str(error), fix)
            if source == sources[1][2]:
                return  # the evaluation data is the same and would fail again
            continue
        where = f"split {split} of {'the task' if source is None else examples.source}"
        detail = f"{len(examples.examples):,} examples, {where}"
        hashes.append(examples.sha256)
        if examples.is_sample:
            detail += ": its embedded sample, not the benchmark"
            yield Finding(name, "warn", detail, f"give {option} a file or a folder{hub}")
        elif len(hashes) > len(set(hashes)):
            fix = "give --eval_data, or --data a folder with a file for each split"
            yield Finding(name, "warn", f"{detail}: these are the training questions, too", fix)
        else:
            yield Finding(name, "ok", detail)
        if name == "data" and (caution := repeats(config, len(examples))):
            yield Finding("questions", "warn", caution)
    if len(hashes) == len(sources):
        run.sound.add("data")


def _model(run: Run) -> Iterator[Finding]:
    """Read the model's configuration and tokenizer, and whether its files of weights are whole."""
    model, folder = run.config.model, Path(run.config.model)
    if model == TINY:
        if run.task is not None and None in (run.task.vocabulary, run.task.expert):
            detail = f"tiny is built from a task's vocabulary and expert, which {run.task.name} does not have"
            yield Finding("model", "fail", detail, "give --model a transformers folder or a hub name")
        else:
            run.sound.add("model")
            yield Finding("model", "ok", "tiny, built for the task when the run starts")
        return
    run.shape = model_shape(model, run.config.lora.rank)
    if run.config.engine == "openrlhf":
        check_model(run.config, run.shape)
    try:
        load_tokenizer(model)
    except UserError as error:
        fix = "copy the model's tokenizer.json and tokenizer_config.json there, or name another --model"
        yield Finding("model", "fail", str(error), fix)
        return
    if folder.is_dir() and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        fix = "copy its *.safetensors there, or name another --model"
        yield Finding("model", "fail", f"{folder} holds no weights", fix)
        return
    for file in sorted(folder.glob("*.safetensors")):
        if (damage := _damage(file)) is not None:
            yield Finding("model", "fail", f"{file}: {damage}", "copy it again, or name another --model")
            return
    run.sound.add("model")
    yield Finding("model", "ok", f"{model}: {run.shape.parameters:,} parameters")


def _prompts(run: Run) -> Iterator[Finding]:
    """Count the tokens of all prompts, as the run does before its first step.

    Not where servers of tools would have to be started to know the prompts, which describe these tools.
    """
    config, search, task = run.config, run.config.search, run.task
    if task is None or run.sound != {"data", "model"} or config.tools:
        return
    if not callable(task.tools) and any(isinstance(tool, str) for tool in task.tools):
        return
    # with an address even for a corpus, as that would be indexed now; none is asked
    url = search.url or (UNASKED if search.corpus else None)
    config = replace(config, search=replace(search, url=url, corpus=None, cache=None))
    envs = [make_env(config), make_env(config, evaluation=True)]
    with closing(envs[0]), closing(envs[1]), model_folder(config, envs[0]) as (folder, _):
        longest = check_prompts(envs, load_tokenizer(folder), use_chat_template=config.chat_template)
    if longest:
        most = f"limits.max_prompt_tokens {envs[0].limits.max_prompt_tokens:,}"
        yield Finding("prompts", "ok", f"the longest has {longest:,} tokens ({most})")


def _damage(file: Path) -> str | None:
    """What is wrong with a file of weights, as far as its header and size tell; None for a whole file."""
    try:
        with safe_open(file, "pt"):
            return None
    except (OSError, SafetensorError) as error:
        return f"not a whole safetensors file ({error})"


def _memory(run: Run) -> Iterator[Finding]:
    """Compare the estimate of ``--dry_run``, an upper bound, with the free memory."""
    config = run.config
    device = pick_device(config.hardware.device) if config.engine == "local" else torch.device("cpu")
    if run.shape is None or run.limits is None or config.engine != "local":
        free = _free_memory()
        detail = f"{gigabytes(free)} free" if free else "what is free is not known on this system"
        if config.model == TINY:
            yield Finding("memory", "ok", f"{detail}; the tiny policy needs little more than torch itself")
        elif config.engine != "local":
            yield Finding("memory", "ok", f"{detail} here; sorl-train --dry_run tells what each GPU needs")
        return  # without a model or a task, which other checks report, nothing can be compared
    bytes_each = compute_dtype(config.hardware.dtype, device).itemsize
    estimate = estimate_memory(config, run.shape, run.limits, bytes_each)
    need = estimate.peak
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if config.sampler.backend == "vllm":
            free = int(free * (1 - config.sampler.gpu_memory))
        yield _fits("GPU memory", need, free)
        # float32 weights are loaded here before they go to the GPU, and gathered here for a checkpoint
        need = 2 * 4 * run.shape.parameters
    yield _fits("memory", need + estimate.trust_region + LIBRARIES, _free_memory())


def _fits(name: str, need: int, free: int | None) -> Finding:
    if free is None:
        return Finding(name, "warn", f"up to {gigabytes(need)} needed; what is free is not known here")
    detail = f"up to {gigabytes(need)} needed, {gigabytes(free)} free"
    if need <= free:
        return Finding(name, "ok", detail)
    fix = (
        "sorl-train --dry_run shows what needs it. Lower sampler.max_concurrency, update.micro_batch_size or "
        "limits.max_trajectory_tokens, or use lora.rank or hardware.gradient_checkpointing"
    )
    # the estimate is an upper bound: a run that seems a little too large may still fit
    return Finding(name, "fail" if need > 1.5 * free else "warn", detail, fix)


def _free_memory() -> int | None:
    """Bytes available without swapping, within the limit of a container; None if the system does not tell."""
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
    """Check that the run folder is free and has room for checkpoints, and that the cache folder can be written."""
    config = run.config
    if config.run_dir is not None and run.new:
        try:
            RunDir(Path(config.run_dir)).check_free()
        except UserError as error:
            yield Finding("run folder", "fail", str(error), "give another --run_dir")
            return
    wanted = Path(config.run_dir or "runs").absolute()
    folder = existing(wanted)
    need = 100_000_000  # trajectories, metrics, the report
    if run.shape is not None:
        critic = run.shape.critic_parameters if config.algorithm.needs_critic else 0
        one = 4 * (run.shape.parameters + critic) + 8 * (run.shape.trained + critic)
        need += one * (config.checkpoint.keep + 2)  # and the best one, and one that is being written
    free = shutil.disk_usage(folder).free
    detail = f"{gigabytes(free)} free at {folder}"
    if run.shape is not None or config.model == TINY:
        detail = f"up to {gigabytes(need)} for checkpoints, {detail}"
    if (problem := _not_writable(wanted)) is not None:
        yield Finding("disk", "fail", problem, "give another --run_dir")
    elif free < need:
        yield Finding("disk", "fail", detail, "give a --run_dir on a larger disk, or lower checkpoint.keep")
    else:
        yield Finding("disk", "ok", detail)
    if (problem := _not_writable(cache_folder().absolute())) is not None:
        yield Finding("cache", "fail", problem, "set SORL_CACHE to a folder that can be written")


def _not_writable(folder: Path) -> str | None:
    """Why a folder, which may not exist yet, cannot be written; None if it can."""
    file = next((part for part in (folder, *folder.parents) if part.exists() and not part.is_dir()), None)
    if file is not None:
        return f"{folder}: {file} is no folder"
    parent = existing(folder)
    if not os.access(parent, os.W_OK | os.X_OK):
        return f"{parent} cannot be written"
    try:
        with tempfile.TemporaryFile(dir=parent):
            return None
    except OSError as error:
        return f"{parent} cannot be written ({error})"
