"""Whole runs of seconds: every algorithm, resume, outages, NaN, interruption."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sorl_env.errors import UserError
from sorl_env.tool import ToolReply, ToolUnavailableError
from sorl_env.tool.toolbox import Toolbox
from sorl_env.trajectory import read_jsonl
from sorl_train import engine
from sorl_train.algorithms import ALGORITHMS
from sorl_train.cli import main
from sorl_train.engine import LocalEngine
from sorl_train.models.policy import load_critic
from sorl_train.run import recorder
from sorl_train.run.files import read_jsonl as read_metrics
from sorl_train.run.folder import RunDir
from sorl_train.run.metrics_log import iter_token_records, sidecar_of
from sorl_train.sft.cold_start import resolve_model
from sorl_train.train_rl import run

from ..waiting import wait_until
from .conftest import SHORT, QuietDisplay, flags, short_config, train_short


def command(run_dir: Path, *more: str, **settings: Any) -> list[str]:
    dotted = {name.replace("__", "."): value for name, value in settings.items()}
    given = ["--config", "minihop", *more, *flags(dotted)]  # what train_short has
    return [sys.executable, "-m", "sorl_train.cli", "--run_dir", str(run_dir), *given]


def test_a_policy_that_begins_with_success_0_names_the_command_that_shows_its_turns(tmp_path: Path) -> None:
    display = QuietDisplay()
    config = short_config(sft__steps=1, update__steps=1)
    run_dir = RunDir.create(tmp_path / "run", config)
    run(config, run_dir, display, resume=False)
    assert f"sorl-ask --model {run_dir.path} --index 0" in "\n".join(display.messages)


@pytest.mark.parametrize(("algo", "ratio"), [*((a, "auto") for a in ALGORITHMS), ("mt_grpo", "turn")])
def test_every_algorithm_leaves_a_complete_run_folder(algo: str, ratio: str, tmp_path: Path) -> None:
    group_size = 4 if ALGORITHMS[algo].needs_groups else 1
    more = {"task_args__hit_reward": 0.5} if ALGORITHMS[algo].advantage == "turn_group" else {}
    more |= {"loss__ratio": ratio}
    run_dir, summary = train_short(tmp_path / "run", algo=algo, rollout__group_size=group_size, **more)
    lines = read_metrics(run_dir.metrics)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[2]["loss/grad_norm"] > 0
    assert ("loss/value" in lines[2]) == ALGORITHMS[algo].needs_critic
    for norm in ("scalar", "token", "rms", "logit"):
        assert f"loss/clip_bias_{norm}" in lines[2]
    assert {p.name for p in run_dir.checkpoints.iterdir()} >= {"step_000002", "best"}
    assert {p.name for p in run_dir.trajectories.iterdir()} >= {"step_000001.jsonl", "step_000002.jsonl"}
    versions = {
        turn.policy_version
        for t in read_jsonl(run_dir.trajectories / "eval_000002.jsonl")
        for turn in t.turns
    }
    assert versions == {2}  # evaluated after step 2, though the newest batch was sampled after step 1
    assert summary["steps"] == 2 and summary["peak_rss_mb"] > 0
    assert json.loads(run_dir.summary.read_text()) == json.loads(json.dumps(summary))
    manifest = run_dir.read_manifest()
    assert manifest["data"]["train"]["examples"] == 48 and manifest["versions"]["torch"]
    assert not [p for p in run_dir.path.rglob("*") if p.suffix in (".pt", ".bin", ".pkl", ".pth")]


def test_one_seed_gives_one_run_and_another_seed_another(tmp_path: Path) -> None:
    """Also: a checkpoint has a plain transformers folder."""
    first, _ = train_short(tmp_path / "a")
    second, _ = train_short(tmp_path / "b")
    other, _ = train_short(tmp_path / "c", seed=1)
    assert first.metrics.read_bytes() == second.metrics.read_bytes()
    assert first.metrics.read_bytes() != other.metrics.read_bytes()
    folder = first.checkpoints / "step_000002" / "policy"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("Search, then answer.", return_tensors="pt", return_token_type_ids=False)
    assert torch.isfinite(model(**ids).logits).all()


@pytest.mark.parametrize("algo", ["ppo", "so_ppo"])
def test_a_saved_step_tells_what_the_loss_made_of_each_token(algo: str, tmp_path: Path) -> None:
    settings = {
        "update__epochs": 2,
        "update__mini_batch_size": 4,
        "optim__lr": 1e-2,
        "optim__warmup_ratio": 0.0,
    }
    run_dir, _ = train_short(tmp_path / "run", algo=algo, **settings)
    saved = (
        run_dir.trajectories / "step_000002.jsonl"
    )  # in step 1 the critic knows nothing, and no advantage is negative
    sidecar = sidecar_of(saved)
    assert sidecar is not None
    trajectories = {t.id: t for t in read_jsonl(saved)}
    records = list(iter_token_records(sidecar))
    assert {r.id for r in records} == set(trajectories)
    for record in records:
        trajectory = trajectories[record.id]
        assert len(record.tokens) == trajectory.num_action_tokens
        assert list(record.turn) == trajectory.turn_ids[trajectory.action_mask].tolist()
        for turn in trajectory.turns:
            mine = [i for i, of in enumerate(record.turn) if of == turn.index]
            mean = sum(record.log_ratio[i] for i in mine) / len(mine)
            for i in mine:
                expected = mean if algo == "so_ppo" else record.log_ratio[i]
                assert record.ratio[i] == pytest.approx(math.exp(expected), abs=2e-3)
                below, above = record.ratio[i] < 0.8 - 1e-4, record.ratio[i] > 1.2 + 1e-4
                clips = (below and record.advantage[i] < 0) or (above and record.advantage[i] > 0)
                assert clips <= record.clipped[i]
    assert any(any(record.clipped) for record in records)
    assert all(entropy > 0 for record in records for entropy in record.entropy)


def test_target_kl_ends_the_actors_steps_on_a_batch(tmp_path: Path) -> None:
    """A limit that any change is above: the first mini-batch passes, however old it is, and the second one ends it.

    The correction for the sampler is to the weights that sampled a batch, so it cuts nothing of an old one.
    """
    settings = {"update__epochs": 2, "update__mini_batch_size": 4, "optim__lr": 1e-2, "loss__kl_coef": 0.0}
    settings |= {"rollout__max_staleness": 1, "optim__schedule": "constant", "correction__mode": "band"}
    settings |= {"correction__low": 0.999, "correction__high": 1.001}
    kept, _ = train_short(tmp_path / "kept", **settings)
    cut, _ = train_short(tmp_path / "cut", **settings, update__target_kl=1e-10)
    free, limited = read_metrics(kept.metrics), read_metrics(cut.metrics)
    assert [line["loss/policy_updates"] for line in free[1:]] == [8, 8]
    assert [line["loss/policy_updates"] for line in limited[1:]] == [2, 2]
    assert limited[1]["loss/value"] == free[1]["loss/value"]  # the critic goes on
    assert limited[2]["loss/ratio_std"] > 0.01 and limited[2]["loss/correction_cut_frac"] == 0.0


def test_gradient_checkpointing_recomputes_both_models_and_scoring_is_in_eval_mode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A first layer runs twice for each micro-batch that it learns from: in the forward and in the backward pass."""
    with_gradient, modes, load = Counter[str](), set[tuple[bool, bool]](), LocalEngine.load

    def load_and_watch(engine: LocalEngine, folder: Path | None) -> None:
        load(engine, folder)
        assert engine.critic_update is not None
        critic: Any = engine.critic_update.backend.model
        for name, layer in (
            ("policy", engine.policy.base_model.layers[0]),
            ("critic", critic.backbone.layers[0]),
        ):

            def watch(module: Any, *_: Any, name: str = name) -> None:
                with_gradient[name] += torch.is_grad_enabled()
                modes.add((torch.is_grad_enabled(), module.training))

            layer.self_attn.register_forward_hook(watch)

    monkeypatch.setattr(LocalEngine, "load", load_and_watch)
    # with the entropy's gradient, as a mini-batch without an advantage has no backward pass otherwise
    train_short(tmp_path / "run", hardware__gradient_checkpointing=True, loss__entropy_coef=0.01)
    assert with_gradient == {"policy": 8, "critic": 8}  # 2 steps of 2 mini-batches
    assert modes == {(True, True), (False, False)}


