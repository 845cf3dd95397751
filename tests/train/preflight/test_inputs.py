"""What would stop a run is found by its dry run and by the doctor, in the words of the start."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs transformers (the train extra)")

from sorl_env.errors import UserError
from sorl_env.task.registry import load_task
from sorl_train.cli import main
from sorl_train.config.run_settings import RolloutConfig
from sorl_train.config.settings import TrainConfig
from sorl_train.models.policy import ModelShape
from sorl_train.models.tiny import build_tiny_policy
from sorl_train.openrlhf.engine_limits import check_model
from sorl_train.preflight.doctor import main as doctor
from sorl_train.preflight.inputs import repeats

Command = Callable[[list[str]], int]


def dry_run(argv: list[str]) -> int:
    return main([*argv, "--dry_run"])


def said_by(command: Command, argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[bool, str]:
    status = command(argv)
    return status == 0, " ".join("".join(capsys.readouterr()).split())


@pytest.mark.parametrize("package", ["wandb", "trackio"])
@pytest.mark.parametrize("command", [main, dry_run, doctor])
def test_a_log_without_its_package(
    command: Command,
    package: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    passed, said = said_by(command, [f"--log.{package}", "mine", "--run_dir", str(tmp_path / "run")], capsys)
    assert not passed and f"log.{package}=mine needs the package '{package}'" in said
    assert f"pip install {package}" in said
    assert not (tmp_path / "run").exists()


# -- a model that vLLM cannot cut -------------------------------------------------------------------------------
@pytest.mark.parametrize("command", [dry_run, doctor])
def test_nine_heads_for_four_gpus(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_tiny_policy(load_task("minihop"), tmp_path / "nine", hidden_size=72, num_layers=1, num_heads=9)
    argv = ["--engine", "openrlhf", "--model", str(tmp_path / "nine"), "--hardware.device", "cpu"]
    argv += "--cluster.gpus_per_node 4 --cluster.vllm_engines 1 --cluster.vllm_tensor_parallel 4".split()
    passed, said = said_by(command, argv, capsys)
    assert not passed and "it has 9 attention heads, it has 9 key-value heads. Use 3" in said


@pytest.mark.parametrize(
    ("heads", "key_value_heads", "intermediate", "parts", "fault"),
    [
        (28, 4, 18944, 4, ""),
        (8, 2, 64, 4, ""),  # two heads are copied
        (9, 3, 64, 1, ""),
        (12, 3, 64, 4, "it has 3 key-value heads"),
        (12, 2, 64, 8, "it has 12 attention heads. Use 4"),
        (8, 8, 150, 4, "its MLP has 150 units. Use 2"),
    ],
)
def test_vllms_rules(heads: int, key_value_heads: int, intermediate: int, parts: int, fault: str) -> None:
    """Those of ``ModelConfig.verify_with_parallel_config`` and of ``Qwen2Attention`` in vLLM 0.29."""
    shape = ModelShape(1, 1, 1, 1, 1, intermediate, 1, 1, key_value_heads, heads)
    cluster = dataclasses.replace(TrainConfig().cluster, vllm_tensor_parallel=parts)
    config = TrainConfig(cluster=cluster)
    if not fault:
        check_model(shape, config.cluster.vllm_tensor_parallel, config.model)
        return
    with pytest.raises(UserError, match=fault):
        check_model(shape, config.cluster.vllm_tensor_parallel, config.model)


# -- more prompts than questions --------------------------------------------------------------------------------
def test_a_step_that_asks_each_question_several_times() -> None:
    rollout = RolloutConfig(batch_size=512)
    assert "512 prompts" in repeats(rollout, 160) and "3.2 times" in repeats(rollout, 160)
    assert not repeats(rollout, 512)
    assert not repeats(RolloutConfig(batch_size=512, group_size=8), 160)  # 64 prompts
