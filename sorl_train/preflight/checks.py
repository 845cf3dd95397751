"""The checks before a run, for ``--dry_run`` and ``sorl-doctor``. Each examines one thing; none changes anything."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import psutil
import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import logging as transformers_logging

from sorl_env.data import load_examples
from sorl_env.errors import UserError
from sorl_env.folders import cache_folder
from sorl_env.prompt_tokens import check_prompts
from sorl_env.registry import load_task
from sorl_train.config.settings import TINY
from sorl_train.models.forward import compute_dtype, pick_device
from sorl_train.models.policy import load_tokenizer
from sorl_train.models.shape import model_shape
from sorl_train.openrlhf.checks import check_attention, check_model, check_versions
from sorl_train.preflight.finding import Finding, Run
from sorl_train.preflight.inputs import check_settings, planned, repeats
from sorl_train.preflight.memory import estimate_memory, gigabytes
from sorl_train.preflight.search_checks import (
    check_corpus,
    check_index,
    check_replies,
    check_server,
    check_tools,
)
from sorl_train.rollout.environments import limits, refuse_test_questions
from sorl_train.run.folder import RunDir

LIBRARIES = 1_500_000_000  # bytes that the interpreter, torch and transformers need themselves


def examine(run: Run, names: Collection[str] = ()) -> Iterator[Finding]:
    """What the checks of these names find, in order; without names all checks."""
    checks: dict[str, tuple[Callable[[Run], Iterator[Finding]], str]] = {
        "settings": (_settings, ""),
        "versions": (_versions, ""),
        "task": (_task, "correct --task or --task_args"),
        "data": (_data, ""),
        "model": (
            _model,
            "give --model a transformers folder (config.json, tokenizer, weights), or a name on the Hugging Face hub "
            "where that can be reached",
        ),
        "weights": (_weights, ""),
        "memory": (_memory, "correct hardware.device"),
        "run folder": (_run_folder, "give another --run_dir"),
        "cache": (_cache, "set SORL_CACHE to a folder that can be written"),
        "corpus": (check_corpus, "correct --search.corpus"),
        "index": (check_index, "correct --index"),
        "server": (check_server, "correct --search.url"),
        "search": (check_tools, "leave out --search.corpus and --search.url"),
        "prompts": (_prompts, ""),
        "replies": (check_replies, "name another --search.cache"),
    }
    transformers_logging.disable_progress_bar()  # the tiny policy is written for a moment
    told: set[str] = set()
    for name, (check, fix) in checks.items():
        if names and name not in names:
            continue
        try:
            yield from check(run)
        except UserError as error:
            if str(error) not in told:  # two checks may meet one fault
                told.add(str(error))
                yield Finding(name, "fail", str(error), fix)


def _settings(run: Run) -> Iterator[Finding]:
    """What the start of a run refuses. It yields no finding: a failure is reported by ``examine``."""
    check_settings(run.config)
    yield from ()


def _versions(run: Run) -> Iterator[Finding]:
    """Whether OpenRLHF's packages are installed. It yields no finding: a failure is reported by ``examine``."""
    if run.config.engine == "openrlhf":
        check_versions()
        check_attention(run.config)
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
    sources = {
        "data": (config.data, config.split),
        "eval data": (config.eval_data or config.data, config.eval.split),
    }
    hashes: list[str] = []
    for name, (source, split) in sources.items():
        option = f"--{name.replace(' ', '_')}"
        try:
            examples = load_examples(run.task, source, split)
            if name == "data":
                refuse_test_questions(config, examples)
        except UserError as error:
            yield Finding(
                name, "fail", str(error), f"correct {option} or the file it names, --task or the split"
            )
            if config.eval_data in (None, config.data):
                return  # the evaluation data is the same and would fail again
            continue
        hashes.append(examples.sha256)
        where = f"split {split} of {'the task' if source is None else examples.source}"
        detail = f"{len(examples.examples):,} examples, {where}"
        if examples.is_sample:
            hub = " (hf: is the benchmark on the hub)" if run.task.hub is not None else ""
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
    """Read the model's configuration and tokenizer."""
    model = run.config.model
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
    run.sound.add("model")
    yield Finding("model", "ok", f"{model}: {run.shape.parameters:,} parameters")


