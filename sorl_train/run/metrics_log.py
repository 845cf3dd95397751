"""Metrics to ``metrics.jsonl`` and ``timings.jsonl``, TensorBoard and, if configured, Weights & Biases.

``metrics.jsonl`` is reproducible bit for bit: one line a step, keys sorted, floats in their shortest exact form.
Everything that depends on the clock is named ``time/...`` and goes to ``timings.jsonl``. A step has to be logged before
its checkpoint is written, which holds the length and a hash of each log file: a resume cuts them back to these lengths.
So it need not look at the lines to know which of them belong to steps that are taken again, or whether the last one is
complete. If a file no longer begins with what was in it then, it is damaged, and the resume is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_train.config.files import read_resolved
from sorl_train.run.files import append_line, read_own_file
from sorl_train.run.folder import RunDir
from sorl_train.run.hashed_folder import sync

Lengths = Mapping[str, Mapping[str, Any]]  # file name -> {"bytes": length, "sha256": hash of that many bytes}


class MetricsLog:
    """Appends one line a step. Close it at the end."""

    def __init__(self, run_dir: RunDir, *, tensorboard: bool = True, wandb: str | None = None) -> None:
        """``wandb`` names a Weights & Biases project. Raises ``UserError`` if a package for a log is not installed."""
        self._run_dir = run_dir
        self._writer: Any = None
        self._wandb: Any = None  # both start with the first line
        self._use_tensorboard = tensorboard
        self._wandb_project = wandb
        if tensorboard:
            require_package("tensorboard", "log.tensorboard=true")
        if wandb is not None:
            require_package("wandb", f"log.wandb={wandb}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of one step. A value that is not finite becomes null, as JSON has no NaN."""
        timings = {name: value for name, value in metrics.items() if name.startswith("time/")}
        figures = {name: value for name, value in metrics.items() if name not in timings}
        for path, values in ((self._run_dir.metrics, figures), (self._run_dir.timings, timings)):
            if values:
                append_line(path, _line(step, values))
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        if self._use_tensorboard:
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                # TensorBoard hides what a killed run logged at this step or later.
                self._writer = SummaryWriter(log_dir=str(self._run_dir.tensorboard), purge_step=step)
            for name, value in finite.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()
        if self._wandb_project is not None:
            self._wandb = self._wandb or _start_wandb(self._wandb_project, self._run_dir)
            self._wandb.log(finite, step=step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._wandb is not None:
            self._wandb.finish()


def _start_wandb(project: str, run_dir: RunDir) -> Any:
    """The W&B run of a run folder. A resumed run continues it; a new run in a folder of that name starts another."""
    import wandb

    started = re.sub(r"\D", "", run_dir.read_manifest()["started"])
    settings = dataclasses.asdict(read_resolved(run_dir.config, check=False))
    name = run_dir.path.name
    return wandb.init(
        project=project,
        name=name,
        id=f"{name}-{started}",
        resume="allow",
        config=settings,
        dir=str(run_dir.path),
    )


def require_package(name: str, why: str) -> None:
    """Raise ``UserError`` when the package is not installed."""
    if importlib.util.find_spec(name) is None:
        raise UserError(f"{why} needs the package {name!r}: pip install {name}, or turn it off")


def _line(step: int, values: Mapping[str, float]) -> str:
    plain: dict[str, float | int | None] = {"step": step}
    for name in sorted(values):
        value = values[name]
        number = value if type(value) is int else float(value)
        plain[name] = number if math.isfinite(number) else None
    return json.dumps(plain, allow_nan=False) + "\n"


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


def cut_logs(run_dir: RunDir, lengths: Lengths) -> None:
    """Cut the log files back to their lengths in the checkpoint."""
    for path in _logs(run_dir):
        if not path.is_file():
            continue
        if lengths[path.name]["bytes"]:
            os.truncate(path, lengths[path.name]["bytes"])
            sync(path)
        else:
            path.unlink()  # a run that was not interrupted has no empty files either


def _logs(run_dir: RunDir) -> tuple[Path, ...]:
    return run_dir.metrics, run_dir.timings, run_dir.events
