"""Checkpoints of both engines: where they lie, which one a run goes on from, and which ones are deleted.

::

    checkpoints/best/
        policy/                  the policy of the best evaluation so far
        state.json               its step and success
    checkpoints/step_000040/
        policy/                  config.json, model.safetensors, tokenizer: loads with transformers and vLLM
        state.json               step, best figures so far, lengths of the run's log files
        hashes.json              size and hash of each of these files, and the run that they belong to

    of the local engine:         critic/ (as policy/, and value_head.safetensors), optimizer.safetensors,
                                 stale_N.* (batches that wait to be trained on), replay.* (the replay buffer);
                                 nothing is a pickle
    of the OpenRLHF engine:      _actor/ and _critic/ (DeepSpeed's shards, under the names where OpenRLHF looks)

A folder appears under its name only when it is complete: ``atomic_folder`` fills it under a temporary name, writes
``hashes.json`` last, waits until all of it is on the disk, and only then renames it. Cached cold starts are such
folders, too. ``find_damage`` names each file that is missing or has changed, except README.md: people edit cards.

A checkpoint appears after the metrics of its step were logged. All parts of a step are one folder, so no resume can
combine the actor of one step with the critic of another. A run goes on from the newest checkpoint that is whole; newer
ones are renamed, to ``damaged_step_000060`` for instance. All randomness follows from the seed and the step, so no
generator's state has to be kept.

A checkpoint also holds the length and a hash of each log file, and a resume cuts them back to these lengths. So a
resume need not read the lines to find those of repeated steps, or an incomplete last line.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from sorl_env.errors import UserError
from sorl_env.folders import naming
from sorl_env.text import read_json
from sorl_tools.index.index import hash_file
from sorl_train.run.files import free_name, read_own_file, read_own_json, sync
from sorl_train.run.folder import RunDir

STATE = "state.json"
_NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class Whole:
    """An undamaged checkpoint after ``step`` training steps, and the newer ``damaged`` ones that were passed over, each
    with what is wrong with its files."""

    path: Path
    step: int
    damaged: dict[Path, str]

    @property
    def passed_over(self) -> list[str]:
        """One sentence for each damaged checkpoint, for the terminal and ``events.jsonl``."""
        return [f"passed over {path.name}: {why}" for path, why in self.damaged.items()]


def checkpoint_name(step: int) -> str:
    """The name of a step's folder, from which ``step_of`` reads it. Names sort as steps do."""
    return f"step_{step:06d}"


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step_"))


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints by their names, oldest first, whether they are whole or not."""
    return sorted((path for path in folder.glob("step_*") if _NAME.fullmatch(path.name)), key=step_of)


def resume_point(run_dir: RunDir) -> Whole:
    """The newest checkpoint that is whole and belongs to the run. All of its files are read, none is changed.

    Raises ``UserError`` if there is none, or the log files are damaged; it names every damaged file and a remedy.
    """
    run_id, damaged = run_dir.run_id, dict[Path, str]()
    restore_replaced(run_dir.checkpoints)
    for path in reversed(list_checkpoints(run_dir.checkpoints)):
        damage = find_damage(path, run_id)
        if not damage:
            _check_logs(run_dir, path)
            return Whole(path, step_of(path), damaged)
        damaged[path] = "; ".join(damage)
    anew = "start anew with another --run_dir or --overwrite (which moves this run aside)"
    if not damaged:
        raise UserError(f"nothing to resume: no checkpoint in {run_dir.checkpoints}; {anew}")
    lines = "\n".join(f"  {path.name}: {why}" for path, why in damaged.items())
    raise UserError(
        f"no checkpoint in {run_dir.checkpoints} is whole:\n{lines}\nRestore these files from a copy, or {anew}."
    )


def rewind(run_dir: RunDir, checkpoint: Path) -> None:
    """Bring the run's folder to where it was when the checkpoint was written: cut the log files back, and delete what
    a killed run left half written."""
    run_dir.remove_leftovers()
    remove_leftovers(run_dir.checkpoints)
    lengths = read_own_json(checkpoint / STATE)["logs"]
    for path in run_dir.logs:
        if length := lengths[path.name]["bytes"]:
            os.truncate(path, length)
            sync(path)
        else:
            path.unlink(missing_ok=True)  # a run that was not interrupted has no empty files either


def tell_state(run_dir: RunDir, tell: Callable[[str], None], point: Whole) -> None:
    """Say that the best policy is of a later step, and which damaged checkpoints a resume passed over, the latter in
    ``events.jsonl`` as well. They are renamed, so that neither a resume nor pruning counts them."""
    best = saved_best(run_dir.checkpoints)
    if best is not None and best[0] > point.step:
        tell(
            f"checkpoints/best is of step {best[0]}, after this checkpoint (success {best[1]:.3f}): it stays the "
            "best policy, and the summary names it, unless the resumed run comes to a better one"
        )
    for reason in point.passed_over:
        run_dir.append_event(point.step, "damaged_checkpoint", reason)
        tell(f"{reason}; going on from step {point.step}")
    for path in point.damaged:
        path.rename(free_name(path.with_name(f"damaged_{path.name}")))


def saved_best(checkpoints: Path) -> tuple[int, float] | None:
    """Step and success of the policy in ``best``; None if there is none, or if it is damaged."""
    if find_damage(checkpoints / "best"):
        return None
    state = read_own_json(checkpoints / "best" / STATE)
    return state["step"], state["success"]


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Delete all but ``keep`` checkpoints (at least one stays), and what a killed run left half written.

    The newest stays, and before it the newest of those that ``checkpoint.every`` asked for: one that a signal asked for
    leaves no trace after the next, so a run that was stopped and resumed keeps the same ones as one that was not.
    """
    found = list_checkpoints(folder)
    older = [path for path in found[:-1] if _is_scheduled(path)]
    kept = {*found[-1:], *older[max(0, len(older) - keep + 1) :]}
    for path in found:
        if path not in kept:
            remove_folder(path)
    remove_leftovers(folder)


