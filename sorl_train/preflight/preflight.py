"""The checks before a run, for ``--dry_run`` and ``sorl-doctor``. Each examines one thing; none changes anything."""

from __future__ import annotations

import shutil
import tempfile
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from safetensors import SafetensorError, safe_open

from sorl_env.envs.prompts import check_prompts
from sorl_env.errors import UserError
from sorl_env.folders import cache_folder
from sorl_env.task import ToolSettings
from sorl_env.task.data import load_examples
from sorl_env.task.registry import load_task
from sorl_env.tool import ToolUnavailableError
from sorl_tools.corpus import read_corpus
from sorl_tools.index.index import find_damage, read_manifest
from sorl_tools.search.http import TOKEN_VARIABLE, HttpSearch
from sorl_train.config.settings import TINY
from sorl_train.models.forward import pick_device
from sorl_train.models.policy import load_tokenizer, model_shape
from sorl_train.openrlhf.engine_limits import (
    check_attention,
    check_compilers,
    check_gpus,
    check_model,
    check_versions,
)
from sorl_train.preflight.inputs import UNASKED, Finding, PreflightContext, check_settings, planned, repeats
from sorl_train.preflight.memory import SPARE, checkpoint_size, estimate_memory, gigabytes
from sorl_train.rollout.environments import limits, refuse_test_questions
from sorl_train.run.folder import RunDir

_WHOLE_MODEL = (
    "give --model a transformers folder or a hub name, with config.json, tokenizer.json, tokenizer_config.json and "
    "weights"
)
LIBRARIES = 2_000_000_000  # bytes for the interpreter, torch and transformers: 1.3 and 1.9 GB on two machines


def examine(run: PreflightContext, names: Collection[str] = ()) -> Iterator[Finding]:
    """What the checks of these names find, in order; without names all checks."""
    checks: dict[str, tuple[Callable[[PreflightContext], Iterable[Finding] | None], str]] = {
        "settings": (_settings, ""),
        "versions": (_versions, ""),
        "task": (_task, "correct --task or --task_args"),
        "data": (_data, ""),
        "model": (_model, _WHOLE_MODEL),
        "weights": (_weights, "copy its *.safetensors there again, or name another --model"),
        "prompts": (_prompts, ""),
        "memory": (_memory, ""),
        "run folder": (_run_folder, "give another --run_dir"),
        "cache": (_cache, "set SORL_CACHE to a folder that can be written"),
        "corpus": (check_corpus, "correct --search.corpus"),
        "index": (check_index, "correct --index"),
        "server": (check_server, "correct --search.url"),
        "search": (check_tools, "leave out --search.corpus and --search.url"),
    }
    for name, (check, fix) in checks.items():
        if names and name not in names:
            continue
        try:
            for finding in check(run) or ():
                run.failed = run.failed or finding.status == "fail"
                yield finding
        except UserError as error:
            run.failed = True
            yield Finding(name, "fail", str(error), fix)


# Checks without findings of their own: ``examine`` reports what they raise.
def _settings(run: PreflightContext) -> None:
    check_settings(run.config)


def _versions(run: PreflightContext) -> None:
    if run.config.engine == "openrlhf":
        check_versions()
        check_attention(run.config.cluster.flags)
        if run.config.hardware.device != "cpu":
            check_compilers()
            check_gpus(run.config.cluster)


def _task(run: PreflightContext) -> None:
    run.task = load_task(run.config.task, **run.config.task_args)


