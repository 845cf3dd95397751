"""Two of the paper's runs, two real steps of each: their own files, with fewer and shorter trajectories on a CPU.

test_runs.py has a run of two ranks with group advantages.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_env import Example, ToolUseEnv
from sorl_env.task.registry import load_task
from sorl_train.config.files import load_config
from sorl_train.models.policy import load_policy, load_tokenizer
from sorl_train.models.tiny import build_tiny_policy
from sorl_train.sft.fine_tune import expert_demos, fine_tune

from ..config.test_paper_configs import SHRUNK
from ..conftest import flags
from .conftest import SHORT, metrics

pytestmark = pytest.mark.openrlhf

# What changes of a paper's file: its sizes, and a rate that shows in the weights after two steps.
ON_A_CPU = {
    **{name: value for name, value in SHRUNK.items() if name not in ("engine", "hardware.threads")},
    **{name: SHORT[name] for name in ("cluster.gpus_per_node", "cluster.vllm_engines")},
    **{name: SHORT[name] for name in ("cluster.vllm_tensor_parallel", "cluster.deadline_s")},
    "optim.lr": 1e-3,
}


def guess(example: Example, observations: Sequence[str]) -> str:
    """One of a few answers, whatever is asked: right now and then, which is all a step needs."""
    number = sum(map(ord, example.id)) // 2
    options = [*example.options] if example.options else ["Paris", "Rome"]
    return f"<think> so </think> <answer> {options[number % len(options)]} </answer>"


def learn(env: ToolUseEnv, folder: Path) -> None:
    """Supervised steps on the guesses."""
    settings = {"sft.steps": 60, "sft.batch_size": 8, "sft.micro_batch_size": 8, "sft.lr": 1e-2}
    tokenizer, model = load_tokenizer(str(folder)), load_policy(str(folder))
    demos = expert_demos(env, tokenizer, 64, use_chat_template=False)
    sft = load_config("minihop", settings).sft
    fine_tune(model, demos, sft, tokenizer.pad_token_id, lambda step, metrics: None, seed=0, dtype="auto")
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def guessing(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Task -> a policy that has learned to guess, and the data: questions on which that is right at times."""
    made: dict[str, dict[str, Any]] = {}

    def build(name: str) -> dict[str, Any]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            data = None  # AlphaMed19K: its embedded questions
            if name == "nq":
                rows = [
                    {"id": f"q{i}", "question": f"City {i}?", "golden_answers": [("Paris", "Rome")[i % 2]]}
                    for i in range(8)
                ]
                data = str(folder / "questions.jsonl")
                Path(data).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            task = replace(load_task(name), expert=guess, vocabulary=lambda: ["Paris Rome A B C D so"])
            build_tiny_policy(task, folder / "policy", hidden_size=64, num_layers=1, num_heads=2)
            learn(ToolUseEnv(task, data=data), folder / "policy")
            made[name] = {"model": str(folder / "policy"), "data": data, "eval_data": None}
        return made[name]

    return build


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("nq_so_ppo_8gpu", {"cluster.gpus_per_node": 2, "cluster.vllm_tensor_parallel": 2}),
        ("alphamed_so_ppo_8gpu", {}),
    ],
)
def test_two_real_steps(
    name: str, more: dict[str, Any], guessing: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    start, run_dir = load_config(f"paper/{name}"), tmp_path / "run"
    settings = {**ON_A_CPU, **guessing(start.task), **more}
    words = ["--config", f"paper/{name}", "--run_dir", str(run_dir), *flags(settings)]
    command = [sys.executable, "-m", "sorl_train.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    log = run_dir / "openrlhf.log"
    assert done.returncode == 0, done.stderr + (
        log.read_text(errors="replace")[-6000:] if log.is_file() else ""
    )

    parts = set(re.findall(r"RayWorkerProc pid=\d+", log.read_text(errors="replace")))  # of a vLLM engine
    assert len(parts) == (2 if settings["cluster.vllm_tensor_parallel"] == 2 else 0)
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(math.isfinite(value) for line in lines for value in line.values() if value is not None)
    reward = "reward/multiple_choice" if start.task == "alphamed19k" else "reward/exact_match"
    assert any(0 < line[reward] < 1 for line in lines[1:])
    assert any(line["loss/grad_norm"] > 0 for line in lines[1:])
    assert ("loss/value" in lines[2]) == (start.algo == "so_ppo")
    assert "loss/ref_kl" in lines[2]  # the paper's KL to the reference
    manifest = json.loads((run_dir / "manifest.json").read_text())
    assert manifest["data"]["train"]["task"] == start.task and manifest["versions"]["openrlhf"] == "0.11.2"
    policy = run_dir / "checkpoints" / "step_000002" / "policy"
    before = load_policy(settings["model"]).state_dict()
    after = load_policy(str(policy)).state_dict()
    assert before.keys() == after.keys() and any(not torch.equal(before[key], after[key]) for key in before)
