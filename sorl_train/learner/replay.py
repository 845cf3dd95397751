"""Replay: past trajectories join the new rollouts of the same question.

The buffer keeps trajectories with the log-probabilities that the trainer computed when they were new. These stay their
old log-probabilities, so the ratio of a replayed token is the true one, to the policy that drew it, however old it is.

``success`` (ARPO, arXiv:2505.16282) keeps successes. Where all rollouts of a question have equal rewards and none is a
success, past successes take the place of some of them, so that the group has a signal. ``recent`` (RePO,
arXiv:2506.09340) keeps everything, and adds the newest past rollouts of the question to its group. Advantages are then
those of the mixed group.

A step first replays and then stores. The newest trajectories are taken, whose policy is nearest.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sorl_env.trajectory import Trajectory, read_jsonl, write_jsonl
from sorl_train.config.run_settings import ReplayConfig
from sorl_train.learner.batch import Batch, Collected

_SCORES = ("old_log_probs", "ref_log_probs")  # the fields of a batch that are kept with a trajectory


@dataclass(frozen=True, eq=False)
class Stored:
    """A trajectory, and its rows (T,) of the fields ``_SCORES`` that its batch had."""

    trajectory: Trajectory
    scores: Mapping[str, Tensor]

    @property
    def version(self) -> int:
        """Training steps behind the weights that sampled it; of the oldest, if several did."""
        return min(turn.policy_version for turn in self.trajectory.turns)


@dataclass(frozen=True)
class Mixed:
    """What a step trains on: new trajectories and replayed ones."""

    batch: Batch | None  # of both; None if there is nothing to train on
    replayed: Sequence[
        Trajectory
    ] = ()  # those from the buffer, with the ids that they had when they were new
    ages: Sequence[
        int
    ] = ()  # training steps between the weights that sampled each of them and those to update


class ReplayBuffer:
    """The newest ``config.size`` trajectories that may be replayed, oldest first.

    Args:
        is_success: whether a trajectory solved its task.
    """

    def __init__(self, config: ReplayConfig, is_success: Callable[[Trajectory], bool]) -> None:
        self.config = config
        self._is_success = is_success
        self.stored: deque[Stored] = deque(maxlen=config.size)

    def step(self, collected: Collected, version: int, collate: Callable[[list[Trajectory]], Batch]) -> Mixed:
        """Replay into the collected batch, then store what is new; ``version`` is that of the weights to update."""
        if not self.config.size or collected.batch is None:
            return Mixed(collected.batch)
        while self.stored and version - self.stored[0].version > self.config.max_age:
            self.stored.popleft()
        new = [t for t in collected.trajectories if not t.excluded]
        members, taken = self._choose(new)
        batch = _with_scores(collate(members), collected.batch, taken) if taken else collected.batch
        self._store(new, collected.batch)
        past = taken.values()
        return Mixed(batch, [s.trajectory for s in past], [version - s.version for s in past])

    def _choose(self, new: Sequence[Trajectory]) -> tuple[list[Trajectory], dict[str, Stored]]:
        """The trajectories to train on, in groups, and those of them that come from the buffer, by id."""
        candidates: dict[tuple[str, str], list[Stored]] = defaultdict(list)
        for stored in self.stored:
            candidates[_question(stored.trajectory)].append(stored)
        groups: dict[str, list[Trajectory]] = defaultdict(list)
        for trajectory in new:
            groups[trajectory.group_id].append(trajectory)
        chosen: list[Trajectory] = []
        taken: dict[str, Stored] = {}
        for name, group in groups.items():
            past, room = candidates[_question(group[0])], self._room(group)
            joining = [past.pop() for _ in range(min(room, len(past)))]  # the newest, each in one group only
            kept = group[: len(group) - len(joining)] if self.config.mode == "success" else group
            chosen += [*kept, *(dataclasses.replace(stored.trajectory, group_id=name) for stored in joining)]
            taken |= {stored.trajectory.id: stored for stored in joining}
        return chosen, taken

    def _room(self, group: Sequence[Trajectory]) -> int:
        """How many past trajectories may join a group of new ones."""
        if self.config.mode == "recent":
            return self.config.per_group
        failed = not any(map(self._is_success, group)) and len({t.reward for t in group}) == 1
        return min(self.config.per_group, len(group) - 1) if failed else 0

    def _store(self, new: Sequence[Trajectory], batch: Batch) -> None:
        """Keep what has a token in the loss; in the mode ``success`` only successes."""
        for row, trajectory in enumerate(new):
            wanted = self.config.mode == "recent" or self._is_success(trajectory)
            if wanted and bool(batch.loss_mask[row].any()):
                tokens = len(trajectory.token_ids) - 1
                fields = {name: getattr(batch, name) for name in _SCORES}
                scores = {name: f[row, :tokens].clone() for name, f in fields.items() if f is not None}
                self.stored.append(Stored(trajectory, scores))

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write the buffer: trajectories, and the scores of all of them one after the other."""
        if not self.config.size:
            return
        write_jsonl(folder / "replay.jsonl", (stored.trajectory for stored in self.stored))
        names = self.stored[0].scores if self.stored else ()
        scores = {name: torch.cat([stored.scores[name] for stored in self.stored]) for name in names}
        save_file(scores, folder / "replay.safetensors")

    def load(self, folder: Path) -> None:
        """Inverse of ``save``."""
        self.stored.clear()
        if not self.config.size:
            return
        trajectories = read_jsonl(folder / "replay.jsonl")
        tokens = [len(trajectory.token_ids) - 1 for trajectory in trajectories]
        found = load_file(folder / "replay.safetensors")
        scores = {name: values.split(tokens) for name, values in found.items()}
        for row, trajectory in enumerate(trajectories):
            own = {name: parts[row].clone() for name, parts in scores.items()}
            self.stored.append(Stored(trajectory, own))


def _question(trajectory: Trajectory) -> tuple[str, str]:
    """What has to be equal for two trajectories to be in one group. Some data give two questions one id."""
    return trajectory.example_id, trajectory.prompt


def _with_scores(mixed: Batch, new: Batch, taken: Mapping[str, Stored]) -> Batch:
    """Fill in ``replayed``, and the scores of each row: those of the new batch, or those that were stored."""
    fields: dict[str, Tensor] = {"replayed": torch.tensor([name in taken for name in mixed.ids])}
    row_of = {name: row for row, name in enumerate(new.ids)}
    for field in _SCORES:
        computed: Tensor | None = getattr(new, field)
        if computed is None:
            continue
        fields[field] = torch.zeros(mixed.action_mask.shape)
        for row, name in enumerate(mixed.ids):
            tokens = int(mixed.lengths[row]) - 1
            own = taken[name].scores[field] if name in taken else computed[row_of[name], :tokens]
            fields[field][row, :tokens] = own
    return mixed.with_fields(**fields)


def replay_metrics(mixed: Mixed, buffer: ReplayBuffer) -> dict[str, float]:
    """Trajectories in the buffer after the step, the share of replayed ones in the batch, and their ages; nothing if
    replay is off."""
    if not buffer.config.size:
        return {}
    metrics = {"rollout/replay_size": float(len(buffer.stored))}
    if mixed.batch is not None:
        metrics["rollout/replay_share"] = len(mixed.replayed) / len(mixed.batch)
    if mixed.ages:
        metrics["rollout/replay_age_mean"] = fmean(mixed.ages)
        metrics["rollout/replay_age_max"] = float(max(mixed.ages))
    return metrics
