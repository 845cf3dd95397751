"""The jobs of configs/cluster, run with stand-ins for a cluster's commands that write down their calls."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sorl_train.config.files import CLUSTER, config_folder, load_config, packaged_configs
from sorl_train.config.options import parse
from sorl_train.openrlhf.engine_limits import TESTED

FOLDER = config_folder() / CLUSTER
SKYPILOT: dict[str, Any] = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
START, RAY_JOB = yaml.safe_load_all((FOLDER / "kuberay.yaml").read_text())
NOTE = 'echo "$(basename "$0") $* [$RAY_process_group_cleanup_enabled ${RAY_ADDRESS:-}]" >> "$CALLS"'
RUN = "/shared/runs/nq_so_ppo_2nodes"
STAND_INS = {
    "srun": NOTE,
    "ray": "case $* in *--head*--block) trap 'echo ray ended >> \"$CALLS\"; exit' TERM;; esac\n" + NOTE + "\n"
    "case $* in *--head*--block) while :; do /bin/sleep .1; done;; esac\n"
    # healthy once the head has started, which SkyPilot's first node does beside it
    '[ "$1 ${SKYPILOT_NODE_RANK:-}" != "health-check 0" ] || until grep -q -e --head "$CALLS"; do /bin/sleep .1; done',
    "sorl-train": NOTE,
    "sleep": "",
    "scontrol": "printf '%s\\n' node-a 127.0.0.1",
    "getent": "echo 127.0.1.1 STREAM node-a",  # what Debian says of a machine's own name
    "python": f'[ "$1" = - ] || exec {sys.executable} "$@"',  # - waits for the cluster's GPUs
}
JOBS = {
    "slurm": (
        (FOLDER / "slurm.sh").read_text(),
        {"SLURM_CPUS_PER_TASK": "64", "SLURM_JOB_NODELIST": "node-[a-b]"},
    ),
    "skypilot": (
        SKYPILOT["run"],
        SKYPILOT["envs"]
        | {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "0"}
        | {"SKYPILOT_NUM_GPUS_PER_NODE": "8"},
    ),
    "kuberay": (
        START["data"]["start.sh"],
        {
            item["name"]: item["value"]
            for group in RAY_JOB["spec"]["rayClusterSpec"]["workerGroupSpecs"]
            for item in group["template"]["spec"]["containers"][0]["env"]
        },
    ),
}


def calls_of(job: str, folder: Path, *, has_checkpoint: bool = False, **changed: str) -> list[str]:
    """The calls of a job whose run has a checkpoint, or none."""
    text, variables = JOBS[job]
    if has_checkpoint:
        (folder / "run" / "checkpoints" / "step_000002").mkdir(parents=True)
    text = re.sub(r"(?m)^source .*\n", "", text).replace(RUN, str(folder / "run"))
    for name, body in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    (folder / "job.sh").write_text(text)
    variables = {
        **variables,
        "PATH": f"{folder}:/usr/bin:/bin",
        "CALLS": str(folder / "calls"),
        "RUN": str(folder / "run"),
        **changed,
    }
    done = subprocess.run(["bash", "job.sh"], cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize("job", JOBS)
def test_a_job_starts_its_run_and_resumes_it_when_it_is_submitted_again(job: str, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    (train,) = (call for call in calls_of(job, tmp_path) if call.startswith("sorl-train"))
    assert "[true" in train  # an engine ends with its worker
    arguments = parse(shlex.split(train.partition(" [")[0])[1:])
    assert arguments.config == "paper/nq_so_ppo_2nodes" and arguments.overwrite
    cluster = load_config(arguments.config, arguments.overrides).cluster
    assert (cluster.nodes, cluster.gpus_per_node) == (2, 8)
    assert arguments.overrides["run_dir"] == run and "retriever" in arguments.overrides["search.url"]
    (tmp_path / "calls").unlink()
    calls = calls_of(job, tmp_path, has_checkpoint=True)
    (train,) = (call for call in calls if call.startswith("sorl-train"))
    assert train.startswith(f"sorl-train --resume --run_dir {run} [")


def test_nodes_of_slurm_join_at_an_address_that_others_reach_and_end_engines_with_their_workers(
    tmp_path: Path,
) -> None:
    calls = calls_of("slurm", tmp_path)
    ours = "[true 127.0.0.1:6379]"
    head, worker = (
        next(call for call in calls if f"--nodelist={name}" in call) for name in ("node-a", "127")
    )
    assert "ray start --head --node-ip-address=127.0.0.1 --port=6379 --num-gpus=8" in head
    assert "ray start --address=127.0.0.1:6379 --num-gpus=8" in worker
    assert head.endswith("[true ]") and worker.endswith("[true ]")
    (train,) = (call for call in calls if call.startswith("sorl-train"))
    assert train.endswith(ours)
    assert f"ray stop {ours}" in calls


def test_nodes_of_skypilot_join_the_first_one_and_end_with_it(tmp_path: Path) -> None:
    calls = calls_of("skypilot", tmp_path)
    assert sum("ray start --head --node-ip-address=10.0.0.1 --port=6379" in call for call in calls) == 1
    assert any(call.startswith("sorl-train") and call.endswith("10.0.0.1:6379]") for call in calls)
    assert calls[-1] == "ray ended"
    (tmp_path / "calls").unlink()
    calls = calls_of("skypilot", tmp_path, SKYPILOT_NODE_RANK="1")
    assert any("ray start --address=10.0.0.1:6379 --num-gpus=8" in call for call in calls)
    assert not any(call.startswith("sorl-train") for call in calls)


def test_the_jobs_ask_for_the_machines_and_versions_of_the_config() -> None:
    assert SKYPILOT["num_nodes"] == 2 and SKYPILOT["resources"]["accelerators"].endswith(":8")
    cluster = RAY_JOB["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert group["replicas"] == 2 and container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert cluster["rayVersion"] == TESTED["ray"]
    assert not any(name.startswith(CLUSTER) for name in packaged_configs())
