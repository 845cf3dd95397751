"""A run ends when sampler and trainer disagree about what was sampled, and says where and why."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel

from sorl_env.errors import UserError
from sorl_env.trajectory import Trajectory
from sorl_train import cli, engine, train_sft
from sorl_train.config.files import load_config
from sorl_train.learner.batch import Batch, collate
from sorl_train.learner.mismatch import check_mismatch, mismatch_limit, sampled_by, turn_mismatch
from sorl_train.models.forward import autocast
from sorl_train.models.policy import load_critic, load_tokenizer
from sorl_train.rollout import sampler
from sorl_train.rollout.kv_cache import RowCache
from sorl_train.run.files import read_jsonl as read_metrics
from sorl_train.run.folder import RunDir

from ..conftest import SHORT, QuietDisplay, flags, short_config, train_short


# --- faults of a sampler, each planted in a run ---------------------------------------------------------------
def leak(patch: pytest.MonkeyPatch) -> None:
    """Every third dialogue attends to keys of another one. (Rows with too many tokens never get as far as here.)"""
    feed = sampler.feed

    @torch.inference_mode()
    def leaking(model: Any, cache: RowCache, rows: slice, tokens: Any) -> Any:
        for row in range(rows.start, rows.stop - 1, 3):
            both = int(cache.lengths[[row, row + 1]].min())
            cache.data[:, :, row, :, both // 2 : both] = cache.data[:, :, row + 1, :, both // 2 : both]
        return feed(model, cache, rows, tokens)

    patch.setattr(sampler, "feed", leaking)


def temperature(patch: pytest.MonkeyPatch) -> None:
    """Turns are drawn at a temperature that the trainer knows nothing of."""
    settings = engine.RolloutSettings

    def colder(temperature: float, **others: Any) -> Any:
        return settings(temperature=0.8 * temperature, **others)

    patch.setattr(engine, "RolloutSettings", colder)


def assert_saved(path: Path, message: str) -> None:
    """The file holds what the message says, and shows the difference token by token."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records and str(path) in message and records[0]["id"] in message
    assert "Likely causes" in message and "sampler.max_mismatch" in message
    worst = 0.0
    for record in records:
        assert record["text"] and record["turns"] and record["id"].startswith("s")
        for turn in record["turns"]:
            lists = ("token_ids", "tokens", "sampler_log_probs", "trainer_log_probs")
            assert len({len(turn[name]) for name in lists}) == 1
            pairs = zip(turn["sampler_log_probs"], turn["trainer_log_probs"], strict=True)
            worst = max(worst, *(abs(a - b) for a, b in pairs))
    assert worst > 0.01


@pytest.mark.slow
def test_a_fault_of_the_sampler_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an on-policy step, which is the first to compute log-probabilities."""
    leak(monkeypatch)
    with pytest.raises(UserError, match="sampler and trainer disagree") as caught:
        train_short(tmp_path / "run", update__mini_batch_size=16, loss__kl_coef=0.0)
    assert_saved(tmp_path / "run" / "mismatch_000001.jsonl", str(caught.value))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")] == ["step_000000"]


def test_the_command_ends_with_an_error_and_a_resumed_run_is_checked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    settings = SHORT | {"update.mini_batch_size": 8, "run_dir": str(run), "update.steps": 1}
    command = ["--config", "quickstart", "--hardware.device", "cpu", *flags(settings)]
    with monkeypatch.context() as patch:
        temperature(patch)
        assert cli.main(command) not in (0, None)
        message = capsys.readouterr().err
        assert_saved(run / "mismatch_000001.jsonl", message)
        (run / "mismatch_000001.jsonl").unlink()
        assert cli.main([*command, "--resume"]) not in (0, None)
        assert_saved(run / "mismatch_000001.jsonl", capsys.readouterr().err)
        (run / "mismatch_000001.jsonl").unlink()
    assert cli.main([*command, "--resume"]) == 0  # the sampler was mended
    assert not list(run.glob("mismatch_*"))
    assert read_metrics(run / "metrics.jsonl")[-1]["rollout/mismatch_mean"] < 1e-5


@pytest.mark.slow
def test_zero_turns_the_check_off_and_stale_batches_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that waits is compared with the weights that sampled it, not with those that train on it."""
    run_dir, _ = train_short(
        tmp_path / "stale", rollout__max_staleness=1, optim__lr=3e-3, optim__warmup_ratio=0.0, update__steps=3
    )
    assert max(line["rollout/mismatch_mean"] for line in read_metrics(run_dir.metrics)[1:]) < 1e-5
    temperature(monkeypatch)
    run_dir, _ = train_short(tmp_path / "off", sampler__max_mismatch=0.0)
    assert read_metrics(run_dir.metrics)[-1]["rollout/mismatch_mean"] > 0.01


