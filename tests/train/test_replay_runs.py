"""Replay in whole runs of the local engine: what is replayed, what is logged, and that a resume repeats it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_env.errors import UserError
from sorl_env.trajectory import Trajectory, read_jsonl
from sorl_train.engine import LocalEngine
from sorl_train.learner.batch import Batch
from sorl_train.report.report import main as report
from sorl_train.rollout.metrics import success_rate
from sorl_train.run.files import read_jsonl as read_lines
from sorl_train.run.folder import RunDir
from sorl_train.run.metrics_log import iter_token_records

from .conftest import WORLD, train_short

# Eight questions, of which a step asks four: each comes back after one to three steps.
FEW: dict[str, Any] = {
    "task_args": WORLD | {"train_questions": 8},
    "sft__steps": 60,
    "seed": 2,
    "algo": "so_grpo",
    "rollout__group_size": 2,
    "rollout__batch_size": 8,
    "rollout__save_every": 1,
    "update__mini_batch_size": 8,
    "update__steps": 5,
    "optim__lr": 3e-3,
    "eval__num_examples": 4,
    "eval__num_examples_final": 4,
    "eval__search_off": False,
    "replay__size": 24,
}


class Watched:
    """What the updates of a run were given."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.batches: dict[int, Batch] = {}
        self.started: dict[int, Batch] = {}
        update, begin = LocalEngine.update, LocalEngine._with_start

        def watched(engine: LocalEngine, batch: Batch, step: int) -> dict[str, float]:
            self.batches[step] = batch
            return update(engine, batch, step)

        def began(engine: LocalEngine, batch: Batch) -> Batch:
            self.started[engine.step + 1] = begin(engine, batch)
            return self.started[engine.step + 1]

        patch.setattr(LocalEngine, "update", watched)
        patch.setattr(LocalEngine, "_with_start", began)

    def replayed(self) -> list[tuple[int, str]]:
        """Step and id of every replayed trajectory."""
        return [
            (step, name)
            for step, batch in self.batches.items()
            for name in batch.ids
            if not name.startswith(f"s{step}-")
        ]


def drawn(run_dir: RunDir, step: int) -> list[Trajectory]:
    return read_jsonl(run_dir.trajectories / f"step_{step:06d}.jsonl")


def log_probs_of(batch: Batch, name: str, field: str = "old_log_probs") -> torch.Tensor:
    row = batch.ids.index(name)
    found: torch.Tensor = getattr(batch, field)[row, : int(batch.lengths[row]) - 1]
    return found


def test_a_success_of_an_earlier_step_is_trained_on_where_all_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Five steps. What is replayed keeps the log-probabilities of its own step to the bit, and the current weights,
    which began the batch, give it others; figures and files are those of the new rollouts alone."""
    seen = Watched(monkeypatch)
    run_dir, _ = train_short(tmp_path / "run", **FEW, update__trust_kl=0.01)
    lines = {line["step"]: line for line in read_lines(run_dir.metrics)[1:]}
    every = {t.id: t for step in lines for t in drawn(run_dir, step)}
    replayed = seen.replayed()
    assert replayed
    moved: list[float] = []
    for step, name in replayed:
        batch, own = seen.batches[step], every[name]
        first = own.turns[0].policy_version + 1  # the step that collected it
        assert own.reward == 1.0 and first < step
        group = [t for t in drawn(run_dir, step) if t.prompt == own.prompt]
        assert len(group) == 2 and {t.reward for t in group} == {0.0}
        assert group[0].id in batch.ids and group[1].id not in batch.ids
        old = log_probs_of(batch, name)
        assert torch.equal(old, log_probs_of(seen.batches[first], name))
        sampled = torch.from_numpy(own.rollout_log_probs[1:])
        torch.testing.assert_close(old, sampled, atol=1e-4, rtol=0)
        moved.append(float((log_probs_of(seen.started[step], name, "start_log_probs") - old).abs().max()))
        new = batch.ids.index(group[0].id)
        assert float(batch.advantages[batch.ids.index(name)].max()) > 0 > float(batch.advantages[new].min())  # type: ignore[index]
    assert max(moved) > 1e-3
    for step, line in lines.items():
        names = [name for at, name in replayed if at == step]
        assert line["rollout/replay_share"] == len(names) / 8
        ages = [step - 1 - every[name].turns[0].policy_version for name in names]
        assert line.get("rollout/replay_age_mean") == (sum(ages) / len(ages) if ages else None)
        assert line.get("rollout/replay_age_max") == (max(ages) if ages else None)
        assert line["rollout/success"] == success_rate(drawn(run_dir, step))
        assert line["rollout/staleness"] == 0.0
        began = seen.started[step]
        assert (began.start_log_probs is None) == (not names)
        if began.start_log_probs is not None and began.old_log_probs is not None:
            gap = (began.start_log_probs - began.old_log_probs)[
                began.loss_mask
            ]  # the ratios of the only step
            assert line["loss/approx_kl"] == pytest.approx(
                float(gap.square().mean()) / 2, rel=1e-3, abs=1e-12
            )
        records = iter_token_records(run_dir.trajectories / f"step_{step:06d}.tokens.jsonl.gz")
        assert all(record.id.startswith(f"s{step}-") for record in records)
    assert lines[5]["rollout/replay_size"] == sum(t.reward == 1.0 for t in every.values())
    page = tmp_path / "report.html"
    assert report([str(run_dir.path), "--out", str(page)]) in (0, None)
    assert "Replay" in page.read_text()


def test_a_run_that_asks_nothing_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"2 training steps \(update.steps\) of 4 questions ask none of the 8"
    ):
        train_short(tmp_path / "run", **(FEW | {"update__steps": 2}))
