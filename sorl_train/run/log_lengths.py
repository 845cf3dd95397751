"""How long a run's growing files were when a checkpoint was written, so that a resume cuts them back to just that.

A checkpoint of step N is written after the lines of step N. It holds the length and a hash of each file, so nothing
has to be told from the lines themselves: not which belong to a step that comes again, nor whether the last one is
whole. A file that does not begin with what the checkpoint saw is damaged, and the resume is refused.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_train.run.folder import RunDir, read_own_file
from sorl_train.run.hashed_folder import sync

Lengths = Mapping[str, Mapping[str, Any]]  # file name -> {"bytes": length, "sha256": hash of that many bytes}


def log_lengths(run_dir: RunDir) -> dict[str, dict[str, Any]]:
    """Length and hash of each file, once the disk holds it: a power cut must not leave it shorter than that."""
    lengths = {}
    for path in _logs(run_dir):
        content = b""
        if path.is_file():
            sync(path)
            content = path.read_bytes()
        lengths[path.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    sync(run_dir.path)
    return lengths


def check_logs(run_dir: RunDir, lengths: Lengths) -> None:
    """Raise ``UserError`` unless each file begins with what it held when the checkpoint was written."""
    found = []
    for path in _logs(run_dir):
        size, written = lengths[path.name]["bytes"], lengths[path.name]["sha256"]
        content = read_own_file(path) if os.path.lexists(path) else b""
        if len(content) < size:
            found.append(
                f"{path.name} has {len(content):,} bytes left of the {size:,} when the checkpoint was written"
            )
        elif hashlib.sha256(content[:size]).hexdigest() != written:
            found.append(
                f"{path.name}: its first {size:,} bytes have changed since the checkpoint was written"
            )
    if found:
        lines = "\n".join(f"  {line}" for line in found)
        raise UserError(
            f"{run_dir.path} cannot be resumed, for files that its steps are logged in are damaged:\n{lines}\nRestore "
            "them from a copy, or start anew with another --run_dir or --overwrite (which moves this run aside)."
        )


def cut_logs(run_dir: RunDir, lengths: Lengths, *, keep_events: bool = False) -> None:
    """Cut the files back to where they were when the checkpoint was written; ``keep_events``: not ``events.jsonl``."""
    for path in _logs(run_dir):
        if not path.is_file() or (keep_events and path == run_dir.events):
            continue
        if lengths[path.name]["bytes"]:
            os.truncate(path, lengths[path.name]["bytes"])
            sync(path)
        else:
            path.unlink()  # an uninterrupted run has no empty file either


def _logs(run_dir: RunDir) -> tuple[Path, ...]:
    return run_dir.metrics, run_dir.timings, run_dir.events
