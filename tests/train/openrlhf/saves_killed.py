"""Checkpoints saved by processes that are killed, each at another file operation.

    python saves_killed.py FOLDER KEEP STEPS

For k = 1, 2, ..: a child process saves STEPS steps and the best policy with ``saves``, into FOLDER/k, and kills itself
with SIGKILL before its k-th operation on a file or folder. It ends when a child gets through. Prints one line of JSON
for each child: the last step whose save it had reported as done, the step that a resume finds, the steps that stand in
the parts of that checkpoint, the step in the best policy that is left, and how many folders are left over.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_train.openrlhf import saves

PARTS = (saves.POLICY, saves.ACTOR, saves.CRITIC)
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


def writer(step: int) -> Callable[[Path], None]:
    """Writes a checkpoint in several files, each of which says which step it is of."""

    def write(partial: Path) -> None:
        for part in PARTS:
            (partial / part).mkdir()
            for shard in ("rank_0", "rank_1"):
                (partial / part / shard).write_text(str(step))

    return write


def save_all(folder: Path, keep: int, steps: int, done: Path) -> None:
    """What a run does, step by step; every second step is the best so far."""
    for step in range(1, steps + 1):
        if step % 2 == 0:
            saves.write_whole(folder / "best", step, writer(step))
        saves.write_whole(folder / f"step_{step:06d}", step, writer(step))
        done.write_text(str(step))
        saves.prune(folder, step, keep)


def written_in(folder: Path) -> list[int]:
    """The steps that the files of a checkpoint say they are of."""
    return sorted({int(path.read_text()) for path in folder.glob("*/rank_*")})


def child(folder: Path, keep: int, steps: int, number: int, done: Path) -> bool:
    """Whether the child got through before its ``number``-th operation."""
    process = os.fork()
    if process == 0:
        die_before(folder, number)
        save_all(folder, keep, steps, done)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        return False
    assert os.WEXITSTATUS(status) == 0
    return True


def main(root: Path, keep: int, steps: int) -> None:
    os.fsync = lambda handle: None  # a process that is killed loses nothing of what it has written
    number, through = 0, False
    while not through:
        number += 1
        folder, done = root / str(number), root / f"{number}.done"
        folder.mkdir()
        through = child(folder, keep, steps, number, done)
        found: dict[str, Any] = {
            "done": int(done.read_text()) if done.exists() and done.read_text() else 0,
            "resumed": 0,
            "parts": [],
        }
        try:
            point = saves.resume_point(folder, PARTS)
            found |= {"resumed": point.step, "parts": written_in(point.folder), "passed": point.passed_over}
        except UserError:
            pass  # nothing was saved yet; the test compares with ``done``
        best = folder / "best"
        found |= {"best": written_in(best) if best.exists() else [], "hidden": len(list(folder.glob(".*")))}
        print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
