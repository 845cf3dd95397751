"""Folders that appear under their name only when they are complete, with a small manifest of the files in them.

Checkpoints, saved policies and cached cold starts are such folders. ``atomic_folder`` fills a folder under a temporary
name, writes ``hashes.json`` into it last, waits until all of it is on the disk, and only then renames it. So a kill at
any moment leaves either the whole folder or none. ``find_damage`` reads the files again and names each one that is
missing or has changed. A README.md is not listed, because people edit the cards of their policies.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from sorl_env.folders import naming
from sorl_env.text import read_json
from sorl_tools.index.manifest import hash_file
from sorl_train.run.files import sync

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

    Raises:
        OSError: the disk is full or cannot be written to. Nothing is left behind then.
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
        number = re.search(r"\(os error (\d+)\)$", str(error))  # its message for a full disk
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

    Args:
        run_id: the run that the folder has to belong to; None: any.
        allow_more: accept files that were added later. By default they count as damage: a loader could read them.
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
    """What is wrong with one file; empty if nothing is."""
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
