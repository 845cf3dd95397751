"""OpenRLHF's command line with our classes in the place of its own: ``python -m sorl_train.openrlhf.driver FLAGS``.

``launch`` starts it. On a Ray cluster that is already running, workers have the environment of ``ray start`` and not
that of the user's terminal, so the driver passes on the environment variables of the lists below, and no others.

Ray writes the variables of a ``runtime_env`` into its logs on every node. Tokens, and proxies (whose addresses can hold
a password), therefore go through the memory of Ray's control store: each worker of the run fetches them when it starts
(``worker_process_setup_hook``), and they are deleted at the end of the run. They are in no log, file or manifest, but
other jobs of the same cluster can read them while the run lasts.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# Not secret: they go through runtime_env, and so into Ray's logs.
FORWARDED = (
    "SORL_RUN_DIR SORL_CACHE PYTHONPATH TOKENIZERS_PARALLELISM OMP_NUM_THREADS DS_ACCELERATOR TORCH_COMPILE_DISABLE "
    "HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_ENDPOINT HF_DATASETS_CACHE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE "
    "VLLM_CPU_KVCACHE_SPACE VLLM_ENABLE_V1_MULTIPROCESSING VLLM_LOGGING_LEVEL GLOO_SOCKET_IFNAME "
    "NO_PROXY no_proxy SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE WANDB_MODE WANDB_BASE_URL WANDB_ENTITY"
).split()
# Secret, or may contain a secret: never in a file or a log.
SECRET = (
    "SORL_SEARCH_TOKEN HF_TOKEN HUGGING_FACE_HUB_TOKEN WANDB_API_KEY "
    "HTTP_PROXY HTTPS_PROXY ALL_PROXY http_proxy https_proxy all_proxy"
).split()

HOOK = "sorl_train.openrlhf.driver.fetch_secrets"  # workers import it; in the driver this module is __main__
_NAMESPACE = b"sorl"
_WAIT_S = 60.0


def runtime_env(environment: Mapping[str, str]) -> dict[str, object]:
    """For ``ray.init``: the variables that may be logged, and the hook that fetches the others."""
    return {
        "env_vars": {name: environment[name] for name in FORWARDED if name in environment},
        "worker_process_setup_hook": HOOK,
    }


@contextmanager
def secrets_of(environment: Mapping[str, str]) -> Iterator[None]:
    """Offer the secret variables to the workers of this Ray job within a ``with`` block."""
    from ray.experimental import internal_kv

    secrets = {name: environment[name] for name in SECRET if name in environment}
    internal_kv._internal_kv_put(_key(), json.dumps(secrets).encode(), namespace=_NAMESPACE)
    try:
        yield
    finally:
        internal_kv._internal_kv_del(_key(), namespace=_NAMESPACE)


def fetch_secrets() -> None:
    """Put the secret variables into a worker's environment; Ray calls this before anything else in the process.

    Raises:
        RuntimeError: the run did not offer them in time; Ray ends the worker and shows the message.
    """
    from ray.experimental import internal_kv

    deadline = time.monotonic() + _WAIT_S  # Ray may start a worker before the run offers them
    while (found := internal_kv._internal_kv_get(_key(), namespace=_NAMESPACE)) is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the run offered this worker no environment variables within {_WAIT_S:.0f} s")
        time.sleep(0.1)
    os.environ.update(json.loads(found))


def _key() -> bytes:
    import ray

    return f"secrets of job {ray.get_runtime_context().get_job_id()}".encode()


def main() -> None:
    """Connect to the Ray cluster or start one, replace OpenRLHF's classes, and run ``openrlhf.cli.train_ppo_ray``."""
    import ray
    from openrlhf.trainer import ppo_trainer, ppo_trainer_async
    from openrlhf.trainer.ray import ppo_actor, ppo_critic, vllm_engine

    from sorl_train.openrlhf import trainers, workers
    from sorl_train.run.lock import join_lock

    join_lock()

    gpus = os.environ.get("SORL_LOGICAL_GPUS")  # on a CPU, Ray counts GPUs that do not exist
    resources = {"num_gpus": int(gpus), "num_cpus": 2 * int(gpus) + 6} if gpus else {}
    ray.init(runtime_env=runtime_env(os.environ), include_dashboard=False, **resources)
    ppo_actor.PolicyModelActor = ray.remote(num_gpus=1)(workers.PolicyWorker)
    ppo_critic.CriticModelActor = ray.remote(num_gpus=1)(workers.CriticWorker)
    vllm_engine.RolloutRayActor = ray.remote(workers.RolloutWorker)
    ppo_trainer.PPOTrainer = ray.remote(trainers.Trainer)
    ppo_trainer_async.PPOTrainerAsync = ray.remote(trainers.AsyncTrainer)
    sys.argv[0] = "openrlhf.cli.train_ppo_ray"
    with secrets_of(os.environ):
        runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