# --- the check itself -----------------------------------------------------------------------------------------
def check(
    batch: Batch, log_probs: torch.Tensor, path: Path, limit: float = 0.001, top_p: float = 1.0
) -> None:
    check_mismatch(log_probs, batch, batch.loss_mask, 3, limit=limit, top_p=top_p, decode=str, folder=path)


def test_limits_on_the_mean_and_on_the_worst_turn(trajectories: list[Trajectory], tmp_path: Path) -> None:
    batch = collate(trajectories)
    same, mask = batch.rollout_log_probs, batch.loss_mask
    check(batch, same, tmp_path)
    check(batch, same + 0.0009 * mask, tmp_path)
    with pytest.raises(UserError, match=r"step 3: .* differ by 0\.0011 nats on average"):
        check(batch, same + 0.0011 * mask, tmp_path)
    row = len(batch) // 2
    turn = mask & (batch.turn_ids == 0) & (torch.arange(len(batch)) == row)[:, None]
    tokens = max(8, int(turn.sum()))
    share = tokens / int(turn.sum())
    few = torch.where(turn, same - 0.0105 * share, same)  # of a few tokens in one turn
    with pytest.raises(UserError, match=f"0.0105 in the worst turn .*{batch.ids[row]}; with"):
        check(batch, few, tmp_path, limit=0.00104)
    check(batch, few, tmp_path, limit=max(0.00106, 0.0106 / 10))
    check(batch, same + mask, tmp_path, limit=0.0)
    with pytest.raises(UserError, match="disagree"):
        check(batch, torch.where(turn, math.nan, same), tmp_path)
    assert turn_mismatch(few, batch, mask).max() == pytest.approx(0.0105, rel=1e-3)


def test_what_top_p_explains_is_no_disagreement(trajectories: list[Trajectory], tmp_path: Path) -> None:
    """The sampler's log-probability is higher by the log of the mass that was kept, 0.9 to 1 at ``top_p`` 0.9."""
    batch = collate(trajectories)
    same, mask = batch.rollout_log_probs, batch.loss_mask
    for mass in (0.9, 0.95, 1.0):
        check(batch, same + math.log(mass) * mask, tmp_path, top_p=0.9)
    for wrong in (math.log(0.9) - 0.0011, 0.0011):
        with pytest.raises(UserError, match=r"differ by 0\.0011 nats on average"):
            check(batch, same + wrong * mask, tmp_path, top_p=0.9)


def test_one_rare_token_does_not_decide_in_bfloat16(trajectories: list[Trajectory], tmp_path: Path) -> None:
    batch = collate(trajectories)
    log_probs = batch.rollout_log_probs.clone()
    row, column = batch.loss_mask.nonzero()[0].tolist()
    log_probs[row, column] += 1.5
    check(batch, log_probs, tmp_path, limit=0.1)
    with pytest.raises(UserError, match="in the worst turn"):
        check(batch, log_probs, tmp_path, limit=0.001)


