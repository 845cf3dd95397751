"""OpenRLHF's command line with our classes in the place of its own: ``python -m sorl_train.openrlhf.driver FLAGS``.

On a Ray cluster that is already running, workers have the environment and the working folder of ``ray start``. So the
driver passes on the environment variables of the lists below and no others, and its folder, from which the relative
paths of a config start.

Ray writes the variables of a ``runtime_env`` into its logs on every node. Tokens, and proxies (whose addresses can hold
a password), therefore go through the memory of Ray's control store: each worker fetches them when it starts, and they
are deleted at the end of the run. Other jobs of the same cluster can read them while the run lasts. Their key is the
run's folder and ``SORL_START``, which is new for each start; it cannot be Ray's job, because the workers of a tensor
parallel vLLM engine belong to another one.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

# Not secret: they go through runtime_env, and so into Ray's logs.
FORWARDED = (
    "SORL_RUN_DIR SORL_START SORL_FOLDER SORL_CACHE PYTHONPATH TOKENIZERS_PARALLELISM OMP_NUM_THREADS "
    "DS_ACCELERATOR TORCH_COMPILE_DISABLE "
    "HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_ENDPOINT HF_DATASETS_CACHE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE "
    "VLLM_CPU_KVCACHE_SPACE VLLM_ENABLE_V1_MULTIPROCESSING VLLM_LOGGING_LEVEL GLOO_SOCKET_IFNAME "
    "NO_PROXY no_proxy SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE WANDB_MODE WANDB_BASE_URL WANDB_ENTITY "
    "TRACKIO_DIR TRACKIO_SPACE_ID"
).split()
# Secret, or may contain a secret: never in a file or a log.
SECRET = (
    "SORL_SEARCH_TOKEN HF_TOKEN HUGGING_FACE_HUB_TOKEN WANDB_API_KEY "
    "HTTP_PROXY HTTPS_PROXY ALL_PROXY http_proxy https_proxy all_proxy"
).split()

HOOK = "sorl_train.openrlhf.driver.prepare_worker"  # workers import it; in the driver this module is __main__
_NAMESPACE = b"sorl"
_WAIT_S = 60.0


def runtime_env(environment: Mapping[str, str]) -> dict[str, object]:
    """For ``ray.init``: the variables that may be logged, and the hook that fetches the others."""
    plain = {name: environment[name] for name in FORWARDED if name in environment}
    if "PYTHONPATH" in plain:  # Python reads it before the worker changes its folder
        plain["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, plain["PYTHONPATH"].split(os.pathsep)))
    return {"env_vars": plain, "worker_process_setup_hook": HOOK}


def cluster(environment: Mapping[str, str]) -> dict[str, Any]:
    """For ``ray.init``: the cluster at ``RAY_ADDRESS``, or a new one. Without ``local`` Ray would join any cluster that
    runs on this machine. On a CPU it counts GPUs that do not exist; a cluster that is joined has counted already."""
    if "RAY_ADDRESS" in environment:
        return {}
    gpus = int(environment.get("SORL_LOGICAL_GPUS", 0))
    return {"address": "local"} | ({"num_gpus": gpus, "num_cpus": 2 * gpus + 6} if gpus else {})


@contextmanager
def secrets_of(environment: Mapping[str, str]) -> Iterator[None]:
    """Offer the secret variables to the workers of this run within a ``with`` block."""
    from ray.experimental import internal_kv

    secrets = {name: environment[name] for name in SECRET if name in environment}
    key, of_all_starts = _key(environment), _key({**environment, "SORL_START": ""})
    internal_kv._internal_kv_del(of_all_starts, del_by_prefix=True, namespace=_NAMESPACE)  # if one was killed
    internal_kv._internal_kv_put(key, json.dumps(secrets).encode(), namespace=_NAMESPACE)
    try:
        yield
    finally:
        internal_kv._internal_kv_del(key, namespace=_NAMESPACE)


def prepare_worker() -> None:
    """Give a worker the secret variables and the run's folder; Ray calls this before anything else in the process.

    If the run does not offer them in time, Ray ends the worker and shows the message of the ``RuntimeError``.
    """
    from ray.experimental import internal_kv

    key = _key(os.environ)
    deadline = time.monotonic() + _WAIT_S  # Ray may start a worker before the run offers them
    while (found := internal_kv._internal_kv_get(key, namespace=_NAMESPACE)) is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the run offered this worker no environment variables within {_WAIT_S:.0f} s")
        time.sleep(0.1)
    os.environ.update(json.loads(found))
    try:
        os.chdir(os.environ["SORL_FOLDER"])
    except OSError as error:
        logging.getLogger(__name__).warning("this node finds no relative path of the config: %s", error)


def _key(environment: Mapping[str, str]) -> bytes:
    return f"secrets of {environment['SORL_RUN_DIR']}, start {environment['SORL_START']}".encode()


def main() -> None:
    """Connect to the Ray cluster or start one, replace OpenRLHF's classes, and run ``openrlhf.cli.train_ppo_ray``."""
    import ray
    from openrlhf.trainer import ppo_trainer, ppo_trainer_async
    from openrlhf.trainer.ray import launcher, ppo_actor, ppo_critic, vllm_engine

    from sorl_train.openrlhf import trainers, workers
    from sorl_train.openrlhf.worker_watchdog import started_workers, watched
    from sorl_train.run.files import join_lock

    join_lock()

    ray.init(runtime_env=runtime_env(os.environ), include_dashboard=False, **cluster(os.environ))
    ppo_actor.PolicyModelActor = ray.remote(num_gpus=1)(workers.PolicyWorker)
    ppo_critic.CriticModelActor = ray.remote(num_gpus=1)(workers.CriticWorker)
    launcher.ReferenceModelActor = ray.remote(num_gpus=1)(workers.ReferenceWorker)
    vllm_engine.RolloutRayActor = ray.remote(workers.RolloutWorker)
    ppo_trainer.PPOTrainer = ray.remote(trainers.Trainer)
    ppo_trainer_async.PPOTrainerAsync = ray.remote(trainers.AsyncTrainer)
    sys.argv[0] = "openrlhf.cli.train_ppo_ray"
    with secrets_of(os.environ), watched(started_workers()):
        runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
