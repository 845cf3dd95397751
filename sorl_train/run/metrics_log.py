"""Metrics to ``metrics.jsonl`` and ``timings.jsonl``, TensorBoard and, if configured, W&B or trackio; token records.

``metrics.jsonl`` is reproducible bit for bit: one line a step, keys sorted, floats in their shortest exact form.
Everything that depends on the clock is named ``time/...`` and goes to ``timings.jsonl``. A step has to be logged before
its checkpoint is written, which holds the lengths of the log files.

Token records are per-token figures of the loss. ``trajectories/step_000010.tokens.jsonl.gz`` goes with
``step_000010.jsonl``: one line for each trajectory, with lists of equal length over the tokens that the policy sampled
(``action_mask``), in their order::

    {"id": "s10-p3/0", "tokens": ["<think>", "I", ...], "turn": [0, 0, ...], "log_ratio": [0.0123, ...],
     "ratio": [...], "advantage": [...], "entropy": [...], "clipped": [0, 1, ...]}

The name ends in ``.gz`` so that ``step_*.jsonl``, the pattern by which ``datasets`` loads trajectories, does not match.
"""

from __future__ import annotations

import dataclasses
import gzip
import importlib.util
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_train.config.files import read_resolved
from sorl_train.run.files import append_line, atomic_write
from sorl_train.run.folder import RunDir


class MetricsLog:
    """Appends one line a step. Close it at the end."""

    def __init__(
        self,
        run_dir: RunDir,
        *,
        tensorboard: bool = True,
        wandb: str | None = None,
        trackio: str | None = None,
    ) -> None:
        """``wandb`` names a Weights & Biases project, ``trackio`` one of trackio. Raises ``UserError`` if a package for
        a log is not installed."""
        self._run_dir = run_dir
        self._writer: Any = None
        self._trackers: list[Any] = []  # all start with the first line
        self._use_tensorboard = tensorboard
        named = (("wandb", wandb), ("trackio", trackio))
        self._projects = {package: project for package, project in named if project is not None}
        if tensorboard:
            require_package("tensorboard", "log.tensorboard=true")
        for package, project in self._projects.items():
            require_package(package, f"log.{package}={project}")

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
        if not self._trackers:
            self._trackers = [_start_tracker(*item, self._run_dir) for item in self._projects.items()]
        for tracker in self._trackers:
            tracker.log(finite, step=step)

    def close(self) -> None:
        """Finish the logs of TensorBoard and W&B."""
        if self._writer is not None:
            self._writer.close()
        for tracker in self._trackers:
            tracker.finish()


def _start_tracker(package: str, project: str, run_dir: RunDir) -> Any:
    """The run of a run folder in W&B or trackio. A resumed run continues it; a new run in a folder of that name starts
    another."""
    started = re.sub(r"\D", "", run_dir.read_manifest()["started"])
    settings = dataclasses.asdict(read_resolved(run_dir.config, check=False))
    name = run_dir.path.name
    if package == "trackio":  # its runs have no id beside the name
        import trackio

        return trackio.init(
            project=project, name=f"{name}-{started}", resume="allow", config=settings, embed=False
        )
    import wandb

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


@dataclass(frozen=True)
class TokenRecord:
    """One trajectory's figures, each a sequence over its N sampled tokens; NaN if a figure was not finite.

    Attributes:
        id: the trajectory's.
        tokens: each token's text; together they are the policy's messages, turn by turn.
        turn: 0-based turn of each token.
        log_ratio: log(pi / pi_old) of the token in the last epoch that trained on it.
        ratio: the importance ratio that the loss used: the token's, its turn's or its sequence's.
        advantage, entropy: as in the loss; entropy in nats.
        clipped: 1 if the ratio was clipped, so that the token gave no gradient.
        weight: what the token's objective was multiplied by to correct for the sampler; empty where nothing was
            corrected, and then it is not in the file.
    """

    id: str
    tokens: Sequence[str]
    turn: Sequence[int]
    log_ratio: Sequence[float]
    ratio: Sequence[float]
    advantage: Sequence[float]
    entropy: Sequence[float]
    clipped: Sequence[int]
    weight: Sequence[float] = ()

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in ("tokens", *_KINDS)}
        if not self.weight:
            del lengths["weight"]
        if len(set(lengths.values())) > 1:
            raise ValueError(f"token record {self.id}: sequences of different lengths: {lengths}")


_KINDS = {"turn": int, "log_ratio": float, "ratio": float, "advantage": float, "entropy": float}
_KINDS |= {"clipped": int, "weight": float}


def sidecar_of(trajectories: Path) -> Path | None:
    """The token records for a file of trajectories (``step_000010.jsonl``); None if there are none."""
    path = trajectories.with_name(f"{trajectories.stem}.tokens.jsonl.gz")
    return path if path.is_file() else None


def write_token_records(path: Path, records: Iterable[TokenRecord]) -> None:
    """Write one record a line, gzipped. Floats have 4 digits after the point; what is not finite becomes null. The file
    appears whole or not at all."""
    text = "".join(_encode(record) for record in records)
    atomic_write(path, gzip.compress(text.encode(), mtime=0))


def iter_token_records(path: Path) -> Iterator[TokenRecord]:
    """The records of a file, one at a time. Raises ``UserError`` with file and line where one is damaged."""
    number = 0
    with gzip.open(path, "rb") as stream:
        try:
            for number, line in enumerate(stream, start=1):
                yield _decode(line, f"{path}:{number}")
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(
                f"{path}:{number + 1}: the gzip stream is broken ({error}); was it cut off?"
            ) from error


def _encode(record: TokenRecord) -> str:
    plain: dict[str, object] = {"id": record.id, "tokens": list(record.tokens)}
    for name, kind in _KINDS.items():
        values = getattr(record, name)
        if name != "weight" or values:
            plain[name] = [int(value) if kind is int else _rounded(float(value)) for value in values]
    return json.dumps(plain, separators=(",", ":")) + "\n"


def _rounded(value: float) -> float | None:
    return round(value, 4) + 0.0 if math.isfinite(value) else None  # + 0.0: no negative zero


def _decode(line: bytes, where: str) -> TokenRecord:
    try:
        record = json.loads(line)
        columns: dict[str, Any] = {
            name: [math.nan if value is None else kind(value) for value in record[name]]
            for name, kind in _KINDS.items()
            if name != "weight" or name in record
        }
        return TokenRecord(id=str(record["id"]), tokens=[str(token) for token in record["tokens"]], **columns)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{where}: this is not a token record ({error!r}); restore the file from a copy, or delete it"
        ) from error
