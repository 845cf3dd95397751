"""How long a run's log files were when a checkpoint was written, so that a resume can cut them back to that.

The checkpoint of step N is written after the lines of step N were logged, and holds the length and a hash of each log
file. So a resume need not look at the lines to know which of them belong to steps that are taken again, or whether the
last one is complete. If a file no longer begins with what was in it then, it is damaged, and the resume is refused.
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
    """Length and hash of each log file, which is on the disk by then: a power cut must not leave it shorter."""
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
    """Raise ``UserError`` unless each log file begins with its content when the checkpoint was written."""
    found = []
    for path in _logs(run_dir):
        size, written = lengths[path.name]["bytes"], lengths[path.name]["sha256"]
        content = read_own_file(path) if os.path.lexists(path) else b""
        if len(content) < size:
            found.append(
                f"{path.name} has {len(content):,} bytes, but had {size:,} when the checkpoint was written"
            )
        elif hashlib.sha256(content[:size]).hexdigest() != written:
            found.append(
                f"{path.name}: its first {size:,} bytes have changed since the checkpoint was written"
            )
    if found:
        lines = "\n".join(f"  {line}" for line in found)
        raise UserError(
            f"{run_dir.path} cannot be resumed, because log files are damaged:\n{lines}\nRestore "
            "them from a copy, or start anew with another --run_dir or --overwrite (which moves this run aside)."
        )


def cut_logs(run_dir: RunDir, lengths: Lengths, *, keep_events: bool = False) -> None:
    """Cut the log files back to their lengths in the checkpoint; with ``keep_events``, all but ``events.jsonl``."""
    for path in _logs(run_dir):
        if not path.is_file() or (keep_events and path == run_dir.events):
            continue
        if lengths[path.name]["bytes"]:
            os.truncate(path, lengths[path.name]["bytes"])
            sync(path)
        else:
            path.unlink()  # a run that was not interrupted has no empty files either


def _logs(run_dir: RunDir) -> tuple[Path, ...]:
    return run_dir.metrics, run_dir.timings, run_dir.events
