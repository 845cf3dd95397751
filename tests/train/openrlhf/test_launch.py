"""What can be said of the OpenRLHF engine without OpenRLHF: flags, refusals, the watchdog, causes of death."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_env.errors import UserError
from sorl_env.task import Limits
from sorl_env.trajectory import StopReason
from sorl_train.config.files import load_config
from sorl_train.config.run_settings import ClusterConfig
from sorl_train.config.schema import flatten
from sorl_train.config.settings import TrainConfig
from sorl_train.learner.batch import Batch, by_rank, collate, put_together, rows_by_rank
from sorl_train.learner.trust_region import final_kl_sample
from sorl_train.openrlhf import engine_limits, launch
from sorl_train.openrlhf.engine_limits import check, check_attention, critic_start
from sorl_train.openrlhf.flags import ALLOWED, COPIED, Placement, as_arguments, openrlhf_flags
from sorl_train.openrlhf.launch import cause_of_death, follow
from sorl_train.openrlhf.prompts import exclude_older, training_loader
from sorl_train.openrlhf.rendezvous import rendezvous_port
from sorl_train.rollout.jobs import training_jobs
from sorl_train.run.folder import RunDir
from sorl_train.run.metrics_log import MetricsLog

from ..conftest import QuietDisplay
from ..learner.test_batch import trajectory
from ..learner.test_overlong import of_length

CLUSTER = {"engine": "openrlhf", "rollout.batch_size": 512, "update.mini_batch_size": 256, "optim.lr": 1e-6}


ASYNC = {"cluster__async_rollout": True, "cluster__vllm_engines": 1, "rollout__max_staleness": 1}


def settings(**overrides: Any) -> TrainConfig:
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_config("minihop", CLUSTER | dotted)


def flags(config: TrainConfig, resume: Path | None = None) -> dict[str, Any]:
    return openrlhf_flags(config, RunDir(Path("runs/x")), "m", Limits(), resume=resume)


def test_the_papers_placement() -> None:
    config = settings(update__micro_batch_size=8)
    check(config)
    place = Placement.of(config.cluster)
    assert (place.ranks, place.gpus, place.shared) == (8, 8, True)
    unbiased = settings(loss__kl_coef=0.1, loss__kl_type="k3_unbiased")
    assert flags(unbiased)["algo.kl.estimator"] == "k3"  # OpenRLHF knows no other, and the loss is ours
    made = flags(config)
    assert made["vllm.tensor_parallel_size"] == 4 and made["vllm.num_engines"] == 2
    assert made["train.batch_size"] == 256 and made["train.micro_batch_size"] == 8
    assert made["vllm.enable_sleep"] and made["ds.enable_sleep"] and made["ds.adam_offload"]
    assert made["ds.attn_implementation"] == "sdpa" and made["vllm.sync_backend"] == "nccl"
    assert not made["ckpt.load_enable"] and made["ckpt.path"].endswith("runs/x/checkpoints")
    resumed = flags(config, resume=Path("/runs/x/checkpoints/step_000040"))
    assert resumed["ckpt.load_enable"] and resumed["ckpt.path"] == "/runs/x/checkpoints/step_000040"


def test_asynchronous_sampling_has_gpus_of_its_own() -> None:
    config = settings(
        cluster__async_rollout=True, cluster__vllm_engines=1, rollout__max_staleness=2, cluster__nodes=1
    )
    check(config)
    place = Placement.of(config.cluster)
    assert (place.ranks, place.sample_gpus, place.gpus, place.shared) == (4, 4, 8, False)
    made = flags(config)
    assert made["train.async_enable"] and made["train.async_queue_size"] == 2
    assert not made["vllm.enable_sleep"] and made["actor.num_gpus_per_node"] == 4


def test_micro_batches_divide_a_ranks_share() -> None:
    place = Placement(1, 8, 8, shared=True)
    assert place.micro_batch(64, 256) == 32
    assert place.micro_batch(5, 256) == 4
    assert place.micro_batch(64, 8) == 1


def test_the_users_own_flags_come_last_and_win() -> None:
    mine = {"ds.overlap_comm": True, "ds.attn_implementation": "flash_attention_3"}
    config = settings(cluster__flags=mine)
    check(config)
    made = flags(config)
    assert made["ds.overlap_comm"] is True and made["ds.attn_implementation"] == "flash_attention_3"
    words = as_arguments({"a": True, "b": False, "c": None, "d": [0.9, 0.999], "e": 1e-6, "f": "x"})
    assert words == ["--a", "--d", "0.9", "0.999", "--e", "1e-06", "--f", "x"]


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ({"lora__rank": 8}, "is for engine=local"),
        (
            {"algo": "so_grpo", "rollout__group_size": 4, "rollout__dynamic_sampling": 2},
            "rollout.dynamic_sampling=2 is for engine=local",
        ),
        (
            {"algo": "so_grpo", "rollout__group_size": 4, "replay__size": 8},
            "replay.size=8 is for engine=local, whose checkpoints hold the buffer: use 0",
        ),
        ({"hardware__dtype": "float32"}, "OpenRLHF trains in bfloat16"),
        ({"cluster__zero_stage": 1}, "cluster.zero_stage should be greater than or equal to 2, it is 1"),
        ({"cluster__partial_rollout": True}, "needs cluster.async_rollout"),
        ({"cluster__async_rollout": True}, "set rollout.max_staleness to 1 or more"),
        ({"rollout__max_staleness": 1}, "needs cluster.async_rollout with this engine"),
        ({"cluster__vllm_engines": 1}, "has to be all of them"),
        ({"cluster__async_rollout": True, "rollout__max_staleness": 1}, "leave 0 of 1 nodes of 8 GPUs"),
        (
            {"update__mini_batch_size": 4, "rollout__batch_size": 4},
            "mini_batch_size 4 does not divide over 8 GPUs",
        ),
        ({"stage": "sft"}, "stage=sft is for engine=local"),
        ({"hardware__device": "cuda:1"}, "hardware.device=cuda:1 names one GPU"),
        (ASYNC | {"sampler__top_p": 0.9}, "sampler.top_p=0.9 does not go with cluster.async_rollout"),
        (
            ASYNC | {"correction__mode": "truncate"},
            "correction.mode=truncate, correction.sequence_mask=None does not go with cluster.async_rollout",
        ),
        (
            {"cluster__flags": {"ds.ring_attn_size": 2}},
            "cluster.flags: ds.ring_attn_size is not tuned by sorl",
        ),
        ({"cluster__flags": {"actor.eps_clip": 0.3}}, "whose settings decide losses"),
        ({"cluster__flags": {"vllm.gpu_memory_utilization": 0.5}}, "use cluster.vllm_memory"),
        ({"cluster__flags": {"ds.overlap_com": True}}, "placement. Did you mean 'ds.overlap_comm'?"),
        ({"cluster__flags": {"--ds.overlap_comm": True}}, "--ds.overlap_comm is not tuned by sorl, whose"),
    ],
)
def test_what_it_cannot_do_is_refused(overrides: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        check(settings(**overrides))
    assert complaint in str(caught.value)


def test_a_flag_that_follows_from_a_setting_names_one_that_exists() -> None:
    assert set(COPIED.values()) <= set(flatten(TrainConfig()))
    assert not set(COPIED) & set(ALLOWED)


def test_where_the_critic_starts_is_said(tmp_path: Path) -> None:
    assert f"starts from {tmp_path}, which has no value_head.safetensors, with" in critic_start(str(tmp_path))
    (tmp_path / "value_head.safetensors").write_bytes(b"")
    assert f"starts from {tmp_path} with the value head that is there" in critic_start(str(tmp_path))


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {**engine_limits.TESTED, "ray": "2.60.0", "deepspeed": None}
    monkeypatch.setattr(engine_limits, "installed", found.get)
    with pytest.raises(UserError) as caught:
        engine_limits.check_versions()
    text = str(caught.value)
    assert "ray 2.55.0 is needed, 2.60.0 is installed" in text
    assert "deepspeed 0.19.6 is needed, none is installed" in text
    assert "openrlhf 0.11.2" not in text and "make openrlhf" in text


def test_a_gpu_without_compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine_limits.check_compilers()  # no GPU, nothing to compile for one
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(tmp_path))
    monkeypatch.setattr("shutil.which", {"g++": None}.get)
    with pytest.raises(UserError, match=r"nvcc and g\+\+ cannot be found.*CUDA_HOME point to it \(it is /"):
        engine_limits.check_compilers()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setattr("shutil.which", {"g++": "/usr/bin/g++"}.get)
    engine_limits.check_compilers()


def test_a_run_that_would_wait_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 7)
    engine_limits.check_gpus(ClusterConfig(gpus_per_node=1, vllm_engines=1, vllm_tensor_parallel=1))
    with pytest.raises(UserError, match="needs 8 GPUs, and torch sees 7"):
        engine_limits.check_gpus(ClusterConfig(gpus_per_node=8))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    engine_limits.check_gpus(ClusterConfig(gpus_per_node=8))


def test_a_kernel_that_is_not_installed_is_refused_and_the_default_needs_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_limits, "installed", {"flash-attn": "2.8.3"}.get)
    for kernel in ("sdpa", "flash_attention_2", "kernels-community/flash-attn2"):
        check_attention({"ds.attn_implementation": kernel})
    monkeypatch.setattr(engine_limits, "installed", {}.get)
    check_attention({})
    with pytest.raises(UserError) as caught:
        check_attention({"ds.attn_implementation": "flash_attention_2"})
    assert "ds.attn_implementation=flash_attention_2 needs the package flash-attn" in str(caught.value)


def test_workers_find_a_stand_in_for_flash_attn_only_where_it_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for versions, folders in (({}, [str(launch.WITHOUT_FLASH_ATTN)]), ({"flash-attn": "2.8.3"}, [])):
        monkeypatch.setattr(launch, "installed", versions.get)
        assert launch.import_folders(on_cpu=False) == folders
        assert launch.import_folders(on_cpu=True) == [str(launch.CPU_MODE), *folders]


def test_the_watchdog_ends_a_run_that_writes_nothing(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    (tmp_path / "openrlhf.log").write_text("Loading weights\n")
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with pytest.raises(UserError) as caught:
        follow(process, run_dir, QuietDisplay(), deadline_s=1.0, from_step=0)
    assert process.returncode is not None
    assert "wrote nothing for 1 s" in str(caught.value) and "Loading weights" in str(caught.value)


def test_steps_are_shown_as_they_are_logged(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    shown: list[tuple[int, float]] = []

    class Display(QuietDisplay):
        def step(self, step: int, metrics: Any) -> None:
            shown.append((step, metrics["time/step_s"]))

    log = MetricsLog(run_dir, tensorboard=False)
    for step in range(3):
        log.log(step, {"rollout/success": 0.5, "time/step_s": 1.0 + step})
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    follow(process, run_dir, Display(), deadline_s=60.0, from_step=0)
    assert shown == [(1, 2.0), (2, 3.0)]


@pytest.mark.parametrize(
    ("log", "interrupted"),
    [
        ("sorl_train.openrlhf.train_step.Stopped: stopped after step 3\n", True),
        ("OSError: no space\n", False),
    ],
)
def test_a_run_that_breaks_down_after_ctrl_c_was_not_interrupted(
    log: str, interrupted: bool, tmp_path: Path
) -> None:
    (tmp_path / "openrlhf.log").write_text(log)
    ends = "import time; time.sleep(2); raise SystemExit(1)"
    process = subprocess.Popen([sys.executable, "-c", ends], start_new_session=True)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
        follow(process, RunDir(tmp_path), QuietDisplay(), deadline_s=60.0, from_step=0)
    assert process.returncode == 1 and RunDir(tmp_path).stop_file.exists()


def test_what_ended_an_earlier_start_did_not_end_this_one(tmp_path: Path) -> None:
    (tmp_path / "openrlhf.log").write_text("Stopped: stopped after step 3\n")
    with launch._process(["--no-such-flag"], dict(os.environ), RunDir(tmp_path)) as process:
        process.wait()
    assert "stopped after step 3" not in launch._breakdown(process.returncode, RunDir(tmp_path))
    assert (tmp_path / "openrlhf.log").read_text().startswith("Stopped: ")


def test_the_cause_of_death_is_found_in_the_log() -> None:
    died = textwrap.dedent(
        """\
        ray.exceptions.RayTaskError(ActorDiedError): \x1b[36mray::PPOTrainer.fit()\x1b[39m (pid=1, ip=1.1.1.1)
          File "trainers.py", line 376, in fit
        ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
        \tclass_name: RolloutRayActor
        \tactor_id: ece004cb
        The actor is dead because its worker process has died.
        \x1b[36m(CriticWorker pid=2)\x1b[0m score: 100%
        """
    )
    assert cause_of_death(died) == "the worker RolloutRayActor died"
    ours = "Traceback\n  File ..\nsorl_env.errors.UserError: the prompt of example 'x' has 9 tokens\n"
    assert cause_of_death(ours) == "the prompt of example 'x' has 9 tokens"
    assert (
        cause_of_death("ValueError: no such thing\nmore of it\n\nlater\n")
        == "ValueError: no such thing\nmore of it"
    )
    assert cause_of_death("all is well\n") == ""


def test_prompts_come_in_the_local_engines_order_and_a_loader_resumes() -> None:
    config = settings(rollout__group_size=4, algo="so_grpo", update__steps=3, update__mini_batch_size=512)
    arguments = (config.rollout, config.seed, config.update.steps, 1000)
    loader = training_loader(*arguments)
    assert len(loader) == 3 * 128
    places = [json.loads(labels[0]) for _, _, labels, _ in loader]
    for step in (1, 2, 3):
        jobs = {
            job.group_id: job.example_index for job in training_jobs(config.rollout, config.seed, 1000, step)
        }
        ours = places[(step - 1) * 128 : step * 128]
        assert {place["group"]: place["index"] for place in ours} == jobs
    again = training_loader(*arguments)
    first = iter(again)
    for _ in range(5):
        next(first)
    resumed = training_loader(*arguments)
    resumed.load_state_dict(again.state_dict())
    assert json.loads(next(iter(resumed))[2][0]) == places[5]


def test_what_was_sampled_too_long_ago_is_excluded() -> None:
    base = trajectory("a", [1, 2], [-1, 0], [1.0])
    (turn,) = base.turns
    versions_of = [
        dataclasses.replace(base, turns=(dataclasses.replace(turn, policy_version=v),)) for v in (3, 4, 5)
    ]
    kept = exclude_older(versions_of, oldest=4)
    assert [t.excluded for t in kept] == [True, False, False]
    assert kept[0].stop_reason is StopReason.ABORTED and "too old" in str(kept[0].error)


def batch_of(rows: int) -> Batch:
    """Trajectories of different lengths, in no order."""
    return collate([of_length(6 + (7 * row) % 31) for row in range(rows)])


@pytest.mark.parametrize("rows", [1, 3, 7, 8, 9])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_ranks_have_equally_many_rows_and_each_trajectory_counts_once(rows: int, ranks: int) -> None:
    batch = batch_of(rows)
    shares = by_rank(batch, ranks)
    assert {len(share) for share in shares} == {-(-rows // ranks)}
    counted = [
        name for share in shares for name in (share.ids[i] for i in share.loss_mask.any(dim=1).nonzero())
    ]
    assert sorted(counted) == sorted(batch.ids)
    assert sum(int(share.loss_mask.sum()) for share in shares) == int(batch.loss_mask.sum())
    found = [share.token_ids[:, 1:].float() for share in shares]
    whole = put_together(batch, rows_by_rank(batch, ranks), found)
    assert torch.equal(whole, batch.token_ids[:, 1:].float())


def test_the_trust_region_sees_loss_tokens_whatever_was_filtered() -> None:
    """32 trajectories over 8 ranks: the longest of each rank are filtered, as overlong.exclude does.

    Every fourth row of each rank's share, longest first, would be a filtered one.
    """
    batch = batch_of(32)
    loss_mask = batch.loss_mask.clone()
    loss_mask[torch.argsort(batch.lengths, descending=True)[:8]] = False
    batch = batch.with_fields(loss_mask=loss_mask)
    assert not any(share.loss_mask[::4].any() for share in by_rank(batch, 8))
    sample = by_rank(batch.rows(final_kl_sample(batch.loss_mask)), 8)
    assert sum(int(share.loss_mask.any(dim=1).sum()) for share in sample) == 6  # of 24
    assert {len(share) for share in sample} == {1}


def test_rank_0_meets_the_others_at_a_free_port_that_no_outgoing_connection_gets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert all(20000 <= rendezvous_port() < 32768 for _ in range(50))
    with socket.socket() as busy:
        busy.bind(("", rendezvous_port()))
        taken, free = busy.getsockname()[1], rendezvous_port()
        monkeypatch.setattr(random.SystemRandom, "sample", lambda *_: [taken, free])
        assert rendezvous_port() == free
        monkeypatch.setattr(random.SystemRandom, "sample", lambda *_: [taken])
        with pytest.raises(RuntimeError, match="none of 1000 ports"):
            rendezvous_port()
