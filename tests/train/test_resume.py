"""A run whose files were damaged is resumed as if it had not been."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sorl_env.errors import UserError
from sorl_train import train_rl as trainer
from sorl_train.engine import LocalEngine
from sorl_train.evaluate.find_policy import find_policy
from sorl_train.run.checkpoint import HASHES, find_damage, hash_file
from sorl_train.run.files import read_jsonl, read_own_json
from sorl_train.run.folder import RunDir
from sorl_train.sft.cold_start import resolve_model

from .conftest import QuietDisplay, short_config, train_short
from .damage import append, delete, empty, flip_a_bit
from .outcomes import UNDERSCORED, Killed, outcome, train_until
from .test_dynamic_sampling import GROUPS
from .test_replay_runs import FEW


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the uninterrupted run leaves."""
    run_dir, _ = train_short(tmp_path_factory.mktemp("whole") / "run", **UNDERSCORED)
    moves = [line["loss/trust_moves_back"] for line in read_jsonl(run_dir.metrics)[1:]]
    assert sum(moves) >= 2, moves  # or resumes would not have to know the trust region's scale
    return outcome(run_dir)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 1 to 3, which ended in step 4."""
    return train_until(tmp_path_factory.mktemp("stopped") / "run", 4, **UNDERSCORED).path


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of another seed."""
    return train_until(tmp_path_factory.mktemp("other") / "run", 4, **(UNDERSCORED | {"seed": 1})).path


NEWEST, OLDER = (f"checkpoints/step_{step:06d}" for step in (3, 2))


def to(name: str, damage: Callable[[Path], None]) -> Callable[[Path, Path], None]:
    return lambda run, other: damage(run / name)


def swap(run: Path, other: Path) -> None:
    """The newest checkpoint is another run's."""
    shutil.rmtree(run / NEWEST)
    shutil.copytree(other / NEWEST, run / NEWEST)


def write(name: str, text: str) -> Callable[[Path, Path], None]:
    def put(run: Path, other: Path) -> None:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(text)

    return put