@pytest.mark.slow
def test_resume_after_kill_9_repeats_the_uninterrupted_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As long as the first process lives, no other gets at its folder. With stale batches: test_kills.py."""
    settings = {"update__steps": 8, "checkpoint__every": 2, "eval__every": 4}
    words = command(tmp_path, **SHORT, **settings)[5:]
    whole, _ = train_short(tmp_path / "whole", **settings)
    killed = tmp_path / "killed"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command(killed, **SHORT, **settings), stdout=log, stderr=subprocess.STDOUT)
        # test_kills.py stops a run at chosen system calls; here any moment will do that is well before the end
        wait_for_step(killed / "metrics.jsonl", random.randint(0, 2), process, tmp_path / "log")
        wait_until(lambda: any(killed.glob("checkpoints/step_*")), (tmp_path / "log").read_text)
        process.send_signal(signal.SIGSTOP)
        before = contents(killed)
        for more in (["--resume"], ["--overwrite", *words], words):
            assert main(["--run_dir", str(killed), *more]) == 2
            assert f"{killed} is in use by process {process.pid}: " in capsys.readouterr().err
        assert contents(killed) == before and len(list(tmp_path.iterdir())) == 3
        process.send_signal(signal.SIGKILL)
        process.wait()
    resumed, summary = train_short(killed, resume=True, **settings)
    assert resumed.metrics.read_bytes() == whole.metrics.read_bytes()
    assert summary["steps"] == 8


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Each file with its time and content."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def wait_for_step(metrics: Path, step: int, process: subprocess.Popen[bytes], log: Path) -> None:
    def has_come() -> bool:
        assert process.poll() is None, log.read_text()
        return metrics.exists() and len(metrics.read_text().splitlines()) > step

    wait_until(has_come, log.read_text)


class Flaky:
    """Search that is out for every fifth call."""

    inline = True

    def __init__(self, tool: Any) -> None:
        self.tool, self.calls = tool, 0
        self.name, self.description, self.schema = tool.name, tool.description, tool.schema

    def __call__(self, query: str) -> ToolReply:
        self.calls += 1
        if self.calls % 5 == 0:
            raise ToolUnavailableError("timed out")
        reply: ToolReply = self.tool(query)
        return reply


def test_a_tool_that_is_out_and_a_reward_that_raises_end_their_own_trajectories_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original = LocalEngine.__init__

    def patched(self: LocalEngine, *arguments: Any) -> None:
        original(self, *arguments)
        task = self.env.task

        def reward(example: Any, turns: Any) -> Any:
            if example.id.endswith("3"):
                raise KeyError("no gold answer")
            return task.reward(example, turns)

        self.env.task = dataclasses.replace(task, reward=reward)
        self.env.toolbox = Toolbox([Flaky(tool) for tool in self.env.toolbox.tools], retries=0)

    monkeypatch.setattr(LocalEngine, "__init__", patched)
    run_dir, _ = train_short(tmp_path / "run", update__steps=3, rollout__save_every=1)
    lines = read_metrics(run_dir.metrics)[1:]
    assert all(0.0 < line["rollout/excluded_rate"] < 1.0 for line in lines)
    assert all(line["rollout/stop_error"] == line["rollout/excluded_rate"] for line in lines)
    drawn = [t for path in run_dir.trajectories.glob("step_*.jsonl") for t in read_jsonl(path)]
    errors = {t.error for t in drawn if t.excluded and t.error}
    assert "KeyError: 'no gold answer'" in errors and any("timed out" in error for error in errors)
    assert len(errors) == 2


def test_steps_without_a_usable_trajectory_end_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(recorder, "MAX_LOST_STEPS", 2)
    monkeypatch.setattr("sorl_env.trajectory.StopReason.excluded", property(lambda self: True))
    with pytest.raises(UserError, match="2 steps in a row"):
        train_short(tmp_path / "run", update__steps=9)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[0] == {"step": 0, "eval/excluded_rate": 1.0}
    assert lines[1]["rollout/excluded_rate"] == 1.0 and "rollout/success" not in lines[1]


def test_a_run_closes_its_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of training and those of evaluation, whether it ends well or not."""
    closed: list[Toolbox] = []
    monkeypatch.setattr(Toolbox, "close", lambda self, only=None: closed.append(self))
    train_short(tmp_path / "run", update__steps=1)
    assert len(set(map(id, closed))) == len(closed) == 2
    monkeypatch.setattr(LocalEngine, "update", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_short(tmp_path / "lost")
    assert len(set(map(id, closed))) == len(closed) == 4


def test_non_finite_numbers_stop_the_run_and_keep_the_last_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    update = LocalEngine.update

    def poisoned(self: LocalEngine, batch: Any, step: int) -> dict[str, float]:
        if step == 3:
            advantages = batch.advantages.clone()
            advantages[1] = float("inf")
            batch = batch.with_fields(advantages=advantages)
        return update(self, batch, step)

    monkeypatch.setattr(LocalEngine, "update", poisoned)
    path = tmp_path / "run"
    with pytest.raises(UserError, match=r"step 3: .* not finite; trajectories: s3-") as caught:
        train_short(path, update__steps=5, checkpoint__every=1)
    assert "non_finite_000003.jsonl" in str(caught.value) and "step_000002" in str(caught.value)
    dumped = list(read_jsonl(path / "non_finite_000003.jsonl"))
    assert len(dumped) == 16
    for tensor in AutoModelForCausalLM.from_pretrained(path / "checkpoints/step_000002/policy").parameters():
        assert torch.isfinite(tensor).all()


def test_one_on_policy_step_needs_no_scoring_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its own log-probabilities are the old ones: the same metrics as with a pass before it."""
    settings = {"algo": "so_ppo", "update__mini_batch_size": 16, "rollout__group_size": 4}
    calls: list[str] = []
    score = engine.score
    monkeypatch.setattr(engine, "score", lambda *args: calls.extend(args[1]) or score(*args))
    run_dir, _ = train_short(tmp_path / "without", **settings)
    assert "old_log_probs" not in calls
    without = read_metrics(run_dir.metrics)
    monkeypatch.setattr(LocalEngine, "on_policy", False)
    run_dir, _ = train_short(tmp_path / "with", **settings)
    assert "old_log_probs" in calls
    scored = read_metrics(run_dir.metrics)
    assert [row.keys() for row in without] == [row.keys() for row in scored]
    for ours, theirs in zip(without, scored, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-3)


def test_supervised_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It loads neither the critic of so_ppo nor the reference of its KL."""
    from sorl_train.train_sft import run

    monkeypatch.delattr("sorl_train.engine.load_critic")
    monkeypatch.delattr(LocalEngine, "_load_reference")
    config = short_config(stage="sft", sft__steps=150, sft__lr=5e-3, loss__kl_coef=0.01)
    run_dir = RunDir.create(tmp_path / "run", config)
    summary = run(config, run_dir, QuietDisplay(), False)
    losses = [line["sft/loss"] for line in read_metrics(run_dir.metrics) if "sft/loss" in line]
    assert losses[-1] < 0.6 * losses[0]
    assert summary["demos"] == 48
    assert (
        AutoModelForCausalLM.from_pretrained(run_dir.checkpoints / "best" / "policy").config.hidden_size == 48
    )


@pytest.mark.slow
def test_lora_resumes_exactly_and_its_checkpoints_are_plain_folders(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"lora__rank": 4, "optim__lr": 5e-3, "optim__schedule": "constant"}
    whole, _ = train_short(tmp_path / "whole", update__steps=4, **settings)
    path = tmp_path / "stopped"
    train_short(path, update__steps=2, **settings)
    resumed, _ = train_short(path, resume=True, update__steps=4, **settings)
    lines, expected = read_metrics(resumed.metrics), read_metrics(whole.metrics)
    assert lines[4] == expected[4] and lines[3] == expected[3]
    folder = whole.checkpoints / "step_000004" / "policy"
    plain, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    loaded = [file.name for file in folder.glob("*.safetensors")]  # by vLLM
    assert loaded == ["model.safetensors"]
    base = AutoModelForCausalLM.from_pretrained(resolve_model(short_config(**settings), QuietDisplay()))
    moved = [n for n, p in plain.named_parameters() if not torch.equal(p, base.get_parameter(n))]
    assert moved and all("proj" in name for name in moved)


def test_a_teacher_has_to_share_the_tokenizer_and_its_kl_is_what_falls(
    tiny_folder: str, random_policy: tuple[Any, Any], tmp_path: Path
) -> None:
    """On-policy distillation: a random student comes nearer to a cold-started teacher, without any reward."""
    teacher, _ = train_short(tmp_path / "teacher", update__steps=1)
    options = {
        "loss__kl_model": str(teacher.checkpoints / "best" / "policy"),
        "loss__kl_in": "alone",
        "loss__kl_coef": 1.0,
    }
    options |= {"model": tiny_folder, "optim__lr": 3e-3, "optim__warmup_ratio": 0.0, "update__steps": 12}
    run_dir, _ = train_short(tmp_path / "student", **options)
    lines = read_metrics(run_dir.metrics)[1:]
    assert lines[-1]["loss/ref_kl"] < 0.5 * lines[0]["loss/ref_kl"]
    assert all(line["loss/signal_frac"] == 0.0 for line in lines)
    events = read_metrics(run_dir.events) if run_dir.events.exists() else []
    assert lines[0]["rollout/success"] == 0.0 and "in_vain" not in {event["kind"] for event in events}
    assert "teacher" in run_dir.read_manifest()  # a resume refuses another one
    model, tokenizer = random_policy
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "stranger")
    stranger = str(tmp_path / "stranger")
    load_critic(stranger).save(tmp_path / "critic")  # has no tokenizer, and fewer tokens
    shorter = {"model": tiny_folder, "algo": "so_ppo"}
    for number, setting in enumerate(
        (
            {**options, "loss__kl_model": stranger},
            {**shorter, "critic": stranger},
            {**shorter, "critic": str(tmp_path / "critic")},
        )
    ):
        with pytest.raises(UserError, match="another tokenizer"):
            train_short(tmp_path / f"other{number}", **setting)
