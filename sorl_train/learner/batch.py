"""Trajectories as padded tensors: what the learner trains on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from sorl_env.trajectory import Trajectory, read_jsonl, write_jsonl
from sorl_train.algorithms import AnchorState


@dataclass(frozen=True, eq=False)
class Batch:
    """A right-padded, immutable batch. B trajectories, L tokens, T = L - 1 scored positions.

    Index t of a (B, T) field scores ``token_ids[:, t + 1]``: ``action_mask[b, t]`` is True when the policy sampled it.
    """

    token_ids: Tensor  # int64 (B, L)
    lengths: Tensor  # int64 (B,), tokens of each trajectory before the padding
    action_mask: Tensor  # bool (B, T), the tokens that the policy sampled
    # bool (B, T), the tokens that enter the loss: action_mask without excluded trajectories, and without those that
    # ``overlong.exclude`` filters
    loss_mask: Tensor
    turn_ids: Tensor  # int64 (B, T), -1 off the policy's tokens
    rollout_log_probs: Tensor  # float32 (B, T), as the sampler reported them
    rewards: Tensor  # float32 (B,), one total for each trajectory: the task's, shaped by ``overlong``
    token_rewards: (
        Tensor  # float32 (B, T), the same rewards, each on the last token of the turn that earned it
    )
    included: Tensor  # bool (B,), False for excluded trajectories
    group_ids: Tensor  # int64 (B,)
    ids: tuple[str, ...]
    # int64 (B, T), for each token of a turn the state that the turn started in: equal for turns of one group that
    # started in the same state, -1 off the policy's tokens. Only for algorithms that compare states
    state_ids: Tensor | None = None
    # int8 (B, T), index into ``token_classes.CLASSES``, -1 off the policy's tokens. Only for metrics
    token_classes: Tensor | None = None
    # float32 (B, T), filled in by ``score``, ``estimate_advantages`` and the update
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    # float32 (B, T), what the surrogate of each loss token is multiplied by, because the sampler's log-probabilities
    # are not the trainer's (``correct``); None where nothing is corrected
    correction: Tensor | None = None
    # float32 (B, T), those of the weights that begin the update of a batch which older weights sampled; None where they
    # are the old log-probabilities, or where nothing measures from them
    start_log_probs: Tensor | None = None
    # bool (B,), the trajectories from the replay buffer, which older weights sampled; None: there are none
    replayed: Tensor | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def began_log_probs(self) -> Tensor | None:
        """Log-probabilities (B, T) under the weights at the start of the batch's update; None if the update itself is
        the first to compute them."""
        return self.old_log_probs if self.start_log_probs is None else self.start_log_probs

    def with_fields(self, **fields: Tensor) -> Batch:
        """A copy in which these tensors are replaced."""
        return dataclasses.replace(self, **fields)  # type: ignore[arg-type]

    def rows(self, index: Sequence[int] | Tensor) -> Batch:
        """The trajectories ``index`` (N,), with padding trimmed to the longest of them."""
        chosen = torch.as_tensor(index, dtype=torch.long)
        length = int(self.lengths[chosen].max()) if len(chosen) else 1
        changed: dict[str, object] = {"ids": tuple(self.ids[i] for i in chosen.tolist())}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                part = value[chosen]
                if value.ndim == 2:
                    part = part[:, : length if f.name == "token_ids" else length - 1]
                changed[f.name] = part
        return dataclasses.replace(self, **changed)  # type: ignore[arg-type]

    def micro_batches(self, size: int, *, by_group: bool = False) -> Iterator[tuple[Tensor, Batch]]:
        """Pieces of at most ``size`` trajectories, each with its rows (N,) in the batch.

        Trajectories of similar length go together, so that there is little padding; with ``by_group`` those of a group,
        which have their beginning in common.
        """
        order = torch.argsort(self.lengths, descending=True, stable=True)
        if by_group:
            groups, member = torch.unique(self.group_ids[order], return_inverse=True)
            first = torch.full((len(groups),), len(order)).scatter_reduce(
                0, member, torch.arange(len(order)), "amin"
            )
            order = order[torch.argsort(first[member], stable=True)]
        for index in order.split(size):
            yield index, self.rows(index)

    def to(self, device: torch.device) -> Batch:
        """A copy with all tensors but ``lengths`` on ``device``."""
        moved = {
            f.name: getattr(self, f.name).to(device, non_blocking=True)
            for f in dataclasses.fields(self)
            if f.name != "lengths" and isinstance(getattr(self, f.name), Tensor)
        }
        return self.with_fields(**moved)


def collate(
    trajectories: Sequence[Trajectory],
    pad_id: int = 0,
    classify: Callable[[Trajectory], NDArray[np.int8]] | None = None,
    anchor_state: AnchorState | None = None,
) -> Batch:
    """Pad trajectories to the longest, to tensors (B, T) and (B,).

    A turn's reward items go on its last token, where ``gae`` expects them. ``classify`` fills in ``token_classes``,
    ``anchor_state`` the ``state_ids`` (``state_keys``).
    """
    size, length = len(trajectories), max(len(t.token_ids) for t in trajectories)
    token_ids = np.full((size, length), pad_id, dtype=np.int64)
    turn_ids = np.full((size, length), -1, dtype=np.int64)
    log_probs = np.zeros((size, length), dtype=np.float32)
    token_rewards = np.zeros((size, length), dtype=np.float32)
    classes = np.full((size, length), -1, dtype=np.int8)
    state_ids = np.full((size, length), -1, dtype=np.int64)
    states: dict[tuple[str, Hashable], int] = {}  # number of each state of each group
    for i, trajectory in enumerate(trajectories):
        n = len(trajectory.token_ids)
        token_ids[i, :n] = trajectory.token_ids
        turn_ids[i, :n] = trajectory.turn_ids
        log_probs[i, :n] = trajectory.rollout_log_probs
        if classify is not None:
            classes[i, :n] = classify(trajectory)
        for turn in trajectory.turns:
            token_rewards[i, turn.end - 1] += sum(turn.reward_items.values())
        if anchor_state is not None:
            for turn, key in zip(trajectory.turns, state_keys(trajectory, anchor_state), strict=True):
                number = states.setdefault((trajectory.group_id, key), len(states))
                state_ids[i, turn.start : turn.end] = number
    groups = {name: k for k, name in enumerate(dict.fromkeys(t.group_id for t in trajectories))}
    included = torch.tensor([not t.excluded for t in trajectories])
    action_mask = torch.from_numpy(turn_ids[:, 1:] >= 0)
    return Batch(
        token_ids=torch.from_numpy(token_ids),
        lengths=torch.tensor([len(t.token_ids) for t in trajectories]),
        action_mask=action_mask,
        loss_mask=action_mask & included[:, None],
        turn_ids=torch.from_numpy(turn_ids[:, 1:].copy()),
        rollout_log_probs=torch.from_numpy(log_probs[:, 1:].copy()),
        rewards=torch.tensor([t.reward for t in trajectories], dtype=torch.float32),
        token_rewards=torch.from_numpy(token_rewards[:, 1:].copy()),
        included=included,
        group_ids=torch.tensor([groups[t.group_id] for t in trajectories]),
        ids=tuple(t.id for t in trajectories),
        state_ids=None if anchor_state is None else torch.from_numpy(state_ids[:, 1:].copy()),
        token_classes=None if classify is None else torch.from_numpy(classes[:, 1:].copy()),
    )


def state_keys(trajectory: Trajectory, anchor_state: AnchorState) -> list[Hashable]:
    """For each turn, the state that it started in: token ids of the environment's text.

    ``observation``: the environment's last words, which are the prompt or its reply to the turn before. ``history``:
    all its words so far, in their order. The policy's own words do not belong to a state.
    """
    said: list[bytes] = []
    keys: list[Hashable] = []
    end = 0
    for turn in trajectory.turns:
        said.append(trajectory.token_ids[end : turn.start].tobytes())
        keys.append(said[-1] if anchor_state == "observation" else tuple(said))
        end = turn.end
    return keys


def rows_by_rank(batch: Batch, ranks: int) -> list[Tensor]:
    """The rows (N,) of each rank, longest trajectories first, so that ranks have about as many tokens."""
    order = torch.argsort(batch.lengths, descending=True, stable=True)
    return [order[rank::ranks] for rank in range(ranks)]


def by_rank(batch: Batch, ranks: int) -> list[Batch]:
    """The share of each rank, all of the same number of rows.

    Ranks gather weights and add up gradients together, so they need equally many micro-batches. Where the trajectories
    do not divide over the ranks, the last ones also get the shortest trajectory, without its loss tokens.
    """
    rows = rows_by_rank(batch, ranks)
    return [batch.rows(own) if len(own) == len(rows[0]) else _with_filler(batch, own) for own in rows]


def _with_filler(batch: Batch, rows: Tensor) -> Batch:
    share = batch.rows(torch.cat([rows, batch.lengths.argmin()[None]]))
    loss_mask = share.loss_mask.clone()
    loss_mask[-1] = False
    return share.with_fields(loss_mask=loss_mask)


def put_together(batch: Batch, rows: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
    """Put rows that were computed in pieces back into the batch's order: float32 (B, T), 0 in the padding."""
    whole = torch.zeros(batch.action_mask.shape)
    for index, part in zip(rows, parts, strict=True):
        whole[index, : part.shape[1]] = part[: len(index)].float()
    return whole


