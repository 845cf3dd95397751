"""Folders that appear under their name as a whole, with a hash of each file: checkpoints, policies, cold starts.

``write_folder`` fills a folder under a temporary name, writes ``hashes.json`` into it last, has the disk confirm all of
it, and only then gives the folder its name. ``find_damage`` reads the files again and names each that is missing or
has changed. A README.md carries no hash, since people edit the cards of their policies.
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

from sorl_env.text import read_json
from sorl_tools.index.manifest import hash_file

HASHES = "hashes.json"
FORMAT = 1  # of hashes.json and of what it lists; raised when an older version could not read a checkpoint any more
_CARD = "README.md"


def write_folder(
    folder: Path, write: Callable[[Path], None], run_id: str | None = None, *, keep_whole: bool = False
) -> Path:
    """Have ``write`` fill a temporary folder, then give it its name ``folder`` at once, in place of an older one.

    Args:
        run_id: the run that the folder belongs to (None: any), which ``find_damage`` compares.
        keep_whole: if another process put a whole folder there meanwhile, keep that one: somebody may be reading it.

    Raises:
        OSError: the disk is full, or cannot be written. Nothing is left behind then.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    remove_folder(temporary)
    temporary.mkdir(parents=True)
    try:
        write(temporary)
        seal(temporary, run_id)
    except BaseException as error:
        remove_folder(temporary)  # a full disk gets its space back
        number = re.search(r"\(os error (\d+)\)$", str(error)) if type(error) is SafetensorError else None
        if number is None:
            raise
        # safetensors has an error of its own for a full disk, which says the number in its message
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error
    if keep_whole and folder.is_dir() and not find_damage(folder, run_id):
        remove_folder(temporary)
        return folder
    put_in_place(temporary, folder)
    return folder


def seal(folder: Path, run_id: str | None = None) -> None:
    """Write ``hashes.json`` over all files in the folder, and wait until the disk holds all of them."""
    files = {}
    for path in _files(folder):
        sync(path)
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": hash_file(path)}
    content = {"format": FORMAT, "run_id": run_id, "files": files}
    text = json.dumps(content | {"sha256": hash_json(content)}, indent=2) + "\n"
    (folder / HASHES).write_text(text, encoding="utf-8")
    sync(folder / HASHES)
    for path in folder.rglob("*"):
        if path.is_dir():
            sync(path)
    sync(folder)


def put_in_place(temporary: Path, folder: Path) -> None:
    """Rename a whole folder to ``folder``. One of that name is removed only once its successor has the name; a kill
    between the two renames leaves it under another name, from which ``restore_replaced`` brings it back."""
    old = _replaced(folder)
    if os.path.lexists(folder):
        remove_folder(old)
        folder.rename(old)
    temporary.rename(folder)
    sync(folder.parent)
    remove_folder(old)


def restore_replaced(parent: Path) -> None:
    """Bring back each folder that a killed ``put_in_place`` had moved away without a successor in its place."""
    for old in parent.glob(".*.old"):
        folder = old.with_name(old.name.removeprefix(".").removesuffix(".old"))
        if not os.path.lexists(folder):
            old.rename(folder)
            sync(parent)


def remove_folder(path: Path) -> None:
    """Delete a folder, which loses its name before its files: no kill leaves a half-deleted folder under it."""
    if path.is_symlink():
        path.unlink()
    elif path.is_dir():
        doomed = path if path.name.startswith(".") else path.with_name(f".{path.name}.{os.getpid()}.deleted")
        path.rename(doomed)
        shutil.rmtree(doomed)


def remove_leftovers(parent: Path) -> None:
    """Delete the temporary folders that killed writers left in ``parent``; nothing else, hidden or not."""
    for path in parent.glob(".*"):
        if path.is_dir() and path.name.startswith((".step_", ".best.")):
            shutil.rmtree(path)


def find_damage(folder: Path, run_id: str | None = None, *, allow_more: bool = False) -> list[str]:
    """What keeps the folder from being what was written: one line for each file, naming it; empty if it is whole.

    Args:
        run_id: the run that it has to belong to; None: any.
        allow_more: files that were added later are no damage. (They may be, where a loader would take them up.)
    """
    try:
        written = _read_hashes(folder)
    except OSError as error:
        why = "is missing: nothing can be checked" if isinstance(error, FileNotFoundError) else _why(error)
        return [f"{HASHES} {why}"]
    except ValueError:
        return [f"{HASHES} is damaged"]
    if written["format"] != FORMAT:
        return [f"{HASHES} is of format {written['format']}, this version of sorl reads {FORMAT}"]
    if run_id is not None and written["run_id"] != run_id:
        return [f"{HASHES} says that it belongs to another run ({written['run_id']}, this one is {run_id})"]
    files: dict[str, Any] = written["files"]
    found = [f"{name} {why}" for name, facts in files.items() if (why := _damage_of(folder / name, facts))]
    if not allow_more:
        there = {path.relative_to(folder).as_posix() for path in _files(folder)}
        found += [f"{name} was added after it was written" for name in sorted(there - files.keys())]
    return found


def _read_hashes(folder: Path) -> dict[str, Any]:
    """The content of ``hashes.json``. Raises ValueError when it is not as it was written, OSError as reading does."""
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
        return "" if hash_file(path) == written["sha256"] else "has changed since it was written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return _why(error)


def _why(error: OSError) -> str:
    return f"cannot be read ({error.strerror})"


def _files(folder: Path) -> list[Path]:
    """Files that carry a hash: all but cards, hidden ones (of file systems and editors) and the hashes themselves."""
    found = [path for path in folder.rglob("*") if path.name not in (HASHES, _CARD) and not path.is_dir()]
    return sorted(path for path in found if not any(p[0] == "." for p in path.relative_to(folder).parts))


def hash_json(content: Any) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys and its layout in a file."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sync(path: Path) -> None:
    """Wait until the disk holds a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replaced(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")
