"""The Slurm script of docs/scaling_out.md, run with stand-ins for a cluster's commands that write down their calls."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "scaling_out.md"
NOTE = 'echo "$(basename "$0") $* [$RAY_process_group_cleanup_enabled ${RAY_ADDRESS:-}]" >> "$CALLS"'
STAND_INS = {
    "srun": NOTE,
    "ray": NOTE,
    "sorl-train": NOTE,
    "sleep": "",
    "scontrol": "printf '%s\\n' node-a 127.0.0.1",
    "getent": "echo 127.0.1.1 STREAM node-a",  # what Debian says of a machine's own name
    "python": f'[ "$1" = - ] || exec {sys.executable} "$@"',  # - waits for the cluster's GPUs
}


def script() -> str:
    (found,) = re.findall(r"```bash\n(#!/bin/bash.*?)```", PAGE.read_text(), flags=re.DOTALL)
    return found


@pytest.fixture
def calls(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The calls of a job whose run has a checkpoint, or none."""
    run_dir = tmp_path / "run"
    if request.param:
        (run_dir / "checkpoints" / "step_000002").mkdir(parents=True)
    text = script().replace("/shared/runs/nq_so_ppo_2nodes", str(run_dir))
    text = text.replace("source /shared/envs/sorl/bin/activate\n", "")
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(text)
    path = f"{tmp_path}:/usr/bin:/bin"
    slurm = {"SLURM_CPUS_PER_TASK": "64", "SLURM_JOB_NODELIST": "node-[a-b]"}
    variables = {"PATH": path, "CALLS": str(tmp_path / "calls"), **slurm}
    done = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return (tmp_path / "calls").read_text().splitlines()


@pytest.mark.parametrize("calls", [False], indirect=True)
def test_nodes_join_at_an_address_that_others_reach_and_end_engines_with_their_workers(
    calls: list[str],
) -> None:
    ours = "[true 127.0.0.1:6379]"
    head, worker = (
        next(call for call in calls if f"--nodelist={name}" in call) for name in ("node-a", "127")
    )
    assert "ray start --head --node-ip-address=127.0.0.1 --port=6379 --num-gpus=8" in head
    assert "ray start --address=127.0.0.1:6379 --num-gpus=8" in worker
    assert head.endswith("[true ]") and worker.endswith("[true ]")
    (train,) = (call for call in calls if call.startswith("sorl-train"))
    assert "--config paper/nq_so_ppo_2nodes" in train and "--overwrite" in train and train.endswith(ours)
    assert f"ray stop {ours}" in calls


@pytest.mark.parametrize("calls", [True], indirect=True)
def test_a_job_that_is_submitted_again_resumes(calls: list[str]) -> None:
    assert any(re.match(r"sorl-train --resume --run_dir \S+/run \[", call) for call in calls)
