"""``gpu_check`` on a CPU: every line runs, and planted faults are named rightly while the rest goes on."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from sorl_train.preflight.gpu_check import diagnose, main
from sorl_train.preflight.gpu_lines import LINES, Found, synchronized

from ...waiting import wait_until

PRETENDED = Path(__file__).with_name("pretended_vllm")


def check(out: Path, *lines: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit status and the lines of the JSON, by name."""
    status = main(["--tiny", "--out", str(out), *(["--only", *lines] if lines else [])])
    return status, {line["name"]: line for line in json.loads((out / "gpu_check.json").read_text())["lines"]}


def plant(folder: Path, patch: pytest.MonkeyPatch, code: str = "", vllm: str = "") -> None:
    """Let every child import ``code`` first (as sitecustomize), and find a vLLM: what is pretended, or another text."""
    folder.mkdir()
    if code:
        (folder / "sitecustomize.py").write_text(code)
    if vllm == "pretended":
        (folder / "vllm").symlink_to(PRETENDED)
    elif vllm:
        (folder / "vllm.py").write_text(vllm)
    patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    patch.syspath_prepend(folder)  # where the parent looks whether there is a vLLM
    importlib.invalidate_caches()


@pytest.mark.slow
def test_every_line_runs(tmp_path: Path) -> None:
    status, lines = check(tmp_path)
    assert status == 0 and list(lines) == list(LINES)
    done = ("machine", "transformers", "trust region", "speed 0.5B", "speed 1.5B", "kill and resume")
    assert {lines[name]["status"] for name in done} == {"pass"}
    assert lines["tests"]["status"] == "skipped" and " skipped" in lines["tests"]["detail"]
    assert lines["kill and resume"]["detail"] == "equal to the byte"
    speed = lines["speed 1.5B"]["figures"]
    assert speed["rollout tokens/s"] > 0 and speed["update tokens/s"] > 0 and 0 < speed["MFU"] < 1
    assert 0 < speed["GB updating"] < speed["GB updating, planned"]
    for name, package in (("vllm", "vllm"), ("openrlhf", "openrlhf")):
        if importlib.util.find_spec(package) is None:
            assert lines[name]["status"] == "skipped" and "pip install" in lines[name]["fix"]
    page = (tmp_path / "gpu_check.html").read_text()
    assert all(f"<h2>{name}: <span" in page for name in LINES) and "://" not in page
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


