"""Two processes that train together over gloo."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]


def spawn_two_ranks(main: Callable[[int, str], None], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call ``main(rank, folder)`` in two processes of one gloo group, and wait for both."""
    monkeypatch.syspath_prepend(str(ROOT))  # they import the file of ``main``
    torch.multiprocessing.spawn(_rank, args=(main, str(folder)), nprocs=2)


def _rank(rank: int, main: Callable[[int, str], None], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    main(rank, folder)
    dist.barrier()
    # Not through the interpreter's exit, where threads of gloo that FSDP2 still holds have aborted a process.
    os._exit(0)
