"""Replay in whole runs of the local engine: what is replayed, what is logged, and that a resume repeats it."""

from __future__ import annotations

from pathlib import Path

from sorl_train.run.files import read_jsonl as read_lines

from .conftest import WORLD, train_short

# Eight questions, four in a step: each comes back after one to three steps.
SMALL_SET = {
    "task_args": WORLD | {"train_questions": 8},
    "algo": "so_grpo",
    "rollout__group_size": 4,
    "update__mini_batch_size": 16,
    "update__steps": 5,
    "sft__steps": 60,
    "replay__size": 64,
}


def test_a(tmp_path: Path) -> None:
    run_dir, _ = train_short(tmp_path / "run", **SMALL_SET)
    for line in read_lines(run_dir.metrics)[1:]:
        print({k: v for k, v in line.items() if "replay" in k or "success" in k or "signal" in k or "approx_kl" in k})
    run_dir, _ = train_short(tmp_path / "run2", **SMALL_SET, replay__mode="recent", update__trust_kl=0.01)
    for line in read_lines(run_dir.metrics)[1:]:
        print({k: v for k, v in line.items() if "replay" in k or "success" in k or "signal" in k or "kl" in k})
