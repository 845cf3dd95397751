"""A process that has torch loaded and forks a ``sorl-train`` for each line of its input: runs that start at once.

``faults.c`` is loaded into it, and so into each fork. A line of input is JSON: the arguments; ``log``, the file that
takes what the run prints; ``folder`` and ``changes``: the folder whose changes are counted, and the file that lists
them; ``faults`` and ``timers``: the arguments of ``add_fault`` and ``add_timer``. A line of output has, once the fork
has ended, its status and the seconds of CPU time that it took.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
from typing import Any


def run(order: dict[str, Any]) -> None:
    """In the fork: one run, from the command line's arguments to its status."""
    from sorl_train.cli import main

    log, changes = (
        os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in ("log", "changes")
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    faults = ctypes.CDLL(None)  # all that is loaded
    faults.watch(order["folder"].encode(), changes)
    for fault in order["faults"]:
        faults.add_fault(*fault)
    for timer in order["timers"]:
        assert faults.add_timer(*timer) == 0
    os._exit(main(order["arguments"]))


def serve() -> None:
    """Fork for each order until the input ends."""
    import torch

    for module in ("transformers", "sorl_train.train_rl", "sorl_train.report.report"):
        importlib.import_module(module)  # once, so that no fork has to
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's jobs in the background ignore it
    for line in sys.stdin:
        child = os.fork()
        if not child:
            run(json.loads(line))
        _, status, usage = os.wait4(child, 0)
        seconds = usage.ru_utime + usage.ru_stime
        print(json.dumps([os.waitstatus_to_exitcode(status), seconds]), flush=True)


if __name__ == "__main__":
    serve()
