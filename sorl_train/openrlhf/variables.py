"""Environment variables that workers on other machines need: which ones, and how they get there.

On a Ray cluster that is already running, a worker has the environment of ``ray start`` and not that of the terminal. So
a run hands its workers the variables of the lists below, and nothing else.

Ray writes the variables of a ``runtime_env`` into its logs on every node. Tokens, and proxies (whose addresses can hold
a password), therefore go another way: through the memory of Ray's control store, where each worker of the run fetches
them when it starts (``worker_process_setup_hook``), and from where they are deleted at the end of the run. No log, file
or manifest gets to hold them; other jobs of the same cluster could read them there while the run lasts.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# Not secret: they go through runtime_env, and stand in Ray's logs.
FORWARDED = (
    "SORL_RUN_DIR SORL_CACHE PYTHONPATH TOKENIZERS_PARALLELISM OMP_NUM_THREADS DS_ACCELERATOR TORCH_COMPILE_DISABLE "
    "HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_ENDPOINT HF_DATASETS_CACHE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE "
    "VLLM_CPU_KVCACHE_SPACE VLLM_ENABLE_V1_MULTIPROCESSING VLLM_LOGGING_LEVEL GLOO_SOCKET_IFNAME "
    "NO_PROXY no_proxy SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE WANDB_MODE WANDB_BASE_URL WANDB_ENTITY"
).split()
# Secret, or with a secret inside: never in a file or a log.
SECRET = (
    "SORL_SEARCH_TOKEN HF_TOKEN HUGGING_FACE_HUB_TOKEN WANDB_API_KEY "
    "HTTP_PROXY HTTPS_PROXY ALL_PROXY http_proxy https_proxy all_proxy"
).split()

HOOK = f"{__name__}.fetch_secrets"
_NAMESPACE = b"sorl"
_WAIT_S = 60.0


def runtime_env(environment: Mapping[str, str]) -> dict[str, object]:
    """For ``ray.init``: what may be logged, and the hook that fetches the rest."""
    return {
        "env_vars": {name: environment[name] for name in FORWARDED if name in environment},
        "worker_process_setup_hook": HOOK,
    }


@contextmanager
def secrets_of(environment: Mapping[str, str]) -> Iterator[None]:
    """Offer the secret variables to the workers of this Ray job for the time of a ``with`` block."""
    from ray.experimental import internal_kv

    secrets = {name: environment[name] for name in SECRET if name in environment}
    internal_kv._internal_kv_put(_key(), json.dumps(secrets).encode(), namespace=_NAMESPACE)
    try:
        yield
    finally:
        internal_kv._internal_kv_del(_key(), namespace=_NAMESPACE)


def fetch_secrets() -> None:
    """Ray calls it in each worker process of the run, before anything else runs there.

    Raises:
        RuntimeError: the run did not offer any; Ray ends the worker and shows the message.
    """
    from ray.experimental import internal_kv

    deadline = time.monotonic() + _WAIT_S  # Ray may start a worker before the run gets to speak
    while (found := internal_kv._internal_kv_get(_key(), namespace=_NAMESPACE)) is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the run offered no variables to this worker within {_WAIT_S:.0f} s")
        time.sleep(0.1)
    os.environ.update(json.loads(found))


def _key() -> bytes:
    import ray

    return f"secrets of job {ray.get_runtime_context().get_job_id()}".encode()