def _weights(run: Run) -> Iterator[Finding]:
    """Whether the model's files of weights are whole, as far as their headers and sizes tell."""
    folder = Path(run.config.model)
    weights = sorted(folder.glob("*.safetensors"))
    if folder.is_dir() and not weights and not any(folder.glob("*.bin")):
        fix = "copy its *.safetensors there, or name another --model"
        yield Finding("weights", "fail", f"{folder} holds no weights", fix)
        return
    for file in weights:  # the header and the size tell whether a file is whole
        try:
            with safe_open(file, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            detail = f"{file}: not a whole safetensors file ({error})"
            yield Finding("weights", "fail", detail, "copy it again, or name another --model")
            return


def _prompts(run: Run) -> Iterator[Finding]:
    """Count the tokens of all prompts, as the run does before its first step.

    Not where servers of tools would have to be started to know the prompts, which describe these tools.
    """
    config, task = run.config, run.task
    if task is None or run.sound != {"data", "model"} or config.tools:
        return
    if not callable(task.tools) and any(isinstance(tool, str) for tool in task.tools):
        return
    with planned(config) as (envs, folder, _):
        longest = check_prompts(envs, load_tokenizer(folder), use_chat_template=config.chat_template)
        most = envs[0].limits.max_prompt_tokens
    if longest:
        detail = f"the longest has {longest:,} tokens (limits.max_prompt_tokens {most:,})"
        yield Finding("prompts", "ok", detail)


def _memory(run: Run) -> Iterator[Finding]:
    """Compare the estimate of ``--dry_run``, an upper bound, with the free memory."""
    config, free = run.config, _free_memory()
    if config.engine != "local":
        detail = f"{gigabytes(free)} free here; sorl-train --dry_run tells what each GPU needs"
        yield Finding("memory", "ok", detail)
        return
    device = pick_device(config.hardware.device)
    if config.model == TINY:
        detail = f"{gigabytes(free)} free; the tiny policy needs little more than torch itself"
        yield Finding("memory", "ok", detail)
    if run.shape is None or run.limits is None:
        return  # which other checks report
    estimate = estimate_memory(
        config, run.shape, run.limits, compute_dtype(config.hardware.dtype, device).itemsize
    )
    need = estimate.peak
    if device.type == "cuda":
        on_gpu, _ = torch.cuda.mem_get_info(device)
        if config.sampler.backend == "vllm":
            on_gpu = int(on_gpu * (1 - config.sampler.gpu_memory))
        yield _fits("GPU memory", need, on_gpu)
        # float32 weights are loaded here before they go to the GPU, and gathered here for a checkpoint
        need = 2 * 4 * run.shape.parameters
    yield _fits("memory", need + estimate.trust_region + LIBRARIES, free)


def _fits(name: str, need: int, free: int) -> Finding:
    detail = f"up to {gigabytes(need)} needed, {gigabytes(free)} free"
    if need <= free:
        return Finding(name, "ok", detail)
    fix = (
        "sorl-train --dry_run shows what needs it. Lower sampler.max_concurrency, update.micro_batch_size or "
        "limits.max_trajectory_tokens, or use lora.rank or hardware.gradient_checkpointing"
    )
    # the estimate is an upper bound: a run that seems a little too large may still fit
    return Finding(name, "fail" if need > 1.5 * free else "warn", detail, fix)


def _free_memory() -> int:
    """Bytes available without swapping, within the limit of a container."""
    free: int = psutil.virtual_memory().available
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text() for name in ("max", "current"))
        return min(free, int(limit) - int(used))
    except (OSError, ValueError):  # no container, or the text "max"
        return free


def _run_folder(run: Run) -> Iterator[Finding]:
    """Whether the run folder is free, can be written, and has room for checkpoints."""
    config = run.config
    if config.run_dir is not None and run.new:
        RunDir(Path(config.run_dir)).check_free()
    folder = _writable(Path(config.run_dir or "runs").absolute())
    need = 100_000_000  # trajectories, metrics, the report
    if run.shape is not None:
        critic = run.shape.critic_parameters if config.algorithm.needs_critic else 0
        one = 4 * (run.shape.parameters + critic) + 8 * (run.shape.trained + critic)
        need += one * (config.checkpoint.keep + 2)  # and the best one, and one that is being written
    free = shutil.disk_usage(folder).free
    detail = f"up to {gigabytes(need)} for checkpoints, {gigabytes(free)} free at {folder}"
    if free < need:
        yield Finding("disk", "fail", detail, "give a --run_dir on a larger disk, or lower checkpoint.keep")
    else:
        yield Finding("disk", "ok", detail)


def _cache(run: Run) -> Iterator[Finding]:
    """Whether the cache folder can be written. It yields no finding: a failure is reported by ``examine``."""
    _writable(cache_folder().absolute())
    yield from ()


def _writable(folder: Path) -> Path:
    """A folder that may not exist yet, or the one above it that does. Raises ``UserError`` if it cannot be written."""
    part = next(part for part in (folder, *folder.parents) if part.exists())
    try:
        tempfile.TemporaryFile(dir=part).close()
    except OSError as error:
        raise UserError(f"{folder}: {part} is no folder that can be written ({error})") from error
    return part
