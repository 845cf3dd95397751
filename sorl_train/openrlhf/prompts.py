"""Which examples OpenRLHF samples (those of the local engine, in its order), and which samples are too old."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

from sorl_env.trajectory import StopReason, Trajectory
from sorl_train.config.run_settings import RolloutConfig
from sorl_train.rollout.jobs import evaluation_jobs, training_jobs

Item = tuple[list[None], list[str], list[str], list[None]]


class JobLoader:
    """Replaces OpenRLHF's prompt loader: yields (data sources, prompts, labels, images), one of each.

    The label says which example it is; the prompt is empty, because the environment writes it.
    """

    def __init__(self, labels: list[str]) -> None:
        self._labels = labels
        self._next = 0

    def __len__(self) -> int:
        return len(self._labels)

    def __iter__(self) -> Iterator[Item]:
        while self._next < len(self._labels):
            label = self._labels[self._next]
            self._next += 1
            yield [None], [""], [label], [None]

    def state_dict(self) -> dict[str, Any]:
        """The position, for a checkpoint."""
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position of ``state_dict``."""
        self._next = state["next"]


def training_loader(rollout: RolloutConfig, seed: int, steps: int, num_examples: int) -> JobLoader:
    """All prompts of the run, step by step."""
    labels: list[str] = []
    for step in range(1, steps + 1):
        jobs = training_jobs(rollout, seed, num_examples, step)
        groups = {job.group_id: job.example_index for job in jobs}
        labels.extend(_label("train", group, index) for group, index in groups.items())
    return JobLoader(labels)


def evaluation_loader(seed: int, num_examples: int, limit: int, kind: str = "eval") -> JobLoader:
    """The examples of an evaluation, the same ones in each evaluation of a run."""
    jobs = evaluation_jobs(seed, num_examples, limit)
    return JobLoader([_label(kind, job.group_id, job.example_index) for job in jobs])


def exclude_older(trajectories: Sequence[Trajectory], oldest: int) -> list[Trajectory]:
    """Mark as aborted the trajectories with a turn sampled by weights older than version ``oldest``."""
    return [
        dataclasses.replace(t, stop_reason=StopReason.ABORTED, error="sampled with weights that are too old")
        if not t.excluded and any(turn.policy_version < oldest for turn in t.turns)
        else t
        for t in trajectories
    ]


def _label(kind: str, group: str, index: int) -> str:
    return json.dumps({"kind": kind, "group": group, "index": index})
