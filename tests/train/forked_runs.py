"""A process that has torch loaded and forks a ``sorl-train`` for each line of its input: runs that start at once.

A line of input is JSON: the arguments, a log file, and ``die_at``: after how many changes to the file system under the
run folder the run kills itself with SIGKILL (0: never). Between any two of a run's changes to its files lies such a
moment. A line of output is the process id of the fork; a second one, once it has ended, its status.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from typing import Any

_CHANGES = (
    "open",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.truncate",
    "shutil.rmtree",
    "os.chmod",
)


def die_at(moment: int, folder: str) -> None:
    """Kill this process just before its ``moment``-th change to a file in ``folder``; Python announces each."""
    changes = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal changes
        if event not in _CHANGES or not str(arguments[0]).startswith(folder):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        changes += 1
        if changes == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def run(order: dict[str, Any]) -> None:
    """In the fork: one run, from the command line's arguments to its status."""
    from sorl_train.cli import main

    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if order["die_at"]:
        die_at(order["die_at"], order["folder"])
    os._exit(main(order["arguments"]))


def serve() -> None:
    """Fork for each order until the input ends."""
    import torch

    for module in ("transformers", "sorl_train.train_rl", "sorl_train.report.report"):
        importlib.import_module(module)  # once, so that no fork has to
    torch.set_num_threads(1)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            run(json.loads(line))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
