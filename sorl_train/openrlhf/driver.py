"""OpenRLHF's command line with our workers in the place of its own: ``python -m ..driver FLAGS``, run by ``launch``."""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    """Connect to the cluster (or start one here), put our classes in, run ``openrlhf.cli.train_ppo_ray``."""
    import ray
    from openrlhf.trainer import ppo_trainer, ppo_trainer_async
    from openrlhf.trainer.ray import ppo_actor, ppo_critic, vllm_engine

    from sorl_train.openrlhf import trainers, workers
    from sorl_train.openrlhf.variables import runtime_env, secrets_of

    gpus = os.environ.get("SORL_LOGICAL_GPUS")  # a CPU run: Ray counts them, nobody has them
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
