"""Patches that let OpenRLHF 0.11.2 run without a GPU, in every process that it starts.

Python imports the ``sitecustomize`` module that it finds on its path. ``launch`` puts this folder on ``PYTHONPATH``,
but only if the config says ``hardware.device: cpu``. Each hook runs when the module that it patches is imported. CPU
runs are for tests and for trying things out: bfloat16 on a CPU is slow.
"""

from __future__ import annotations

import functools
from typing import Any

from wrapt import when_imported


# A module that is imported already is patched at once, so what the hooks use is defined before them.
def _waited(collective: Any) -> Any:
    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        handle = collective(*args, **kwargs)
        if hasattr(handle, "wait"):
            handle.wait()
        return handle

    return call


class _GlooGroup:
    """A gloo group of the trainer's rank 0 and the vLLM workers, outside any global process group."""

    def __init__(self, address: str, port: int, rank: int, world_size: int, device: Any) -> None:
        from vllm.distributed.utils import stateless_init_torch_distributed_process_group

        self._group = stateless_init_torch_distributed_process_group(
            address, port, rank, world_size, backend="gloo"
        )

    def broadcast(self, tensor: Any, src: int, stream: Any = None) -> None:
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = src
        self._group.broadcast([tensor], options).wait()


@when_imported("torch.cuda")
def _cuda(cuda: Any) -> None:
    import torch

    if cuda.is_available():
        return
    cuda.current_device = lambda: torch.device("cpu")
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.current_stream = lambda device=None: None


@when_imported("openrlhf.utils.deepspeed.deepspeed_utils")
def _no_compiled_adam(utils: Any) -> None:
    """Use torch's AdamW: DeepSpeed would compile its own at the first start, which takes minutes."""
    original = utils.get_train_ds_config

    def get_train_ds_config(*args: Any, **kwargs: Any) -> Any:
        config = original(*args, **kwargs)
        if "optimizer" in config:
            config["optimizer"]["params"]["torch_adam"] = True
        return config

    utils.get_train_ds_config = get_train_ds_config


COLLECTIVES = (
    "all_gather all_gather_coalesced all_gather_into_tensor all_reduce all_reduce_coalesced broadcast reduce "
    "reduce_scatter reduce_scatter_tensor"
).split()


@when_imported("deepspeed.comm.torch")
def _collectives_in_order(comm: Any) -> None:
    """Wait for each collective. On a GPU the stream puts it before what follows. On a CPU gloo uses threads of its own,
    and ZeRO-3 did not wait for them: in one of three starts a weight was overwritten with uninitialised memory."""
    comm.build_shm_op = lambda: None  # DeepSpeed would compile it
    for name in COLLECTIVES:
        setattr(comm.TorchBackend, name, _waited(getattr(comm.TorchBackend, name)))


@when_imported("openrlhf.utils.deepspeed.deepspeed")
def _mesh(module: Any) -> None:
    original = module.init_device_mesh
    module.init_device_mesh = lambda device, *args, **kwargs: original("cpu", *args, **kwargs)


@when_imported("openrlhf.utils.distributed_util")
def _gloo_for_weights(module: Any) -> None:
    module.stateless_init_process_group = _GlooGroup


@when_imported("openrlhf.trainer.ray.vllm_worker_wrap")
def _receive_on_cpu(module: Any) -> None:
    def update_weight(self: Any, name: str, dtype: Any, shape: Any, empty_cache: bool = False) -> None:
        import torch

        weight = torch.empty(shape, dtype=dtype)
        self._model_update_group.broadcast(weight, src=0)
        self.model_runner.model.load_weights(weights=[(name, weight)])

    module.WorkerWrap.update_weight = update_weight


@when_imported("vllm.model_executor.layers.utils")
def _keep_weights(module: Any) -> None:
    """On a CPU, vLLM packs linear weights and drops the originals, so that new ones could not be loaded."""

    def dispatch(layer: Any, remove_weight: bool) -> None:
        import torch

        layer.cpu_linear = torch.nn.functional.linear

    module.dispatch_cpu_unquantized_gemm = dispatch


@when_imported("vllm.platforms.cpu")
def _workers_through_ray(module: Any) -> None:
    """Let vLLM start the workers of a tensor-parallel engine through Ray, on the GPUs that Ray counts."""
    module.CpuPlatform.ray_device_key = "GPU"