@dataclass(frozen=True)
class Collected:
    """One step's trajectories, and the tensors of those to train on (None if there are none)."""

    trajectories: list[Trajectory]
    batch: Batch | None


_SCORES = ("old_log_probs", "ref_log_probs", "values")


def save_waiting(folder: Path, waiting: Iterable[Collected]) -> None:
    """Write the batches that wait, with their scores: the weights that computed these are gone after a resume. Which
    trajectories they are of is written, too: limits may rise at a resume, and filters then choose others."""
    for number, item in enumerate(waiting):
        write_jsonl(folder / f"stale_{number}.jsonl", item.trajectories)
        if item.batch is not None:
            place = {trajectory.id: i for i, trajectory in enumerate(item.trajectories)}
            found = {"rows": torch.tensor([place[name] for name in item.batch.ids])}
            scores = ((name, getattr(item.batch, name)) for name in _SCORES)
            found |= {name: values for name, values in scores if values is not None}
            save_file(found, folder / f"stale_{number}.safetensors")


def load_waiting(folder: Path, make_batch: Callable[[list[Trajectory]], Batch]) -> list[Collected]:
    """Inverse of ``save_waiting``; ``make_batch`` makes the tensors of the trajectories that are trained on."""
    waiting: list[Collected] = []
    while (path := folder / f"stale_{len(waiting)}.jsonl").is_file():
        trajectories, batch = list(read_jsonl(path)), None
        if (scored := path.with_suffix(".safetensors")).is_file():
            found = load_file(scored)
            batch = make_batch([trajectories[i] for i in found.pop("rows").tolist()]).with_fields(**found)
        waiting.append(Collected(trajectories, batch))
    return waiting
