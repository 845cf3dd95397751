"""Environment variables on a Ray cluster that was started without them; tokens stay out of every file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sorl_tools.search.http import TOKEN_VARIABLE
from sorl_train.openrlhf.driver import FORWARDED, SECRET, runtime_env
from sorl_train.openrlhf.rendezvous import rendezvous_port

TOKEN = "s3cret-t0ken-of-this-test"
ASKED = [
    TOKEN_VARIABLE,
    "https_proxy",
    "HF_HOME",
    "SORL_RUN_DIR",
    "SORL_START",
    "SORL_FOLDER",
    "EDITOR",
    "PYTHONPATH",
]

DRIVER = textwrap.dedent(
    """\
    import json, os, subprocess, sys
    import ray
    from ray.experimental import internal_kv
    from sorl_train.openrlhf.driver import runtime_env, secrets_of

    class Worker:
        def look(self, names):
            return {name: os.environ.get(name) for name in names} | {"folder": os.getcwd()}

        def look_through_a_process(self, address, names):
            # as vLLM's engine core with tensor parallel above 1
            environment = dict(ray.get_runtime_context().runtime_env)
            words = [sys.executable, __file__, address, *names]
            output = subprocess.check_output(words, env=os.environ | {"AGAIN": json.dumps(environment)})
            return json.loads(output.splitlines()[-1])

    def look(names):
        return ray.get(ray.remote(Worker).options(num_cpus=0).remote().look.remote(names))

    if __name__ == "__main__":
        address, names = sys.argv[1], sys.argv[2:]
        if "AGAIN" in os.environ:
            ray.init(address=address, runtime_env=json.loads(os.environ["AGAIN"]))
            print(json.dumps(look(names)))
            sys.exit()
        ray.init(address=address, runtime_env=runtime_env(os.environ), log_to_driver=True)
        left = f"secrets of {os.environ['SORL_RUN_DIR']}, start killed"  # of an earlier start
        internal_kv._internal_kv_put(left.encode(), b"{}", namespace=b"sorl")
        with secrets_of(os.environ):
            print("FOUND", json.dumps(look(names)))
            worker = ray.remote(Worker).remote()
            print("FURTHER", json.dumps(ray.get(worker.look_through_a_process.remote(address, names))))
        print("LEFT", len(internal_kv._internal_kv_list(b"secrets", namespace=b"sorl")))
        ray.shutdown()
    """
)


def test_what_ray_logs_has_no_secret_in_it() -> None:
    everything = dict.fromkeys(SECRET, TOKEN) | dict.fromkeys(FORWARDED, "plain")
    shown = json.dumps(runtime_env(everything))
    assert TOKEN not in shown and set(FORWARDED).isdisjoint(SECRET)
    assert {TOKEN_VARIABLE, "HF_TOKEN", "https_proxy"} <= set(SECRET)
    assert all(f'"{name}": "plain"' in shown for name in ("SORL_RUN_DIR", "HF_HOME"))


@pytest.fixture
def cluster() -> Iterator[tuple[str, Path, dict[str, str]]]:
    """A Ray cluster of its own: its address, the folder of its logs, and an environment without our variables."""
    port = rendezvous_port()
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # sockets want a short path
    bare = {name: value for name, value in os.environ.items() if name not in (*FORWARDED, *SECRET)}
    start = ["start", "--head", f"--port={port}", "--num-cpus=2", "--include-dashboard=false", "--block"]
    with (folder / "start.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *start, f"--temp-dir={folder}"],
            env=bare | {"RAY_process_group_cleanup_enabled": "true"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 120
        while "Ray runtime started" not in (folder / "start.log").read_text():
            assert process.poll() is None and time.monotonic() < deadline, (folder / "start.log").read_text()
            time.sleep(0.2)
        yield f"127.0.0.1:{port}", folder, bare
    finally:
        process.terminate()
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.openrlhf
def test_a_worker_of_a_cluster_gets_them_and_no_file_does(
    cluster: tuple[str, Path, dict[str, str]], tmp_path: Path
) -> None:
    address, folder, bare = cluster
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    proxy = f"http://me:{TOKEN}@proxy:3128"
    mine = {
        TOKEN_VARIABLE: TOKEN,
        "https_proxy": proxy,
        "HF_HOME": "/shared/hf",
        "SORL_RUN_DIR": "/shared/run",
        "SORL_START": "4b1d",
        "SORL_FOLDER": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, str(driver), address, *ASKED],
        env=bare | mine | {"EDITOR": "ed", "PYTHONPATH": "."},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    found, further = (
        json.loads(done.stdout.partition(f"{word} ")[2].splitlines()[0]) for word in ("FOUND", "FURTHER")
    )
    assert {name: found[name] for name in mine} == mine
    assert found["EDITOR"] != "ed"  # what is on no list is not passed on
    assert found["folder"] == found["PYTHONPATH"] == str(tmp_path)  # the cluster was started elsewhere
    assert further == found
    assert "LEFT 0" in done.stdout
    assert TOKEN not in done.stderr
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any("runtime_env_agent" in path.name for path in files)
    holding = [path.name for path in files if TOKEN.encode() in path.read_bytes()]
    assert holding == []
