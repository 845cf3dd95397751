"""Metrics to ``metrics.jsonl`` and ``timings.jsonl``, TensorBoard and, if configured, Weights & Biases.

``metrics.jsonl`` is reproducible bit for bit: one line a step, keys sorted, floats in their shortest exact form.
Everything that depends on the clock is named ``time/...`` and goes to ``timings.jsonl``. A step has to be logged before
its checkpoint is written, which holds the lengths of the log files.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from sorl_env.errors import UserError
from sorl_train.config.files import read_resolved
from sorl_train.run.files import append_line
from sorl_train.run.folder import RunDir


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
