"""Checkpoints of a run on OpenRLHF: a step's checkpoint is whole, or it does not count.

::

    checkpoints/step_000040/
        policy/       the policy as a plain transformers folder
        _actor/       DeepSpeed's shards of the policy, one set for each rank, and the state of the trainer
        _critic/      DeepSpeed's shards of the critic, and its value head with the head's optimizer
        whole.json    the step, and the size and hash of every file; written last
    checkpoints/best/policy

All parts of a step are written into one hidden folder, which gets its name in one rename when everything in it is on
the disk. So a kill at any moment leaves either all parts of a step or none of them, and a resume can never combine the
actor of one step with the critic of another. Older checkpoints are deleted only after that. The names ``_actor`` and
``_critic`` are those under which OpenRLHF looks when its ``ckpt.path`` is the folder of a step.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_env.text import read_json

WHOLE = "whole.json"
POLICY, ACTOR, CRITIC = "policy", "_actor", "_critic"  # OpenRLHF looks for the last two
HASHED_BYTES = 64_000_000  # a larger file is checked by its size: reading 200 GB again would take minutes
_STEP = re.compile(r"step_(\d{6,})")
_NEW, _OLD = ".new", ".old"


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on.

    Attributes:
        folder: the newest checkpoint that is whole.
        step: the training steps that it has behind it.
        passed_over: newer checkpoints that are not whole, a line each with the reason.
    """

    folder: Path
    step: int
    passed_over: list[str]


def write_whole(folder: Path, step: int, write: Callable[[Path], None]) -> None:
    """Have ``write`` fill a hidden folder, then put it in the place of ``folder``.

    An earlier folder of that name is kept until the new one is complete and on the disk.
    """
    recover(folder.parent)
    partial = _hidden(folder, _NEW)
    partial.mkdir(parents=True)
    write(partial)
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    found = {str(path.relative_to(partial)): _facts(path) for path in files}
    marker = partial / WHOLE
    marker.write_text(json.dumps({"step": step, "files": found}, indent=1) + "\n", encoding="utf-8")
    for path in [*files, marker, *(path for path in partial.rglob("*") if path.is_dir()), partial]:
        _sync(path)
    if folder.exists():
        folder.rename(_hidden(folder, _OLD))
    partial.rename(folder)
    _sync(folder.parent)
    recover(folder.parent)  # deletes the old one


def recover(checkpoints: Path) -> None:
    """Clear up after a run that was killed in a save.

    A folder that had already made way for a successor gets its name back when the successor never came; whatever else
    is hidden was half written, or is a predecessor that is no longer needed, and is deleted.
    """
    for old in checkpoints.glob(f".*{_OLD}"):
        name = old.with_name(old.name.removeprefix(".").removesuffix(_OLD))
        if not name.exists():
            old.rename(name)
    for suffix in (_NEW, _OLD):
        for hidden in checkpoints.glob(f".*{suffix}"):
            shutil.rmtree(hidden)


def resume_point(checkpoints: Path, parts: Sequence[str]) -> ResumePoint:
    """The newest whole checkpoint that has all ``parts`` (``policy``, ``_actor``, ``_critic``).

    Raises:
        UserError: there is none; the message says what is wrong with each checkpoint.
    """
    recover(checkpoints)
    passed_over: list[str] = []
    for step, folder in reversed(_steps(checkpoints)):
        problem = problem_of(folder, parts)
        if problem is None:
            return ResumePoint(folder, step, passed_over)
        passed_over.append(f"{folder.name}: {problem}")
    lines = "".join(f"\n  {line}" for line in passed_over)
    raise UserError(
        f"nothing to resume: no whole checkpoint in {checkpoints}{':' if lines else ''}{lines}\n"
        "Start anew with another --run_dir or --overwrite."
    )


def problem_of(folder: Path, parts: Sequence[str]) -> str | None:
    """Why a checkpoint cannot be resumed from; None when it can."""
    try:
        content = read_json((folder / WHOLE).read_text(encoding="utf-8"))
        step, files = int(content["step"]), content["files"]
        expected = {str(name): (facts["bytes"], facts.get("sha256")) for name, facts in files.items()}
    except FileNotFoundError:
        return f"it has no {WHOLE}, so it was not written to its end (or by an earlier version)"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {WHOLE} cannot be read ({type(error).__name__}: {error})"
    if f"step_{step:06d}" != folder.name:
        return f"its {WHOLE} is that of step {step}"
    for part in parts:
        if not any(name.startswith(f"{part}/") for name in expected):
            return f"it has no {part}"
    for name, (size, digest) in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
        if digest is not None and _digest(path) != digest:
            return f"{name} is not as it was written (its hash differs)"
    return None


def prune(checkpoints: Path, step: int, keep: int) -> None:
    """Delete the checkpoints of steps up to ``step`` but for the ``keep`` newest of them.

    Those of later steps stay: they were passed over by a resume, and the run will replace them when it comes there.
    """
    earlier = [folder for number, folder in _steps(checkpoints) if number <= step]
    for folder in earlier[: -max(1, keep)]:
        shutil.rmtree(folder)


def step_of(folder: Path) -> int:
    """The step that a checkpoint's name says."""
    match = _STEP.fullmatch(folder.name)
    if match is None:
        raise UserError(f"{folder} is not the folder of a checkpoint, whose name is step_ and a number")
    return int(match[1])


def _steps(checkpoints: Path) -> list[tuple[int, Path]]:
    found = [path for path in checkpoints.glob("step_*") if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted((step_of(path), path) for path in found)


def _hidden(folder: Path, suffix: str) -> Path:
    return folder.with_name(f".{folder.name}{suffix}")


def _facts(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    return {"bytes": size} | ({"sha256": _digest(path)} if size <= HASHED_BYTES else {})


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
