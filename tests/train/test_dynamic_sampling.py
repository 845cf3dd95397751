"""Dynamic sampling: which groups are kept, what is drawn in their place, and what happens when there is nothing."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_env.tool import ToolUnavailableError
from sorl_env.tool.toolbox import Toolbox
from sorl_env.trajectory import StopReason, Trajectory, read_jsonl
from sorl_train.config.run_settings import OverlongConfig
from sorl_train.engine import LocalEngine
from sorl_train.learner.batch import collate
from sorl_train.learner.dapo import num_groups, rows_with_signal, shape_and_filter, with_signal
from sorl_train.rollout.environments import SilentTool
from sorl_train.rollout.jobs import further_jobs, training_jobs
from sorl_train.run.files import read_jsonl as read_lines
from sorl_train.run.folder import RunDir

from .conftest import short_config, train_short
from .learner.test_batch import trajectory

GROUPS = {
    "algo": "so_grpo",
    "rollout__group_size": 4,
    "rollout__batch_size": 16,
    "rollout__dynamic_sampling": 3,
}


def member(group: str, reward: float, **fields: Any) -> Trajectory:
    return trajectory(f"{group}{reward}", [1, 2, 3], [-1, 0, 0], [reward], group_id=group, **fields)


def test_groups_with_a_signal_by_hand() -> None:
    """a: all right. b: one of three. c: one usable rollout. d: rewards differ, but no token is in the loss."""
    late = {"stop_reason": StopReason.MAX_TURNS}
    found = [*[member("a", 1.0)] * 3, *[member("b", r) for r in (0.0, 1.0, 0.0)], member("c", 1.0)]
    found += [member("d", 0.0, **late), member("d", 1.0, **late)]
    batch = shape_and_filter(collate(found), found, 99, OverlongConfig(exclude="max_turns"))
    assert rows_with_signal(batch).tolist() == [False] * 3 + [True] * 3 + [False] * 3
    kept = with_signal(batch)
    assert kept.ids == ("b0.0", "b1.0", "b0.0") and num_groups(kept) == 1 and num_groups(None) == 0
    assert len(with_signal(batch.rows([0, 1, 6]))) == 0


def test_further_prompts_are_new_in_their_step_and_the_same_in_each_run() -> None:
    config = short_config(**GROUPS)
    rollout, seed = config.rollout, config.seed
    first = training_jobs(rollout, seed, 48, 3)
    visited = {job.example_index for job in first}
    jobs = further_jobs(rollout, seed, 48, 3, 1, visited, 2)
    again = visited | {job.example_index for job in jobs}
    more = further_jobs(rollout, seed, 48, 3, 2, again, 3)
    assert [job.group_id for job in jobs[::4]] == ["s3-r1-p0", "s3-r1-p1"] and len(jobs) == 8
    assert len(again | {job.example_index for job in more}) == 4 + 2 + 3
    every = [*first, *jobs, *more]
    assert len({job.id for job in every}) == len({job.seed for job in every}) == len(every)
    assert jobs == further_jobs(rollout, seed, 48, 3, 1, visited, 2)
    assert {job.example_index for job in jobs} != {
        job.example_index for job in further_jobs(rollout, seed, 48, 4, 1, visited, 2)
    }
    assert len(further_jobs(rollout, seed, 48, 3, 1, set(range(47)), 5)) == 4  # the examples run out
    assert further_jobs(rollout, seed, 48, 3, 1, range(48), 5) == []
    assert further_jobs(rollout, seed, 48, 3, 1, visited, 0) == []


def rewards_of(run_dir: RunDir, step: int) -> dict[str, set[float]]:
    """The rewards of each group of a step that are not excluded, in the order in which groups were drawn."""
    groups: dict[str, set[float]] = {}
    for t in read_jsonl(run_dir.trajectories / f"step_{step:06d}.jsonl"):
        groups.setdefault(t.group_id, set()).update(() if t.excluded else (t.reward,))
    return groups


def test_a_batch_is_filled_as_far_as_the_rounds_go(tmp_path: Path) -> None:
    """Batches of four groups; every rollout is counted and kept in the record, those without signal train nothing."""
    run_dir, _ = train_short(tmp_path / "run", **GROUPS)
    further = 0
    for line in read_lines(run_dir.metrics)[1:]:
        step = line["step"]
        groups = rewards_of(run_dir, step)
        kept = [name for name, rewards in groups.items() if len(rewards) > 1]
        assert line["rollout/dynamic_drawn"] == 4 * len(groups) and line["rollout/dynamic_kept"] == 4 * len(
            kept
        )
        assert line["rollout/dynamic_missing"] == 4 - len(kept) >= 0
        if len(kept) < 4:
            assert any(name.startswith(f"s{step}-r3") for name in groups)  # not before the last round
        assert line["loss/signal_frac"] == 1.0 and line["loss/policy_updates"] == -(-len(kept) // 2)
        further += len(groups) - 4
    assert further > 0


@pytest.mark.parametrize(
    ("settings", "why", "figures"),
    [
        (
            GROUPS,
            ("rollout.dynamic_sampling 3", "64 rollouts"),
            {"rollout/dynamic_kept": 0.0, "rollout/dynamic_drawn": 64.0, "rollout/dynamic_missing": 4.0},
        ),
        (
            {"overlong__exclude": "max_turns,max_tokens,invalid"},
            ("overlong.exclude",),
            {"rollout/overlong_filtered_frac": 1.0},
        ),
    ],
    ids=["no group has a signal", "no token is in the loss"],
)
def test_a_batch_without_anything_to_learn_makes_no_step_and_says_so(
    settings: dict[str, Any],
    why: tuple[str, ...],
    figures: dict[str, float],
    tiny_folder: str,
    tmp_path: Path,
) -> None:
    """A policy of random weights answers nothing, and has a reward of 0 everywhere."""
    settings = settings | {"model": tiny_folder, "limits__max_new_tokens": 12, "limits__max_turns": 2}
    run_dir, summary = train_short(tmp_path / "run", **settings)
    lines = read_lines(run_dir.metrics)[1:]
    assert summary["steps"] == len(lines) == 2
    for line in lines:
        assert "loss/policy" not in line and figures.items() <= line.items()
    events = read_lines(run_dir.events)
    assert [(event["kind"], event["step"]) for event in events] == [("no_step", 1), ("no_step", 2)]
    assert all(words in events[0]["reason"] for words in why)


class DeadTool(SilentTool):
    def __call__(self, *_: Any, **__: Any) -> Any:
        raise ToolUnavailableError("the server is gone")


def test_an_outage_ends_the_rounds_and_what_there_is_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search dies after the first round of step 1: the next round is lost, no third one is drawn."""
    rounds = itertools.count()
    run = LocalEngine._run

    def dying(self: LocalEngine, stage: str, env: Any, *arguments: Any) -> list[Trajectory]:
        if stage == "rollout" and next(rounds) == 1:
            env = env.spawn()
            tools = [DeadTool(tool.name, tool.description, tool.schema) for tool in env.toolbox.tools]
            env.toolbox = Toolbox(tools, retries=0)
        return run(self, stage, env, *arguments)

    monkeypatch.setattr(LocalEngine, "_run", dying)
    run_dir, _ = train_short(tmp_path / "run", **GROUPS, update__steps=1)
    (line,) = read_lines(run_dir.metrics)[1:]
    groups = rewards_of(run_dir, 1)
    lost = [name for name in groups if name.startswith("s1-r1-") and len(groups[name]) < 2]
    assert lost and not any(
        name.startswith("s1-r2-") for name in groups
    )  # though two more rounds are allowed
    drawn = list(read_jsonl(run_dir.trajectories / "step_000001.jsonl"))
    assert all(t.group_id.startswith("s1-r1-") for t in drawn if t.excluded)
    assert line["rollout/dynamic_missing"] == len(lost) and line["loss/signal_frac"] == 1.0
    (event,) = read_lines(run_dir.events)
    assert event["kind"] == "dynamic_sampling" and "trained on" in event["reason"]


def test_the_signal_is_that_of_the_advantages() -> None:
    """A group is kept exactly if group advantages give it something."""
    from sorl_train.config.settings import LossConfig
    from sorl_train.learner.advantages import estimate_advantages

    draws = torch.randint(0, 2, (20, 3), generator=torch.Generator().manual_seed(0)).tolist()
    found = [member(str(k), float(r)) for k, draw in enumerate(draws) for r in draw]
    batch = estimate_advantages(collate(found), "group", LossConfig(kl_coef=0.0))
    assert batch.advantages is not None
    signal = (batch.advantages != 0).any(dim=1)
    assert torch.equal(signal, rows_with_signal(batch)) and 0 < int(signal.sum()) < 60
