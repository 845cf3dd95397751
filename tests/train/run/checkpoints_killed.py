"""Checkpoints saved by processes that are killed, each at another file operation.

    python checkpoints_killed.py FOLDER KEEP STEPS

For k = 1, 2, ..: a child process saves STEPS steps and the best policy into the run FOLDER/k, as the recorder does, and
kills itself with SIGKILL before its k-th operation on a file or folder. It ends when a child gets through. Prints one
line of JSON for each child: the last step whose save it had reported as done, the step that a resume finds, the steps
that stand in the parts of that checkpoint, the step in the best policy that is left, and how many folders are left.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_train.config.settings import TrainConfig
from sorl_train.run.checkpoint import (
    atomic_folder,
    checkpoint_name,
    log_lengths,
    prune_checkpoints,
    remove_leftovers,
    resume_point,
    rewind,
)
from sorl_train.run.folder import RunDir

PARTS = ("policy", "_actor", "_critic")  # the OpenRLHF engine's
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def die_before(folder: Path, number: int) -> None:
    """Kill this process before its ``number``-th operation that changes something below ``folder``."""
    counted = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal counted
        if event in CHANGES or (event == "open" and isinstance(arguments[1], str) and "w" in arguments[1]):
            path = arguments[0]
        else:
            return
        # rmtree names files relative to a folder that it has open
        if str(path).startswith(f"{folder}/") or event in ("os.remove", "os.rmdir"):
            counted += 1
            if counted == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def save(run: RunDir, name: str, run_id: str, step: int) -> None:
    """A checkpoint in several files, each of which says which step it is of."""
    with atomic_folder(run.checkpoints / name, run_id) as partial:
        for part in PARTS:
            (partial / part).mkdir()
            for shard in ("rank_0", "rank_1"):
                (partial / part / shard).write_text(str(step))
        (partial / "state.json").write_text(json.dumps({"logs": log_lengths(run)}))


def save_all(run: RunDir, run_id: str, keep: int, steps: int, done: Path) -> None:
    """What a run does, step by step; every second step is the best so far."""
    for step in range(1, steps + 1):
        if step % 2 == 0:
            save(run, "best", run_id, step)
        save(run, checkpoint_name(step), run_id, step)
        done.write_text(str(step))
        prune_checkpoints(run.checkpoints, keep)


def written_in(folder: Path) -> list[int]:
    """The steps that the files of a checkpoint say they are of."""
    return sorted({int(path.read_text()) for path in folder.glob("*/rank_*")})


def child(run: RunDir, keep: int, steps: int, number: int, done: Path) -> bool:
    """Whether the child got through before its ``number``-th operation."""
    run_id = run.run_id
    process = os.fork()
    if process == 0:
        die_before(run.checkpoints, number)
        save_all(run, run_id, keep, steps, done)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        return False
    assert os.WEXITSTATUS(status) == 0
    return True


def main(root: Path, keep: int, steps: int) -> None:
    os.fsync = lambda handle: None  # a process that is killed loses nothing of what it has written
    empty = RunDir.create(root / "empty", TrainConfig()).path
    number, through = 0, False
    while not through:
        number += 1
        run, done = RunDir(shutil.copytree(empty, root / str(number))), root / f"{number}.done"
        through = child(run, keep, steps, number, done)
        found: dict[str, Any] = {
            "done": int(done.read_text()) if done.exists() and done.read_text() else 0,
            "resumed": 0,
            "parts": [],
        }
        try:
            point = resume_point(run)
            rewind(run, point.path)
            found |= {"resumed": point.step, "parts": written_in(point.path), "passed": point.passed_over}
        except UserError:
            remove_leftovers(run.checkpoints)  # nothing was saved yet; the test compares with ``done``
        best = run.checkpoints / "best"
        hidden = len(list(run.checkpoints.glob(".*")))
        found |= {"best": written_in(best) if best.exists() else [], "hidden": hidden}
        print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
