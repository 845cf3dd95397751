"""Every run of the paper: what it changes from its base, its plan, and two real steps of each task, shrunk."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[train]'")

import torch

from sorl_env.task.registry import load_task
from sorl_train.config.files import config_folder, load_config, packaged_configs
from sorl_train.config.schema import flatten
from sorl_train.models.policy import load_policy
from sorl_train.preflight.dry_run import plan_text
from sorl_train.rollout.environments import limits
from sorl_train.run.files import read_jsonl
from sorl_train.run.folder import RunDir
from sorl_train.train_rl import run

from ..conftest import QuietDisplay

NQ, HOTPOTQA, ALPHAMED = "nq_so_ppo_8gpu", "hotpotqa_so_ppo_8gpu", "alphamed_so_ppo_8gpu"
GROUPED = {"rollout.group_size": 8}
# run -> the run that it is compared with, and all that it may change of it
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "nq_ppo_8gpu": (NQ, {"algo": "ppo"}),
    "nq_turn_ppo_8gpu": (NQ, {"algo": "turn_ppo"}),
    "nq_grpo_8gpu": (NQ, {"algo": "grpo", **GROUPED}),
    "nq_gspo_8gpu": (NQ, {"algo": "gspo", **GROUPED}),
    "nq_so_grpo_8gpu": (NQ, {"algo": "so_grpo", **GROUPED}),
    "nq_ppo_mini128_8gpu": (NQ, {"algo": "ppo", "update.mini_batch_size": 128}),
    "nq_so_ppo_mini128_8gpu": (NQ, {"update.mini_batch_size": 128}),
    "nq_so_ppo_2nodes": (NQ, {"cluster.nodes": 2, "cluster.vllm_engines": 4}),
    "nq_so_ppo_8gpu_async": (
        NQ,
        {
            "rollout.max_staleness": 1,
            "cluster.vllm_engines": 1,
            "cluster.vllm_memory": 0.85,
            "cluster.async_rollout": True,
            "cluster.partial_rollout": True,
        },
    ),
    HOTPOTQA: (NQ, {"task": "hotpotqa", "update.steps": 706, "eval.num_examples_final": 7405}),
    "hotpotqa_ppo_8gpu": (HOTPOTQA, {"algo": "ppo"}),
    "hotpotqa_turn_ppo_8gpu": (HOTPOTQA, {"algo": "turn_ppo"}),
    ALPHAMED: (
        NQ,
        {
            "task": "alphamed19k",
            "model": "meta-llama/Llama-3.1-8B-Instruct",
            "eval_data": "hf:GBaker/MedQA-USMLE-4-options",
            "update.steps": 154,
            "eval.num_examples_final": 1273,
            "checkpoint.keep": 5,
        },
    ),
    "alphamed_ppo_8gpu": (ALPHAMED, {"algo": "ppo"}),
    "alphamed_so_grpo_8gpu": (ALPHAMED, {"algo": "so_grpo", **GROUPED}),
}
EVERY_RUN = [NQ, *RUNS]

# Two steps of a few short trajectories on this machine.
SHRUNK: dict[str, Any] = {
    "engine": "local",
    "search.url": None,
    "hardware.device": "cpu",
    "hardware.threads": 1,
    "limits.max_turns": 2,
    "limits.max_prompt_tokens": 512,
    "limits.max_new_tokens": 12,
    "limits.max_observation_tokens": 24,
    "limits.max_trajectory_tokens": 640,
    "rollout.batch_size": 8,
    "update.steps": 2,
    "update.mini_batch_size": 4,
    "update.micro_batch_size": 4,
    "optim.warmup_ratio": 0.0,
    "eval.num_examples": 2,
    "eval.num_examples_final": 2,
    "log.tensorboard": False,
}


# --- what the files say ---------------------------------------------------------------------------------------
def test_every_file_is_one_of_these_runs() -> None:
    files = {path.stem for path in (config_folder() / "paper").glob("*.yaml")}
    assert files == set(EVERY_RUN)
    about = [packaged_configs()[f"paper/{name}"] for name in EVERY_RUN]
    assert len(set(about)) == len(about)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_differs_from_its_base_only_in_what_it_is_about(name: str) -> None:
    base, changes = RUNS[name]
    before, after = flatten(load_config(f"paper/{base}")), flatten(load_config(f"paper/{name}"))
    assert {key: value for key, value in after.items() if value != before[key]} == changes


@pytest.mark.parametrize("name", EVERY_RUN)
def test_the_papers_settings(name: str) -> None:
    config = load_config(f"paper/{name}", {"seed": 2})
    loss = config.loss
    assert (config.optim.lr, config.optim.critic_lr, loss.kl_coef, loss.clip_eps) == (1e-6, 1e-5, 0.001, 0.2)
    assert (config.rollout.batch_size, config.update.epochs, config.seed) == (512, 1, 2)
    assert config.update.mini_batch_size == (128 if "mini128" in name else 256)
    assert (loss.clip_bias_norm, loss.clip_bias_delta) == ("token", 1.0)
    assert (loss.kl_type, loss.kl_in) == ("k3", "loss")
    assert (config.optim.warmup_ratio, config.optim.critic_warmup_ratio) == (0.285, 0.015)
    assert (config.sampler.temperature, config.sampler.top_p, config.search.top_k) == (1.0, 1.0, 3)
    found = limits(load_task(config.task), config.limits)
    assert (found.max_prompt_tokens, found.max_new_tokens, found.max_observation_tokens) == (2048, 500, 500)
    assert (found.max_trajectory_tokens, found.max_turns) == (4096, 4)
    assert (config.cluster.vllm_tensor_parallel, config.cluster.zero_stage) == (4, 3)
    assert config.cluster.offload_optimizer and config.hardware.gradient_checkpointing
    assert config.search.url  # never the task's few passages by accident


def test_steps_are_four_epochs_and_table_1_of_alphamed19k_is_kept() -> None:
    for name, questions in ((NQ, 79_168), (HOTPOTQA, 90_447), (ALPHAMED, 19_778)):
        config = load_config(f"paper/{name}")
        assert config.update.steps == 4 * questions // 512
    table_1 = 150 * 256 // 512  # the paper's 150 steps count mini-batches
    last, every = config.update.steps, config.checkpoint.every
    saved = [*range(every, last, every), last]
    assert table_1 in saved[-config.checkpoint.keep :]
    assert table_1 * 512 / 19_778 == pytest.approx(2, abs=0.1)  # "2 epochs"


# --- docs/reproduce.md ----------------------------------------------------------------------------------------
REPOSITORY = Path(__file__).parents[3]


def test_the_page_names_every_run_and_only_what_exists() -> None:
    page = (REPOSITORY / "docs" / "reproduce.md").read_text()
    for name in EVERY_RUN:
        assert f"`{name}`" in page
    for name in re.findall(r"paper/(\w+_\w+)", page):
        assert f"paper/{name}" in packaged_configs()
    for name in re.findall(r"`((?:sorl_env|sorl_train|tasks|tests)/[\w/]+(?:\.py|/))`", page):
        assert (REPOSITORY / name).exists(), name
    for name in re.findall(r"--((?:loss|update|optim)\.\w+)", page):
        assert name in flatten(load_config()), name


def test_the_page_has_every_table_figure_and_equation_of_the_paper(shared_data: Path) -> None:
    paper = shared_data.parent / "paper" / "sorl.tex"
    if not paper.is_file():
        pytest.skip(f"no paper at {paper}")
    page = (REPOSITORY / "docs" / "reproduce.md").read_text()
    labels = re.findall(r"\\label\{((?:eq|fig|tab|tb|alg|lm):[^}]+)\}", paper.read_text())
    assert len(labels) > 30
    assert [label for label in labels if label not in page] == []


# --- what they do ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", EVERY_RUN)
def test_dry_run(name: str, tiny_folder: str) -> None:
    overrides = {"model": tiny_folder, "data": None, "eval_data": None, "run_dir": "runs/x"}
    text = plan_text(load_config(f"paper/{name}", overrides))
    assert "Placement" in text and "OpenRLHF flags" in text and "Memory per GPU" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", [NQ, HOTPOTQA, ALPHAMED])
def test_two_real_steps(name: str, tiny_folder: str, tmp_path: Path) -> None:
    """Of each task; that every algorithm trains is tested on a task which a tiny policy can solve."""
    start = load_config(f"paper/{name}")
    config = load_config(f"paper/{name}", {**SHRUNK, "model": tiny_folder, "data": None, "eval_data": None})
    run_dir = RunDir.create(tmp_path / "run", config)
    assert run(config, run_dir, QuietDisplay(), False)["steps"] == 2
    lines = list(read_jsonl(run_dir.metrics))
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(math.isfinite(value) for line in lines for value in line.values() if isinstance(value, float))
    assert any(line["loss/grad_norm"] > 0 for line in lines[1:])
    before = load_policy(config.model).state_dict()
    after = load_policy(str(run_dir.checkpoints / "step_000002" / "policy")).state_dict()
    assert any(not torch.equal(before[key], after[key]) for key in before)
    assert json.loads(run_dir.manifest.read_text())["data"]["train"]["task"] == start.task