def _weights(run: PreflightContext) -> None:
    """Whether the model's files of weights are whole, as far as their headers and sizes tell."""
    folder = Path(run.config.model)
    weights = sorted(folder.glob("*.safetensors"))
    if folder.is_dir() and not weights and not any(folder.glob("*.bin")):
        raise UserError(f"{folder} holds no weights")
    for file in weights:
        try:
            with safe_open(file, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: not a whole safetensors file ({error})") from error


def _cache(run: PreflightContext) -> None:
    _writable(cache_folder().absolute())


def _data(run: PreflightContext) -> Iterator[Finding]:
    config = run.config
    if run.task is None:
        return
    sources = {
        "data": (config.data, config.split),
        "eval data": (config.eval_data or config.data, config.eval.split),
    }
    hashes: set[str] = set()
    for name, (source, split) in sources.items():
        option, fix = f"--{name.replace(' ', '_')}", ""
        try:
            examples = load_examples(run.task, source, split)
            if name == "data":
                refuse_test_questions(examples)
        except UserError as error:
            fix = f"correct {option} or the file it names, --task or the split"
            yield Finding(name, "fail", str(error), fix)
            continue
        where = f"split {split} of {'the task' if source is None else examples.source}"
        detail = f"{len(examples):,} examples, {where}"
        if examples.is_sample:
            detail += ": its embedded sample, not the benchmark"
            hub = " (hf: is the benchmark on the hub)" if run.task.hub is not None else ""
            fix = f"give {option} a file or a folder{hub}"
        elif examples.sha256 in hashes:
            detail += ": these are the training questions, too"
            fix = "give --eval_data other questions, or --data a folder with a file for each split"
        hashes.add(examples.sha256)
        yield Finding(name, "warn" if fix else "ok", detail, fix)
        is_asked = name == "data" and config.stage == "rl"
        if is_asked and (caution := repeats(config.rollout, len(examples))):
            yield Finding("questions", "warn", caution)


def _model(run: PreflightContext) -> Iterator[Finding]:
    model, task = run.config.model, run.task
    detail = "tiny, built for the task when the run starts"
    if model != TINY:
        run.shape = model_shape(model, run.config.lora.rank)
        if run.config.engine == "openrlhf":
            check_model(run.shape, run.config.cluster.vllm_tensor_parallel, run.config.model)
        load_tokenizer(model)
        detail = f"{model}: {run.shape.parameters:,} parameters"
    elif task is not None and None in (task.vocabulary, task.expert):
        raise UserError(f"tiny is built from a task's vocabulary and expert, which {task.name} does not have")
    yield Finding("model", "ok", detail)


def _prompts(run: PreflightContext) -> Iterator[Finding]:
    """Count all prompts' tokens, unless servers would have to be started to know the tools that prompts describe."""
    config, task = run.config, run.task
    if task is None or run.failed or config.tools:
        return
    if not callable(task.tools) and any(isinstance(tool, str) for tool in task.tools):
        return
    with planned(config) as (envs, tokenizer):
        longest = check_prompts(envs, tokenizer, use_chat_template=config.chat_template)
        most = envs[0].limits.max_prompt_tokens
    if longest:
        detail = f"the longest has {longest:,} tokens (limits.max_prompt_tokens {most:,})"
        yield Finding("prompts", "ok", detail)


def _memory(run: PreflightContext) -> Iterator[Finding]:
    """Compare the estimate of ``--dry_run``, an upper bound, with the free memory."""
    config, free = run.config, _free_memory()
    if config.engine != "local" or run.shape is None or run.task is None:
        hint = "sorl-train --dry_run tells what a run needs on each device"
        yield Finding("memory", "ok", f"{gigabytes(free)} free here; {hint}")
        return
    device = pick_device(config.hardware.device)
    estimate = estimate_memory(config, run.shape, limits(run.task, config.limits), device)
    need = estimate.total(estimate.peak)
    if device.type == "cuda":
        on_gpu, _ = torch.cuda.mem_get_info(device)
        if config.sampler.backend == "vllm":
            on_gpu = int(on_gpu * (1 - config.sampler.gpu_memory))
        yield _fits("GPU memory", need, on_gpu)
        # float32 weights are loaded here before they go to the GPU, and gathered here for a checkpoint
        need = 2 * 4 * run.shape.parameters
    yield _fits("memory", need + sum(estimate.host.values()) + LIBRARIES, free)


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


def _run_folder(run: PreflightContext) -> Iterator[Finding]:
    """Whether the run folder is free, can be written, and has room for checkpoints."""
    config = run.config
    if config.run_dir is not None and run.new:
        RunDir(Path(config.run_dir)).check_free()
    folder = _writable(Path(config.run_dir or "runs").absolute())
    need = 100_000_000  # trajectories, metrics, the report
    if run.shape is not None:
        need += checkpoint_size(config, run.shape) * (config.checkpoint.keep + SPARE)
    free = shutil.disk_usage(folder).free
    detail = f"up to {gigabytes(need)} for checkpoints, {gigabytes(free)} free at {folder}"
    fix = "" if need <= free else "give a --run_dir on a larger disk, or lower checkpoint.keep"
    yield Finding("disk", "fail" if fix else "ok", detail, fix)


def _writable(folder: Path) -> Path:
    """A folder that may not exist yet, or the one above it that does. Raises ``UserError`` if it cannot be written."""
    part = next(part for part in (folder, *folder.parents) if part.exists())
    try:
        tempfile.TemporaryFile(dir=part).close()
    except OSError as error:
        raise UserError(f"{folder}: {part} is not a folder that can be written to ({error})") from error
    return part


HASHED = 20_000_000_000  # the most bytes of an index that are read to compare hashes
PROBE_S = 5.0  # seconds to wait for a server


def check_corpus(run: PreflightContext) -> Iterator[Finding]:
    """``search.corpus``: whether the corpus can be read to its end, or the index folder is whole."""
    if run.config.search.corpus is None:
        return
    path = Path(run.config.search.corpus).expanduser()
    if path.is_dir():
        yield _index_folder("corpus", path)
    elif count := sum(1 for _ in read_corpus(path)):
        yield Finding("corpus", "ok", f"{count:,} passages in {path}")
    else:
        yield Finding("corpus", "fail", f"{path} holds no passages", "name another --search.corpus")


def check_index(run: PreflightContext) -> Iterator[Finding]:
    """``--index``: whether the folder that the server should serve is whole."""
    if run.index is not None:
        yield _index_folder("index", run.index.expanduser())


def _index_folder(name: str, folder: Path) -> Finding:
    """Compare the files of an index with their hashes, or a large index with its sizes alone."""
    manifest = read_manifest(folder)
    if manifest.bytes > HASHED:
        detail = f"{folder}: files of the right size, not hashed"
        return Finding(name, "ok", detail, f"sorl-index verify {folder} reads all")
    if damaged := find_damage(folder, manifest):
        detail = f"{folder}: {', '.join(damaged)} changed since the build"
        return Finding(name, "fail", detail, "build it again")
    return Finding(name, "ok", f"{folder}: {manifest.backend}, {manifest.passages:,} passages")


def check_tools(run: PreflightContext) -> Iterator[Finding]:
    """Whether the task takes the corpus or server that it is given, and searches more than a sample."""
    search, task = run.config.search, run.task
    if task is None or not callable(task.tools):
        return
    given = search.corpus is not None or search.url is not None
    if not given and not task.embedded_is_sample:
        return  # the task generates what it searches, which may take a while
    try:  # with an address even for a corpus, as that would be indexed now
        tools = task.tools(ToolSettings(search_url=(search.url or UNASKED) if given else None))
    except OSError:
        return  # a tool that asks its server at once; the run itself will report it
    if any(getattr(tool, "is_sample", False) for tool in tools):
        detail = "the run would search the few passages of the task's embedded sample"
        fix = "give --search.corpus PASSAGES, or --search.url with the address of a sorl-serve"
        yield Finding("search", "warn", detail, fix)
    for tool in tools:
        getattr(tool, "close", lambda: None)()


def check_server(run: PreflightContext) -> Iterator[Finding]:
    """``search.url``: whether every server listens, is a retrieval server, and serves the right index."""
    if run.config.search.url is None:
        return
    with closing(HttpSearch(run.config.search.url, run.config.search.top_k, PROBE_S)) as search:
        urls = search.urls
    fingerprints: dict[str, str] = {}
    for url in urls:
        yield _one_server(run, url, fingerprints)
    if len(set(fingerprints.values())) > 1:
        told = "; ".join(f"{url}: {fingerprint}" for url, fingerprint in fingerprints.items())
        yield Finding("servers", "fail", f"they hold different indexes: {told}", "start them on the same one")


def _one_server(run: PreflightContext, url: str, fingerprints: dict[str, str]) -> Finding:
    address = httpx.URL(url)
    host, port = address.host, address.port or (443 if address.scheme == "https" else 80)
    try:
        health = _health(address)
        with closing(HttpSearch(url, run.config.search.top_k, PROBE_S)) as search:
            search("the")
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        fix = f"start one there: sorl-serve INDEX_OR_CORPUS --port {port}"
        return Finding("server", "fail", f"nothing listens at {host}:{port} ({error})", fix)
    except (ToolUnavailableError, ValueError) as error:
        fix = (
            f"correct --search.url, set {TOKEN_VARIABLE} if the server wants its token, or read that server's log; if "
            f"another program has port {port}, start the server on another one: sorl-serve INDEX_OR_CORPUS --port N"
        )
        return Finding("server", "fail", textwrap.shorten(str(error), 110), fix)
    told = health.get("fingerprint")
    if told is None:
        return Finding("server", "ok", f"{url} answers; it does not say which index it holds")
    fingerprints[url] = told
    if run.index is not None and told != (wanted := read_manifest(run.index.expanduser()).hash):
        detail = f"{url} holds {told}, and {run.index} is {wanted}"
        return Finding("server", "fail", detail, f"sorl-serve {run.index}")
    size = health.get("passages")
    passages = f"{size:,} passages, " if isinstance(size, int) else ""
    return Finding("server", "ok", f"{url} answers: {passages}{told}")


def _health(address: httpx.URL) -> dict[str, Any]:
    """The health report of a ``sorl-serve``; empty for any other server. Raises httpx's errors of the connection."""
    try:
        path = address.path.rpartition("/")[0] + "/health"
        said = httpx.get(address.copy_with(path=path), timeout=PROBE_S).json()
    except (httpx.ConnectError, httpx.ConnectTimeout):
        raise
    except (httpx.HTTPError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}
