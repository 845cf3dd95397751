"""What a run leaves behind, to compare a resumed one with one that was never interrupted."""

from __future__ import annotations

import json
import re
from typing import Any

from sorl_train.run.checkpoint import list_checkpoints
from sorl_train.run.files import read_jsonl
from sorl_train.run.folder import RunDir
from sorl_train.run.hashed_folder import hash_file

from .conftest import SHORT

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


def outcome(run: RunDir) -> dict[str, Any]:
    """What the same run always leaves: its metrics, events and cards to the byte, its weights, the names of its
    checkpoints and files, its summary but for the clock."""
    saved, best = list_checkpoints(run.checkpoints), run.checkpoints / "best"
    summary = json.loads(run.summary.read_text())
    files = {path.relative_to(run.path) for path in run.trajectories.iterdir()}
    return {
        "metrics": run.metrics.read_bytes(),
        "events": run.events.read_bytes() if run.events.exists() else b"",
        "timed steps": [line["step"] for line in read_jsonl(run.timings)],
        "checkpoints": [path.name for path in saved],
        "weights": [hash_file(folder / "policy" / "model.safetensors") for folder in (saved[-1], best)],
        "trajectory files": sorted(map(str, files)),
        "trajectory card": re.sub("Code at commit .*", "", (run.trajectories / "README.md").read_text()),
        "summary": {name: value for name, value in summary.items() if name not in ("wall_s", "peak_rss_mb")},
    }