FAULTS: dict[str, tuple[str, str]] = {
    "out of memory": (
        "import torch, sorl_train.engine as e\n"
        "def update(*args): raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 9 GiB.')\n"
        "e.LocalEngine.update = update",
        "out of memory: OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB.",
    ),
    "mismatch": (
        "import sorl_train.rollout.sampler as s\n"
        "draw = s.draw\n"
        "s.draw = lambda *args: (draw(*args)[0], [p - 0.3 for p in draw(*args)[1]])",
        "mismatch with the same weights: step 1: sampler and trainer disagree",
    ),
    "wrong weights": (
        "import copy, sorl_train.engine as e\n"
        "made = e.TransformersSampler\n"
        "e.TransformersSampler = lambda model, *args: made(copy.deepcopy(model), *args)",
        "wrong weights in the sampler after an update: step 2: sampler and trainer disagree",
    ),
    "crash": (
        "import os, sorl_train.engine as e\ne.LocalEngine.update = lambda *args: os.abort()",
        "crashed with SIGABRT",
    ),
    "killed": (
        "import os, sorl_train.engine as e\ne.LocalEngine.update = lambda *args: os.kill(os.getpid(), 9)",
        "killed from outside",
    ),
    "more memory than planned": (
        "import sorl_train.preflight.preflight as p\np.LIBRARIES = -1_000_000_000",
        "updating took",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_the_next_line_runs(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, told = FAULTS[fault]
    plant(tmp_path / "planted", monkeypatch, code)
    status, lines = check(tmp_path / "out", "transformers", "machine")
    assert status == 1 and lines["transformers"]["status"] == "fail" and lines["machine"]["status"] == "pass"
    assert lines["transformers"]["detail"].startswith(told) and lines["transformers"]["fix"]


BROKEN: dict[str, tuple[str, str]] = {
    "trust region": (
        "import sorl_train.learner.trust_region as t\nt.TrustRegion.step = t.TrustRegion.end = lambda *a, **k: False",
        "0 moves back",
    ),
    "kill and resume": ("import sorl_train.engine as e\ne.load_optimizers = lambda *args: None", "off by "),
}


@pytest.mark.slow
@pytest.mark.parametrize("line", BROKEN)
def test_what_a_line_promises_can_be_broken(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, told = BROKEN[line]
    plant(tmp_path / "planted", monkeypatch, code)
    status, lines = check(tmp_path / "out", line)
    assert status == 1 and lines[line]["detail"].startswith(told) and lines[line]["fix"], lines


@pytest.mark.slow
def test_a_line_that_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import subprocess, time\n"
        "started = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(started.pid))\n"
        "print('waiting for NCCL', flush=True)\n"
        "time.sleep(600)"
    )
    plant(tmp_path / "planted", monkeypatch, code)
    monkeypatch.setitem(LINES, "machine", LINES["machine"]._replace(seconds=2))
    _, lines = check(tmp_path / "out", "machine")
    assert lines["machine"]["detail"] == "not done after 2 s; the last it said: waiting for NCCL"
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
@pytest.mark.parametrize(
    ("vllm", "pretends", "status", "told"),
    [
        ("", "", "skipped", "vLLM is not installed"),
        (
            "raise ImportError('libcudart.so.13: cannot open')",
            "",
            "fail",
            "a package does not import: ImportError: libcudart.so.13",
        ),
        ("pretended", "", "pass", "nats after an update"),
        ("pretended", "stale", "fail", "wrong weights in the sampler after an update: step 2"),
    ],
)
def test_vllm(
    vllm: str, pretends: str, status: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path / "planted", monkeypatch, vllm=vllm)
    monkeypatch.setenv("PRETENDED_VLLM", pretends)
    _, lines = check(tmp_path / "out", "vllm")
    assert lines["vllm"]["status"] == status and told in lines["vllm"]["detail"], lines
    assert bool(lines["vllm"]["fix"]) == (status != "pass")


@pytest.mark.openrlhf
def test_real_engines(tmp_path: Path) -> None:
    status, lines = check(tmp_path, "vllm", "openrlhf")
    assert status == 0 and {line["status"] for line in lines.values()} == {"pass"}, lines


@pytest.mark.parametrize(
    ("status", "log", "told"),
    [
        (None, "Capturing CUDA graphs", "not done after 9 s; the last it said: Capturing CUDA graphs"),
        (
            1,
            "ValueError: No available memory for the cache blocks. Try",
            "out of memory: ValueError: No available",
        ),
        (1, "sorl_env.errors.UserError: device cuda: torch sees no GPU; use cpu", "no GPU: device cuda"),
        (
            1,
            "RuntimeError: CUDA error: no kernel image is available",
            "driver, CUDA and torch do not fit together",
        ),
        (1, "ValueError: odd", "ValueError: odd"),
        (-signal.SIGSEGV, "", "crashed with SIGSEGV: it printed nothing"),
    ],
)
def test_what_a_log_says(status: int | None, log: str, told: str) -> None:
    detail, fix = diagnose(status, log, 9)
    assert detail.startswith(told) and fix


def test_an_update_that_hides_old_weights_proves_nothing() -> None:
    def found(kl: float) -> Found:
        rows: list[Mapping[str, float]] = [{"loss/trust_kl": kl, "rollout/mismatch_mean": 0.01}] * 2
        return synchronized(rows, 0.1, Found("pass", ""))

    assert found(0.019).status == "fail" and "too little to tell" in found(0.019).detail
    assert found(0.021).status == "pass"


def test_an_unknown_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), "--only", "vlm"]) == 2
    assert "there is no line 'vlm': choose from machine, tests," in capsys.readouterr().err
