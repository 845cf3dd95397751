"""A real model on real questions: SmolLM2-135M, HotpotQA, BM25 over Wikipedia passages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.task import Limits
from sorl_train.models.policy import load_policy, load_tokenizer
from sorl_train.run.files import read_jsonl

from .test_sampler import assert_exact, roll

pytestmark = pytest.mark.slow


def test_tokens_are_exact_with_a_real_tokenizer_and_template(smollm2: Path, shared_data: Path) -> None:
    """Ids are those the sampler saw and drew, and the trainer's log-probabilities are the sampler's to 1e-4."""
    limits = Limits(max_turns=3, max_new_tokens=24, max_observation_tokens=200, max_trajectory_tokens=1024)
    env = ToolUseEnv(
        "hotpotqa", data=str(shared_data / "hotpotqa/test.jsonl.gz"), tools=[search], limits=limits
    )
    model, tokenizer = load_policy(str(smollm2)), load_tokenizer(str(smollm2))
    trajectories, seen = roll(env, model, tokenizer, 3)
    assert_exact(trajectories, seen, model)
    text = tokenizer.decode(trajectories[0].token_ids)
    assert text.startswith("<|im_start|>") and "<|im_start|>assistant\n" in text
    assert any(len(t.turns) > 1 for t in trajectories)


def search(query: str) -> str:
    """Find passages."""
    return f"Doc 1 (A title): A passage about {query}."


def test_two_steps_on_real_questions(smollm2: Path, shared_data: Path, tmp_path: Path) -> None:
    """The README's command finishes two optimizer steps, of policy and critic, under 12 GB, with a complete folder.

    A step is one micro-batch of two trajectories of two short turns, for the sake of time."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "sorl_train.cli", "--config", "smollm2_hotpotqa", "--algo", "so_ppo"]
    command += ["--model", str(smollm2), "--data", str(shared_data / "hotpotqa/train_distractor.jsonl.gz")]
    command += ["--eval_data", str(shared_data / "hotpotqa/test.jsonl.gz"), "--run_dir", str(run)]
    command += ["--search.corpus", str(shared_data / "corpus/wiki.jsonl.gz"), "--update.steps", "2"]
    command += ["--eval.num_examples_final", "2", "--rollout.batch_size", "2", "--rollout.group_size", "1"]
    command += ["--update.mini_batch_size", "2", "--limits.max_turns", "2", "--limits.max_new_tokens", "48"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 2 and not summary["is_sample"]
    assert summary["peak_rss_mb"] < 12_000
    assert [line["step"] for line in read_jsonl(run / "metrics.jsonl")] == [0, 1, 2]
    files = "config.yaml manifest.json metrics.jsonl timings.jsonl report.html trajectories"
    assert {path.name for path in run.iterdir()} >= set(files.split())
    data = json.loads((run / "manifest.json").read_text())["data"]
    assert re.fullmatch(r"[0-9a-f]{64}", data["train"]["sha256"]) and data["train"]["examples"] == 298