def test_only_turns_that_these_weights_sampled_are_compared(trajectories: list[Trajectory]) -> None:
    versions = {0: [0, 0, 0, 0], 1: [4, 4, 4, 4], 2: [4, 3, 4, 4]}
    mixed = []
    for number, trajectory in enumerate(trajectories):
        turns = zip(trajectory.turns, versions[number % 3], strict=False)
        changed = tuple(dataclasses.replace(turn, policy_version=version) for turn, version in turns)
        mixed.append(dataclasses.replace(trajectory, turns=changed))
    batch = collate(mixed)
    mask = sampled_by(4, mixed, batch)
    for number in range(len(mixed)):
        turns = batch.turn_ids[number][mask[number]].unique().tolist()
        own = batch.turn_ids[number][batch.loss_mask[number]].unique().tolist()
        assert turns == {0: [], 1: own, 2: [0]}[number % 3]
    assert torch.equal(sampled_by(0, trajectories, batch), batch.loss_mask)


@pytest.mark.parametrize(
    ("overrides", "dtype", "limit"),
    [
        ({}, torch.float32, 0.001),
        ({}, torch.bfloat16, 0.1),
        ({"sampler.backend": "vllm"}, torch.float32, 0.01),
        ({"sampler.backend": "vllm"}, torch.bfloat16, 0.15),
        ({"sampler.max_mismatch": 0.3}, torch.float32, 0.3),
        ({"sampler.max_mismatch": 0, "sampler.backend": "vllm"}, torch.float32, 0.0),
    ],
)
def test_limits_by_sampler_and_precision(overrides: dict[str, Any], dtype: torch.dtype, limit: float) -> None:
    sampler = load_config("minihop", overrides).sampler
    assert mismatch_limit(sampler, dtype, served=sampler.backend == "vllm") == pytest.approx(limit)


def test_the_sampler_is_checked_while_only_the_critic_trains_too(tmp_path: Path) -> None:
    """On policy the step's own log-probabilities are the trainer's; a step of the critic alone has none."""
    settings = {"update__mini_batch_size": 16, "update__critic_warmup_steps": 1, "loss__kl_coef": 0.0}
    run_dir, _ = train_short(tmp_path / "run", **settings)
    first, second = read_metrics(run_dir.metrics)[1:]
    assert "loss/value" in first and "loss/policy" not in first and "loss/policy" in second
    names = {name for line in (first, second) for name in line if name.startswith("rollout/mismatch")}
    assert {"rollout/mismatch_kl", "rollout/mismatch_ratio_p99", "rollout/mismatch_kl_turn0"} <= names
    assert first["rollout/mismatch_max"] < 1e-3 and second["rollout/mismatch_max"] < 1e-3


def test_dropout_does_not_move_the_ratios(tiny_folder: str, tmp_path: Path) -> None:
    """GPT-2 has dropout of a tenth by default. At a rate of next to nothing the policy stays what it was."""
    tokenizer = load_tokenizer(tiny_folder)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    settings = {"optim__lr": 1e-9, "loss__kl_coef": 0.0, "limits__max_new_tokens": 40}
    settings["limits__max_trajectory_tokens"] = 1024  # GPT-2 has no more positions
    run_dir, _ = train_short(tmp_path / "run", model=str(tmp_path / "gpt2"), **settings)
    for line in read_metrics(run_dir.metrics)[1:]:
        assert abs(line["loss/log_ratio_p01"]) < 1e-4 and line["loss/log_ratio_p99"] < 1e-4
        assert line["rollout/mismatch_max"] < 1e-3
    saved = AutoConfig.from_pretrained(run_dir.checkpoints / "step_000002" / "policy")
    assert saved.resid_pdrop == 0.1  # whoever trains it next decides anew
    config = short_config(model=str(tmp_path / "gpt2"), stage="sft", sft__steps=1, **settings)
    train_sft.run(config, RunDir.create(tmp_path / "sft", config), QuietDisplay(), False)


def test_values_of_a_critic_in_bfloat16_are_not_rounded(tiny_folder: str) -> None:
    critic: Any = load_critic(tiny_folder, "cpu")
    torch.nn.init.normal_(critic.head.weight, std=0.05, generator=torch.Generator().manual_seed(0))
    torch.nn.init.constant_(critic.head.bias, 0.7)
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad(), autocast("bfloat16", torch.device("cpu")):
        values = critic(ids, torch.ones(2, 11, dtype=torch.bool))
        hidden = critic.backbone(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    assert values.dtype == torch.float32
    assert torch.equal(values, critic.head(hidden.float()).squeeze(-1))