def both(*damages: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
    return lambda run, other: [damage(run, other) for damage in damages] and None


# What is done to the run, and what has to be named (empty: nothing to say). test_checkpoint.py damages every kind of
# file in every way, and says which damages are refused; here whole runs go on from what is left.
KINDS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "nothing": (lambda run, other: None, ""),
    "weights, one bit": (to(f"{NEWEST}/policy/model.safetensors", flip_a_bit), "policy/model.safetensors"),
    "another run's checkpoint": (swap, "another run"),
    "two damaged": (both(to(f"{NEWEST}/state.json", delete), to(f"{OLDER}/{HASHES}", empty)), HASHES),
    "a half-written folder": (write("checkpoints/.step_000004.99/state.json", "{"), ""),
    "metrics with half a line": (to("metrics.jsonl", append), ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_damage_is_told_and_the_run_is_the_same(
    kind: str, whole: dict[str, Any], stopped: Path, other: Path, tmp_path: Path
) -> None:
    damage, named = KINDS[kind]
    path = shutil.copytree(stopped, tmp_path / "run")
    damage(path, other)
    config, display = short_config(**UNDERSCORED), QuietDisplay()
    run = RunDir.resume(path, config)[0]
    trainer.run(config, run, display, True)
    found = outcome(run)
    events = found.pop("events").decode()
    assert found == {name: value for name, value in whole.items() if name != "events"}
    told = [message for message in display.messages if "passed over" in message]
    assert bool(named) == bool(told) == ("damaged_checkpoint" in events)
    if named:
        assert named in "".join(told) and named in events


@pytest.mark.slow
def test_what_was_passed_over_is_still_told_after_another_kill(stopped: Path, tmp_path: Path) -> None:
    path = shutil.copytree(stopped, tmp_path / "run")
    flip_a_bit(path / NEWEST / "optimizer.safetensors")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(LocalEngine, "collect", lambda *_: (_ for _ in ()).throw(Killed))
        train_short(path, resume=True, **UNDERSCORED)
    run, _ = train_short(path, resume=True, **UNDERSCORED)
    (event,) = (event for event in read_jsonl(run.events) if event["kind"] == "damaged_checkpoint")
    assert event["step"] == 2 and "optimizer.safetensors" in event["reason"]
    assert (run.checkpoints / "damaged_step_000003").is_dir()


def test_a_damaged_best_policy_is_not_evaluated(tmp_path: Path) -> None:
    run, _ = train_short(tmp_path / "run", update__steps=1)
    best = run.checkpoints / "best"
    (best / "policy" / "README.md").write_text("license: mit")
    assert find_policy(str(run.path)).folder == str(best / "policy")
    flip_a_bit(best / "policy" / "model.safetensors")
    for name in (run.path, best, best / "policy"):
        with pytest.raises(UserError, match=r"(?s)best is damaged.*policy/model\.safetensors has changed"):
            find_policy(str(name))


@pytest.mark.parametrize("damage", [flip_a_bit, delete], ids=lambda damage: damage.__name__)
def test_a_damaged_cold_start_is_built_again(
    damage: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SORL_CACHE", str(tmp_path))
    config, display = short_config(sft__steps=1), QuietDisplay()
    folder = Path(resolve_model(config, display))
    whole = hash_file(folder / "model.safetensors")
    damage(folder / "model.safetensors")
    assert resolve_model(config, display) == str(folder)
    assert any("built again: model.safetensors" in message for message in display.messages)
    assert hash_file(folder / "model.safetensors") == whole and not find_damage(folder)


@pytest.mark.slow
def test_another_model_folder_is_refused_by_a_resume(tmp_path: Path) -> None:
    """The reference, the frozen half of LoRA and the tokenizer come from it again."""
    model = shutil.copytree(resolve_model(short_config(), QuietDisplay()), tmp_path / "model")
    settings: dict[str, Any] = {"model": str(model), "lora__rank": 4}
    train_short(tmp_path / "run", update__steps=1, **settings)
    flip_a_bit(model / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.sha256"):
        train_short(tmp_path / "run", resume=True, update__steps=2, **settings)


def test_the_best_policy_is_the_one_that_the_summary_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After a kill between the best policy of step 4 and the checkpoint after it, in a run that repeats itself and in
    one that does not, as on a GPU."""
    first = {0: 0.2, 2: 0.5, 4: 0.9, 6: 0.4}
    settings = UNDERSCORED | {"update__steps": 6, "checkpoint__every": 3}

    def evaluations(curve: dict[int, float]) -> None:
        monkeypatch.setattr(LocalEngine, "evaluate", lambda self, *_: {"eval/success": curve[self.step]})

    def save_best_and_die(self: LocalEngine) -> None:
        save_best(self)
        if self.step == 4:
            raise Killed

    evaluations(first)
    whole, _ = train_short(tmp_path / "whole", **settings)
    save_best = LocalEngine.save_best
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(LocalEngine, "save_best", save_best_and_die)
        train_short(tmp_path / "killed", **settings)
    for again in (0.9, 0.7):
        evaluations(first | {4: again})
        config, display = short_config(**settings), QuietDisplay()
        run_dir, _ = RunDir.resume(shutil.copytree(tmp_path / "killed", tmp_path / str(again)), config)
        summary = trainer.run(config, run_dir, display, resume=True)
        told = "checkpoints/best is of step 4, after this checkpoint (success 0.900)"
        assert any(told in message for message in display.messages)
        assert (summary["best_step"], summary["best_success"]) == (4, 0.9)
        assert read_own_json(run_dir.checkpoints / "best" / "state.json") == {"step": 4, "success": 0.9}
        if again == 0.9:
            assert outcome(run_dir) == outcome(whole)
        weights = "checkpoints/step_000006/policy/model.safetensors"
        assert outcome(run_dir)[weights] == outcome(whole)[weights]


STALE: dict[str, Any] = {"rollout__max_staleness": 1, "checkpoint__every": 1}
GIGPO: dict[str, Any] = {"algo": "gigpo", "rollout__group_size": 4, "update__epochs": 2, "update__steps": 3}
GIGPO |= {"eval__num_examples": 4, "task_args__hit_reward": 0.5, "task_args__valid_reward": 0.1}
REPLAY = FEW | {"checkpoint__every": 1, "update__trust_kl": 0.01}
DYNAMIC = UNDERSCORED | GROUPS | {"rollout__batch_size": 8, "update__mini_batch_size": 8}

# Settings, the step in which the run is killed, and a figure that in some step is above a limit, so that there is
# something for a resume to repeat.
RESUMES: dict[str, tuple[dict[str, Any], int, str, float]] = {
    "only the checkpoint of step 0": (
        {"update__steps": 2, "checkpoint__every": 2, "rollout__batch_size": 8},
        2,
        "loss/grad_norm",
        0,
    ),
    "a waiting batch has its states": (GIGPO | STALE, 3, "loss/shared_state_frac", 0.3),
    "a batch of kept groups waits": (DYNAMIC | STALE, 3, "rollout/dynamic_drawn", 8),
    "replay of successes": (REPLAY, 5, "rollout/replay_share", 0),
    "replay of what is recent": (
        REPLAY | STALE | {"replay__mode": "recent", "replay__per_group": 2},
        4,
        "rollout/replay_share",
        0,
    ),
}


@pytest.mark.parametrize("name", RESUMES)
def test_a_resumed_run_equals_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    settings, at, figure, limit = RESUMES[name]
    whole, _ = train_short(tmp_path / "whole", **settings)
    assert max(line[figure] for line in read_jsonl(whole.metrics)[1:]) > limit
    train_until(tmp_path / "cut", at, **settings)
    resumed, _ = train_short(tmp_path / "cut", resume=True, **settings)
    assert outcome(resumed) == outcome(whole)
