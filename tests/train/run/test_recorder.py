"""What both engines record: timings, what is due, what happened in a step, what ends a run, checkpoints."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from sorl_env.errors import UserError
from sorl_env.task.registry import load_task
from sorl_env.trajectory import StopReason, Trajectory
from sorl_train.config.files import load_config
from sorl_train.config.run_settings import CheckpointConfig
from sorl_train.run.checkpoint import (
    HASHES,
    find_damage,
    list_checkpoints,
    prune_checkpoints,
    resume_point,
    tell_state,
)
from sorl_train.run.files import read_jsonl
from sorl_train.run.folder import RunDir
from sorl_train.run.recorder import MAX_LOST_STEPS, Recorder
from sorl_train.run.stability import Summary, in_vain, off_policy_words, step_events

from ...trajectories import make_trajectory
from ..conftest import QuietDisplay, train_short
from ..damage import flip_a_bit
from .test_alarm import CALM, far


def recorder(folder: Path, hash_up_to: int | None = None, **settings: Any) -> Recorder:
    dotted = {name.replace("__", "."): value for name, value in settings.items()}
    config = load_config("minihop", {"log.tensorboard": False, "update.steps": 9} | dotted)
    return Recorder(config, RunDir.create(folder, config), load_task("minihop"), QuietDisplay(), hash_up_to)


def trajectory(name: str, stop: StopReason = StopReason.ANSWER, error: str | None = None) -> Trajectory:
    """One of three sampled tokens."""
    given = {"reward": 1.0, "reward_items": {"exact_match": 1.0}, "stop_reason": stop, "error": error}
    return make_trajectory([-1, 0, 0, 0], id=name, group_id=name, task="minihop", **given)


@pytest.mark.parametrize(
    ("there", "is_best", "best"),
    [(0.9, [False, False], (6, 0.9)), (0.6, [False, True], (6, 0.6)), (0.4, [False, True], (6, 0.6))],
)
def test_a_best_policy_of_a_later_step_than_the_checkpoint_is_replaced_by_a_better_one_alone(
    there: float, is_best: list[bool], best: tuple[int, float]
) -> None:
    """A run that repeats itself comes to it again."""
    summary = Summary(best_success=0.5, best_step=2, saved=(6, there))
    assert [
        summary.observe(step, {"eval/success": success}) for step, success in ((5, 0.1), (6, 0.6))
    ] == is_best
    figures = summary.figures()
    assert (figures["best_step"], figures["best_success"]) == best


LOST = [trajectory("a", StopReason.ERROR, "search is out")]


def timings(run: RunDir) -> dict[str, float]:
    return dict(read_jsonl(run.timings)[-1])


def test_timings_of_a_step_by_hand(tmp_path: Path) -> None:
    """A step lasts from one record to the next, with what lies between its stages, some of which may overlap."""
    record = recorder(tmp_path)
    with record.stage("eval"):
        pass
    record.record(0, {})
    first = timings(record.run_dir)
    assert first["time/step_s"] == first["time/eval_s"]  # without the loading
    record.add_time("rollout", 1.5)
    record.add_time("rollout", 0.5)
    record.add_time("update", 6.0)
    record.record(1, {"loss/a": 1.0}, [trajectory("a")])
    found = timings(record.run_dir)
    assert found["time/rollout_s"] == 2.0 and found["time/update_s"] == 6.0 and "time/eval_s" not in found
    assert found["time/rollout_tokens_per_s"] == 3 / 2
    assert found["time/tokens_per_s"] == pytest.approx(3 / found["time/step_s"])
    assert 0 < found["time/step_s"] < 8.0


def test_what_is_due(tmp_path: Path) -> None:
    record = recorder(tmp_path / "run", rollout__save_every=4, checkpoint__every=3, eval__every=2)
    steps = range(1, 10)
    assert [step for step in steps if record.is_saved(step)] == [1, 4, 8, 9]
    assert [step for step in steps if record.checkpoint_due(step)] == [3, 6, 9]
    asked: list[tuple[int, bool]] = []

    def evaluate(limit: int, search_off: bool) -> dict[str, float]:
        asked.append((limit, search_off))
        return {f"eval/{len(asked)}": 1.0}

    few, all_ = record.config.eval.num_examples, record.config.eval.num_examples_final
    assert [step for step in steps if record.evaluate_if_due(step, evaluate)] == [2, 4, 6, 8, 9]
    assert asked[:5] == [(few, False)] * 4 + [(all_, False)]
    off = recorder(tmp_path / "off", eval__search_off=True)
    assert len(off.evaluate_if_due(9, evaluate)) == 2 and asked[-2:] == [(all_, False), (all_, True)]
    record.ended = "as the test says"
    assert record.checkpoint_due(1)


def test_the_first_of_some_lost_steps_in_a_row_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, some, said = recorder(tmp_path / "run"), [*LOST, trajectory("b")], list[str]()
    monkeypatch.setattr(record.display, "message", said.append)
    for step, batch in enumerate((some, some, some[1:], some)):
        record.check_health(step, {}, batch)
    why = "1 of 2 trajectories were excluded from training, the first because search is out"
    assert said == [f"step {step}: {why}" for step in (0, 3)]


def test_lost_steps_in_a_row_end_the_run_after_a_checkpoint(tmp_path: Path) -> None:
    record = recorder(tmp_path / "run")
    for step in range(1, MAX_LOST_STEPS):
        record.check_health(step, {}, LOST)
    record.check_health(5, {}, [*LOST, trajectory("b")])  # one usable trajectory: counted anew
    for step in range(6, 6 + MAX_LOST_STEPS):
        record.stop_if_lost()
        assert not record.checkpoint_due(step)
        record.check_health(step, {}, LOST)
    assert record.checkpoint_due(8)
    with pytest.raises(UserError, match=r"3 steps in a row was excluded; .*search is out"):
        record.stop_if_lost()


def save(record: Recorder, step: int) -> Path:
    """A checkpoint with the parts of the OpenRLHF engine."""

    def write_policy(folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_bytes(b"p" * 100)

    def write_rest(folder: Path) -> None:
        (folder / "_actor").mkdir()
        (folder / "_actor" / "rank_0.pt").write_bytes(bytes(range(256)) * 3)

    record.save_checkpoint(step, write_policy, write_rest, {"mine": step})
    return record.run_dir.checkpoints / f"step_{step:06d}"


def test_a_checkpoint_gives_back_what_the_recorder_held(tmp_path: Path) -> None:
    record = recorder(tmp_path / "run", eval__patience=2)
    for step, success in enumerate((0.8, 0.1)):
        is_best = record.record(step, {"eval/success": success})
        assert is_best == (step == 0)
    record.check_health(1, {}, LOST)
    checkpoint = save(record, 1)
    assert not record.ended
    again = Recorder(record.config, record.run_dir, record.task, QuietDisplay())
    assert again.restore(checkpoint)["mine"] == 1
    again.record(2, {"eval/success": 0.1})
    again.check_health(2, {}, LOST)
    assert "for 2 evaluations below half" in again.ended
    assert again.finish({"steps": 2})["best_success"] == 0.8
    again.check_health(3, {}, LOST)
    with pytest.raises(UserError, match="3 steps in a row"):
        again.stop_if_lost()


def test_large_files_are_checked_by_their_size(tmp_path: Path) -> None:
    record = recorder(tmp_path / "run", hash_up_to=600)
    folder = save(record, 2)
    files = json.loads((folder / HASHES).read_text())["files"]
    assert files["_actor/rank_0.pt"] == {"bytes": 768, "sha256": None} and files["policy/weights"]["sha256"]
    flip_a_bit(folder / "_actor" / "rank_0.pt")
    assert find_damage(folder) == []
    (folder / "_actor" / "rank_0.pt").write_bytes(b"x" * 10)
    assert find_damage(folder) == ["_actor/rank_0.pt has 10 bytes, not 768"]


def test_a_damaged_checkpoint_of_a_later_step_is_told_and_never_pruned_in_place_of_new_ones(
    tmp_path: Path,
) -> None:
    """A run that is resumed from step 2 because step 9 is damaged must not delete what it saves at step 3."""
    record = recorder(tmp_path / "run", checkpoint__every=1, checkpoint__keep=2)
    save(record, 2)
    flip_a_bit(save(record, 9) / "policy" / "weights")
    display = QuietDisplay()
    point = resume_point(record.run_dir)
    tell_state(record.run_dir, display.message, point)
    assert point.step == 2
    assert any("passed over step_000009: policy/weights has changed" in text for text in display.messages)
    (event,) = read_jsonl(record.run_dir.events)
    assert (event["step"], event["kind"]) == (2, "damaged_checkpoint")
    save(record, 3)
    prune_checkpoints(record.run_dir.checkpoints, 1)
    assert [path.name for path in list_checkpoints(record.run_dir.checkpoints)] == ["step_000003"]
    assert (record.run_dir.checkpoints / "damaged_step_000009").is_dir()


def test_a_checkpoint_that_a_signal_asked_for_goes_with_the_next(tmp_path: Path) -> None:
    """It never takes the place of one that ``checkpoint.every`` asked for, whatever that is in the resumed run."""
    record = recorder(tmp_path / "run", checkpoint__every=3, checkpoint__keep=3)
    kept = {0: "0", 3: "03", 4: "034", 5: "035", 6: "036", 7: "367", 9: "369"}
    for step, names in kept.items():
        save(record, step)
        found = list_checkpoints(record.run_dir.checkpoints)
        assert [path.name for path in found] == [f"step_{int(name):06d}" for name in names]
    record.config = dataclasses.replace(record.config, checkpoint=CheckpointConfig(every=4, keep=2))
    save(record, 12)
    assert [path.name[-2:] for path in list_checkpoints(record.run_dir.checkpoints)] == ["09", "12"]


def test_a_step_is_saved_again_in_the_place_of_a_damaged_one(tmp_path: Path) -> None:
    record = recorder(tmp_path / "run")
    flip_a_bit(save(record, 2) / "policy" / "weights")
    save(record, 2)
    assert resume_point(record.run_dir).passed_over == []
    assert [path.name for path in record.run_dir.checkpoints.iterdir()] == ["step_000002"]


def test_a_resumed_run_goes_on_with_the_strain_so_far(tmp_path: Path) -> None:
    """The means: .05, .05, just over .1, about .126. What was raised before the checkpoint is not raised again."""
    for seen, raised in ((3, [4]), (4, [])):
        record = recorder(tmp_path / str(seen), alarm__mean_update_distance=0.11)
        lines = [CALM | line for line in far(0.05, 0.05, 0.2, 0.2, 0.2)]
        for step in range(1, seen + 1):
            record.record(step, lines[step - 1])
        again = Recorder(record.config, record.run_dir, record.task, QuietDisplay())
        again.restore(save(record, seen))
        for step in range(seen + 1, 6):
            again.check_health(step, lines[step - 1], [trajectory("a")])
        events = read_jsonl(record.run_dir.events) if record.run_dir.events.exists() else []
        assert [event["step"] for event in events] == raised


VAIN = {"rollout/success": 0.0, "loss/signal_frac": 0.0, "loss/grad_norm": 0.0, "loss/effective_lr": 1e-6}


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({}, "no step had a gradient: start with --stage sft"),
        ({"loss/effective_lr": 0.0}, "no step was taken"),  # a trust region, or update.skip_without_signal
        ({"loss/effective_lr": 0.0, "loss/grad_norm": 0.1}, "no step was taken"),
        ({"loss/grad_norm": 0.1}, "steps followed the KL and entropy terms alone"),
        ({"rollout/success": 0.1}, ""),
        ({"loss/signal_frac": 0.1}, ""),  # some are better than others, or a critic says so
    ],
)
def test_what_came_of_the_batch(metrics: dict[str, float], said: str) -> None:
    assert said in in_vain(VAIN | metrics) and bool(said) == bool(in_vain(VAIN | metrics))


@pytest.mark.parametrize(
    ("metrics", "kind", "said"),
    [
        (
            {"trust_moves_back": 3.0, "trust_kl": 0.0049, "trust_kl_max": 0.731, "trust_scale": 0.25},
            "moved_back",
            "reached 0.73: weights were moved back 3 times, and the step ends at 0.0049; learning rates are times 0.25",
        ),
        ({"trust_moves_back": 0.0}, None, ""),
        ({"overlong_filtered_frac": 1.0}, "no_step", "every trajectory was filtered by overlong.exclude"),
        ({"success": 0.0}, None, ""),  # a batch without an update
    ],
)
def test_what_is_an_event(metrics: dict[str, float], kind: str | None, said: str) -> None:
    names = {name: f"{'loss' if 'trust' in name else 'rollout'}/{name}" for name in metrics}
    events = list(step_events({names[name]: value for name, value in metrics.items()}, 0))
    assert [event[0] for event in events] == ([kind] if kind else [])
    assert all(said in event[1] for event in events)


def test_a_policy_that_never_succeeds_is_told_so_at_doubling_intervals(
    tiny_folder: str, tmp_path: Path
) -> None:
    """One of random weights; a resume goes on counting."""
    settings: dict[str, Any] = {"model": tiny_folder, "algo": "so_grpo", "loss__kl_coef": 0.0}
    settings |= {
        "rollout__group_size": 4,
        "limits__max_new_tokens": 8,
        "limits__max_turns": 1,
        "rollout__batch_size": 8,
    }
    train_short(tmp_path / "run", **settings, update__steps=3)
    run_dir, _ = train_short(tmp_path / "run", resume=True, **settings, update__steps=5)
    events = read_jsonl(run_dir.events)
    assert [(event["kind"], event["step"]) for event in events] == [("in_vain", step) for step in (1, 2, 4)]
    assert all("no step had a gradient" in event["reason"] for event in events)


def line(updates: float = 12.0, **figures: float | None) -> dict[str, float | None]:
    given = {"clip_frac": 0.0, "normalized_frac": 0.0, "normalizer": 1.0} | figures
    return {"loss/policy_updates": updates} | {f"loss/{name}": value for name, value in given.items()}


TRUST = {"trust_moves_back": 0.0, "trust_scale": 1.0}


@pytest.mark.parametrize(
    ("lines", "normalizes", "clips", "words"),
    [
        ([], True, True, ""),
        ([{"eval/success": 0.5}], True, True, ""),
        ([line()], False, False, ""),
        (
            [line(clip_frac=0.04), line(4.0, clip_frac=0.16)],
            False,
            True,
            "Over 16 optimizer steps, 7% of tokens were clipped.",  # (12 * .04 + 4 * .16) / 16
        ),
        (
            # a quarter and three quarters of the steps, at the factors .2 and .6: (.25 * .2 + .75 * .6) / 1 = .5
            [line(normalized_frac=0.25, normalizer=0.8), line(normalized_frac=0.75, normalizer=0.7)],
            True,
            True,
            "Over 24 optimizer steps, normalization shortened 50% of the steps (mean factor 0.50); "
            "no token was clipped.",
        ),
        (
            [line(**TRUST | {"trust_moves_back": 4.0}), line(trust_moves_back=1.0, trust_scale=0.4)],
            False,
            False,
            "Over 24 optimizer steps, the trust region moved weights back 5 times and ended at 0.4 of the learning "
            "rate.",
        ),
        (
            [line(clip_frac=0.0012, trust_moves_back=1.0, trust_scale=0.33)],
            True,
            True,
            "Over 12 optimizer steps, 0.12% of tokens were clipped; the trust region moved weights back once and ended "
            "at 0.33 of the learning rate; normalization shortened no step.",
        ),
        ([line() | {"loss/effective_lr": 0.0}], True, True, ""),  # no step was taken
        (
            [line(**TRUST)],
            True,
            True,
            "Over 12 optimizer steps, no token was clipped; normalization shortened no step; the trust region moved no "
            "weights back: the updates stayed close to on-policy.",
        ),
    ],
)
def test_what_happened_off_policy_in_words(
    lines: list[dict[str, Any]], normalizes: bool, clips: bool, words: str
) -> None:
    assert off_policy_words(lines, normalizes=normalizes, clips=clips) == words
