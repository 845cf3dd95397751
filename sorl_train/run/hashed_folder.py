"""Folders that appear under their name only when they are complete, with a hash of each file in them.

Checkpoints, saved policies and cached cold starts are such folders. ``write_folder`` fills a folder under a temporary
name, writes ``hashes.json`` into it last, waits until all of it is on the disk, and only then renames it. So a kill at
any moment leaves either the whole folder or none. ``find_damage`` reads the files again and names each one that is
missing or has changed. A README.md has no hash, because people edit the cards of their policies.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from sorl_env.folders import naming
from sorl_env.text import read_json
from sorl_tools.index.manifest import hash_file

HASHES = "hashes.json"
FORMAT = (
    1  # of hashes.json and the folder's files; raised when older versions can no longer read a checkpoint
)
_CARD = "README.md"


def write_folder(
    folder: Path,
    write: Callable[[Path], None],
    run_id: str | None = None,
    *,
    keep_whole: bool = False,
    hash_up_to: int | None = None,
) -> Path:
    """Let ``write`` fill a temporary folder, then rename it to ``folder``, which replaces an older one of that name.

    Args:
        run_id: the run that the folder belongs to, which ``find_damage`` can check; None: it belongs to no run.
        keep_whole: if another process has written a whole folder there meanwhile, keep that one, as it may be in use.
        hash_up_to: files of more bytes than this are recorded by their size alone; None: all files are hashed.

    Raises:
        OSError: the disk is full or cannot be written to. Nothing is left behind then.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    remove_folder(temporary)
    with naming(folder):
        temporary.mkdir(parents=True)
    try:
        with naming(folder):
            write(temporary)
            seal(temporary, run_id, hash_up_to)
    except BaseException as error:
        # A full disk gets its space back. Should other processes still write there, the error must not be hidden.
        shutil.rmtree(temporary, ignore_errors=True)
        number = re.search(r"\(os error (\d+)\)$", str(error)) if type(error) is SafetensorError else None
        if number is None:
            raise
        # safetensors has its own exception for a full disk, with the error number in its message
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error
    if keep_whole and folder.is_dir() and not find_damage(folder, run_id):
        remove_folder(temporary)
        return folder
    with naming(folder):
        put_in_place(temporary, folder)
    return folder


def seal(folder: Path, run_id: str | None = None, hash_up_to: int | None = None) -> None:
    """Write ``hashes.json``, which lists all files in the folder, and wait until all of them are on the disk."""
    files: dict[str, dict[str, Any]] = {}
    for path in _files(folder):
        sync(path)
        size = path.stat().st_size
        hashed = {"sha256": hash_file(path)} if hash_up_to is None or size <= hash_up_to else {}
        files[path.relative_to(folder).as_posix()] = {"bytes": size, **hashed}
    content = {"format": FORMAT, "run_id": run_id, "files": files}
    text = json.dumps(content | {"sha256": hash_json(content)}, indent=2) + "\n"
    (folder / HASHES).write_text(text, encoding="utf-8")
    sync(folder / HASHES)
    for path in folder.rglob("*"):
        if path.is_dir():
            sync(path)
    sync(folder)


def put_in_place(temporary: Path, folder: Path) -> None:
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
    """Bring back each folder that a killed ``put_in_place`` moved away before its successor took the name."""
    for old in parent.glob(".*.old"):
        folder = old.with_name(old.name.removeprefix(".").removesuffix(".old"))
        if not os.path.lexists(folder):
            old.rename(folder)
            sync(parent)


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
        written = _read_hashes(folder)
    except FileNotFoundError:
        return [
            f"{HASHES} is missing: the folder was not written to its end, or by an earlier version of sorl"
        ]
    except OSError as error:
        return [f"{HASHES} {_why(error)}"]
    except ValueError:
        return [f"{HASHES} is damaged"]
    if written["format"] != FORMAT:
        return [f"{HASHES} has format {written['format']}, this version of sorl reads format {FORMAT}"]
    if run_id is not None and written["run_id"] != run_id:
        return [f"{HASHES} says that it belongs to another run ({written['run_id']}, this one is {run_id})"]
    files: dict[str, Any] = written["files"]
    found = [f"{name} {why}" for name, facts in files.items() if (why := _damage_of(folder / name, facts))]
    if not allow_more:
        there = {path.relative_to(folder).as_posix() for path in _files(folder)}
        found += [f"{name} was added after the folder was written" for name in sorted(there - files.keys())]
    return found


def _read_hashes(folder: Path) -> dict[str, Any]:
    """The content of ``hashes.json``. Raises ``ValueError`` if it was changed, ``OSError`` if it cannot be read."""
    content = read_json((folder / HASHES).read_bytes())
    claimed = content.pop("sha256", None) if isinstance(content, dict) else None
    if claimed is None or claimed != hash_json(content):
        raise ValueError("its hash is another one")
    return dict(content)


def _damage_of(path: Path, written: dict[str, Any]) -> str:
    """What is wrong with one file; empty if nothing is."""
    try:
        size = path.stat().st_size
        if size != written["bytes"]:
            return f"has {size:,} bytes, not {written['bytes']:,}"
        if "sha256" in written and hash_file(path) != written["sha256"]:
            return "has changed since it was written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return _why(error)
    return ""


def _why(error: OSError) -> str:
    return f"cannot be read ({error.strerror})"


def _files(folder: Path) -> list[Path]:
    """The files that ``hashes.json`` lists: all but cards, hidden files (of file systems and editors) and itself."""
    found = [path for path in folder.rglob("*") if path.name not in (HASHES, _CARD) and not path.is_dir()]
    return sorted(path for path in found if not any(p[0] == "." for p in path.relative_to(folder).parts))


def hash_json(content: Any) -> str:
    """SHA-256 of a JSON value, which depends neither on the order of its keys nor on the layout of its file."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    with naming(path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
