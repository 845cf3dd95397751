"""What a run leaves behind, to compare a resumed one with one that was never interrupted."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from sorl_train.engine import LocalEngine
from sorl_train.run.files import read_jsonl
from sorl_train.run.folder import RunDir

from .conftest import SHORT, train_short

# Everything that a checkpoint can hold: a critic, trajectories that wait, a best policy, a trust region that has taken
# steps back. Else as little as possible.
SMALL: dict[str, Any] = SHORT | {
    "update.steps": 4,
    "checkpoint.every": 1,
    "checkpoint.keep": 3,
    "eval.every": 2,
    "eval.num_examples": 4,
    "eval.num_examples_final": 4,
    "rollout.max_staleness": 1,
    "rollout.batch_size": 4,
    "rollout.save_every": 2,
    "update.mini_batch_size": 4,
    "update.trust_kl": 1e-9,
}
UNDERSCORED = {name.replace(".", "__"): value for name, value in SMALL.items()}


class Killed(BaseException):
    """In place of a SIGKILL, where the test goes on in the same process."""


def train_until(folder: Path, step: int, **settings: Any) -> RunDir:
    """A run that ends when it is about to save the trajectories of a step."""
    save = LocalEngine.save_trajectories

    def killed(self: LocalEngine, number: int, trajectories: Any) -> None:
        if number == step:
            raise Killed
        save(self, number, trajectories)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(LocalEngine, "save_trajectories", killed)
        train_short(folder, **settings)
    return RunDir(folder)


# Files in which times, the run's own name or its id are.
_OWN = {"config.yaml", "manifest.json", "timings.jsonl", "summary.json", "state.json", "hashes.json"}
_OWN |= {"report.html", "viewer.html"}
# in trajectories, and in the card of a policy
_TIMES = rb'(?:generate|tool|latency)_s\\?": ?[\d.e-]+|Code at commit .*'


def outcome(run: RunDir) -> dict[str, Any]:
    """What the same run always leaves: its files to the byte, but for times, and its summary."""
    summary = json.loads(run.summary.read_text())
    hashes = {}
    for path in run.path.rglob("*"):
        name = path.relative_to(run.path).as_posix()
        if path.is_file() and not name.startswith(("checkpoints/damaged", "metrics.jsonl", "events.jsonl")):
            content = b"" if path.name in _OWN else re.sub(_TIMES, b"", path.read_bytes())
            hashes[name] = hashlib.sha256(content).hexdigest()
    return hashes | {
        "metrics": run.metrics.read_bytes(),
        "events": run.events.read_bytes() if run.events.exists() else b"",
        "timed steps": [line["step"] for line in read_jsonl(run.timings)],
        "summary": {name: value for name, value in summary.items() if name not in ("wall_s", "peak_rss_mb")},
    }
