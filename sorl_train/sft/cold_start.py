"""``model: tiny``: a small policy, built for the task and cold-started on demonstrations, cached by its content."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

from sorl_env.folders import cache_folder, new_folder
from sorl_train.config.checks import check_tiny
from sorl_train.config.settings import TINY, TrainConfig
from sorl_train.run.display import Display
from sorl_train.run.hashed_folder import find_damage, write_folder

# Raised when the recipe changes, so that policies of the old one are not taken for the new one's.
RECIPE_VERSION = 3


def resolve_model(config: TrainConfig, display: Display) -> str:
    """The folder or hub name of the policy to start from; builds and cold-starts the tiny one if need be."""
    if config.model != TINY:
        return config.model
    folder = cache_folder() / "policies" / cold_start_key(config)
    damage = find_damage(folder) if folder.is_dir() else []
    if damage:
        display.message(f"the policy kept in {folder} is built again: {'; '.join(damage)}")
    if damage or not folder.is_dir():
        with new_folder(folder.parent):
            write_folder(folder, lambda path: _build(config, display, path), keep_whole=True)
    return str(folder)


def cold_start_key(config: TrainConfig) -> str:
    """A name that changes with anything the cold-started policy depends on."""
    import torch
    import transformers

    from sorl_train.rollout.environments import env_facts, make_env

    content = {
        "recipe": RECIPE_VERSION,
        "env": env_facts(make_env(config)),
        "task_args": config.task_args,
        "tiny": config.hardware.tiny,
        "sft": dataclasses.asdict(config.sft) if config.stage == "rl" else None,
        "seed": config.seed,
        "threads": torch.get_num_threads(),  # sums are taken in another order, the last bits differ
        "versions": [torch.__version__, transformers.__version__],
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return f"{Path(config.task).stem.partition(':')[0]}-{digest[:16]}"


def _build(config: TrainConfig, display: Display, folder: Path) -> None:
    """Random weights, then (before RL) supervised steps on the expert's demonstrations."""
    from sorl_train.models.policy import load_policy, load_tokenizer
    from sorl_train.models.tiny import build_tiny_policy
    from sorl_train.rollout.environments import make_env
    from sorl_train.sft.fine_tune import fine_tune, load_demos

    env = make_env(config)
    check_tiny(config.hardware.tiny)
    build_tiny_policy(env.task, folder, seed=config.seed, **config.hardware.tiny)
    if config.stage == "sft" or config.sft.steps == 0:
        return
    tokenizer = load_tokenizer(str(folder))
    model = load_policy(str(folder), dataclasses.replace(config.hardware, lora_rank=0))
    demos = load_demos(config, env, tokenizer)
    display.message(
        f"cold start: {config.sft.steps} supervised steps on {len(demos)} demonstrations, kept for later runs"
    )
    with display.stage("cold start", config.sft.steps) as advance:
        fine_tune(model, demos, config, tokenizer.pad_token_id, lambda step, metrics: advance(1))
    model.save_pretrained(folder)