def _is_scheduled(checkpoint: Path) -> bool:
    """Whether ``checkpoint.every`` asked for it. A damaged one counts as such."""
    try:
        return bool(read_own_json(checkpoint / STATE).get("scheduled", True))
    except UserError:
        return True


def log_lengths(run_dir: RunDir) -> dict[str, dict[str, Any]]:
    """Length and hash of each log file, which is on the disk by then: a power cut must not leave it shorter."""
    lengths = {}
    for path in run_dir.logs:
        if path.is_file():
            sync(path)
        content = path.read_bytes() if path.is_file() else b""
        lengths[path.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    sync(run_dir.path)
    return lengths


def _check_logs(run_dir: RunDir, checkpoint: Path) -> None:
    """Raise ``UserError`` unless each log file begins with its content when the checkpoint was written."""
    lengths = read_own_json(checkpoint / STATE)["logs"]
    for path in run_dir.logs:
        length = lengths[path.name]["bytes"]
        content = read_own_file(path)[:length] if length else b""
        if hashlib.sha256(content).hexdigest() != lengths[path.name]["sha256"]:
            raise UserError(
                f"{path} is damaged: it does not begin with the {length:,} bytes that it had when {checkpoint.name} "
                "was written. Restore it from a copy, or start anew with another --run_dir or --overwrite (which "
                "moves this run aside)."
            )


HASHES = "hashes.json"
_CARD = "README.md"


@contextmanager
def atomic_folder(
    folder: Path, run_id: str | None = None, *, keep_whole: bool = False, hash_up_to: int | None = None
) -> Iterator[Path]:
    """Give the block a temporary folder to fill, then rename it to ``folder``, in place of an older one of that name.

    Args:
        run_id: the run that the folder belongs to, which ``find_damage`` can check; None: it belongs to no run.
        keep_whole: if another process has written a whole folder there meanwhile, keep that one, as it may be in use.
        hash_up_to: files of more bytes than this are recorded by their size alone; None: all files are hashed.

    An ``OSError``, as of a full disk, leaves nothing behind.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        with naming(folder):
            remove_folder(temporary)
            temporary.mkdir(parents=True)
            yield temporary
            _write_manifest(temporary, run_id, hash_up_to)
            if not (keep_whole and folder.is_dir() and not find_damage(folder, run_id)):
                _put_in_place(temporary, folder)
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))  # its message for a full disk
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error
    finally:  # a full disk gets its space back; should other processes still write there, that hides no error
        shutil.rmtree(temporary, ignore_errors=True)


def _write_manifest(folder: Path, run_id: str | None, hash_up_to: int | None) -> None:
    """Write ``hashes.json``, which lists all files in the folder, and wait until all of them are on the disk."""
    files: dict[str, dict[str, Any]] = {}
    for path in _files(folder):
        path.chmod(folder.stat().st_mode & 0o666)  # safetensors lets nobody else read what it writes
        size = path.stat().st_size
        digest = hash_file(path) if hash_up_to is None or size <= hash_up_to else None
        files[path.relative_to(folder).as_posix()] = {"bytes": size, "sha256": digest}
    text = json.dumps({"run_id": run_id, "files": files}, indent=2) + "\n"
    (folder / HASHES).write_text(text, encoding="utf-8")
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Rename a complete folder to ``folder``. An older folder of that name is moved away first and deleted last: after
    a kill between the two renames, ``restore_replaced`` brings it back."""
    old = folder.with_name(f".{folder.name}.old")
    if os.path.lexists(folder):
        remove_folder(old)
        folder.rename(old)
    temporary.rename(folder)
    sync(folder.parent)
    remove_folder(old)


def restore_replaced(parent: Path) -> None:
    """Bring back each folder that a killed process had moved away before its successor took the name."""
    for old in parent.glob(".*.old"):
        folder = old.with_name(old.name.removeprefix(".").removesuffix(".old"))
        if not os.path.lexists(folder):
            old.rename(folder)


def remove_folder(path: Path) -> None:
    """Delete a folder. It is renamed first, so that a kill leaves no half-deleted folder under its name."""
    if path.is_symlink():
        path.unlink()
    elif path.is_dir():
        doomed = path if path.name.startswith(".") else path.with_name(f".{path.name}.{os.getpid()}.deleted")
        path.rename(doomed)
        shutil.rmtree(doomed)


def remove_leftovers(parent: Path) -> None:
    """Delete the temporary folders that killed runs left in ``parent``, and no other hidden files or folders."""
    for path in parent.glob(".*"):
        if path.is_dir() and path.name.startswith((".step_", ".best.")):
            shutil.rmtree(path)


def find_damage(folder: Path, run_id: str | None = None, *, allow_more: bool = False) -> list[str]:
    """How the folder differs from what was written: one line for each file, with its name; empty if it is whole.

    It has to belong to the run ``run_id``, unless that is None. Files that were added later count as damage, because a
    loader could read them, unless ``allow_more``.
    """
    try:
        written = read_json((folder / HASHES).read_bytes())
        files, of_run = written["files"], written["run_id"]
        damage = [
            f"{name} {why}" for name, facts in files.items() if (why := _damage_of(folder / name, facts))
        ]
    except FileNotFoundError:
        return [f"{HASHES} is missing: the folder was not written to its end"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return [f"{HASHES} is damaged ({error})"]
    if run_id is not None and of_run != run_id:
        return [f"{HASHES} says that it belongs to another run ({of_run}, this one is {run_id})"]
    if not allow_more:
        more = {path.relative_to(folder).as_posix() for path in _files(folder)} - files.keys()
        damage += [f"{name} was added after the folder was written" for name in sorted(more)]
    return damage


def _damage_of(path: Path, written: dict[str, Any]) -> str:
    try:
        if (size := path.stat().st_size) != written["bytes"]:
            return f"has {size:,} bytes, not {written['bytes']:,}"
        digest = written["sha256"]  # not ``get``: a changed name of the key must not turn the check off
        if digest is not None and hash_file(path) != digest:
            return "has changed since it was written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return ""


def _files(folder: Path) -> list[Path]:
    """The files that ``hashes.json`` lists: all but cards, hidden files (of file systems and editors) and itself."""
    found = [path for path in folder.rglob("*") if path.name not in (HASHES, _CARD) and not path.is_dir()]
    return sorted(path for path in found if not any(p[0] == "." for p in path.relative_to(folder).parts))
