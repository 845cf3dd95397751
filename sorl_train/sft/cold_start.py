"""``model: tiny``: a small policy, built for the task, cold-started on demonstrations, and cached for later runs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

from sorl_env.folders import cache_folder, new_folder
from sorl_train.config.settings import TINY, TrainConfig
from sorl_train.run.checkpoint import atomic_folder, find_damage
from sorl_train.run.display import Display

RECIPE_VERSION = 4  # to be raised when the recipe changes, so that policies of the old recipe are built again
REPORT_EVERY = 50  # steps of the cold start between two lines that say how far it has come


def resolve_model(config: TrainConfig, display: Display) -> str:
    """The folder or hub name of the policy to start from. A tiny one that is not in the cache is built first."""
    if config.model != TINY:
        return config.model
    folder = Path(start_folder(config))
    damage = find_damage(folder) if folder.is_dir() else []
    if damage:
        display.message(f"the cached policy in {folder} is damaged and built again: {'; '.join(damage)}")
    if damage or not folder.is_dir():
        with new_folder(folder.parent), atomic_folder(folder, keep_whole=True) as unfinished:
            _build(config, display, unfinished)
    return str(folder)


def start_folder(config: TrainConfig) -> str:
    """The folder or hub name of the policy that a run starts from. That of a tiny one, which may not have been built
    yet, is different whenever anything differs that the cold-started policy depends on."""
    if config.model != TINY:
        return config.model
    import torch
    import transformers

    from sorl_train.models.forward import compute_dtype, pick_device
    from sorl_train.rollout.environments import env_facts, make_env, source_facts

    env = make_env(config)
    content = {
        "recipe": RECIPE_VERSION,
        "env": env_facts(env),
        "task_args": config.task_args,
        "tiny": dataclasses.asdict(config.tiny),
        "sft": dataclasses.asdict(config.sft) if config.stage == "rl" else None,
        "seed": config.seed,
        "threads": torch.get_num_threads(),  # they change the order of sums, and so the last bits
        "versions": [torch.__version__, transformers.__version__],
    }
    if config.format != "tags":
        content["format"] = config.format
    device = pick_device(config.hardware.device)
    dtype = compute_dtype(config.hardware.dtype, device)
    if config.stage == "rl" and (device.type, dtype) != ("cpu", torch.float32):
        content["computed"] = f"{device.type}, {dtype}"
    if sources := source_facts(config, env.task):
        content["sources"] = sources
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return str(cache_folder() / "policies" / f"{Path(config.task).stem.partition(':')[0]}-{digest[:16]}")


def _build(config: TrainConfig, display: Display, folder: Path) -> None:
    from sorl_env.envs.prompts import check_prompts
    from sorl_train.models.policy import load_policy, load_tokenizer
    from sorl_train.models.tiny import build_tiny_policy
    from sorl_train.rollout.environments import make_env
    from sorl_train.sft.fine_tune import fine_tune, load_demos

    env = make_env(config)
    sizes = dataclasses.asdict(config.tiny)
    build_tiny_policy(env.task, folder, seed=config.seed, format=config.format, **sizes)
    if config.stage == "sft" or config.sft.steps == 0:
        return
    tokenizer = load_tokenizer(str(folder))
    check_prompts([env], tokenizer, use_chat_template=config.chat_template)
    hardware = config.hardware
    model = load_policy(str(folder), hardware.device, gradient_checkpointing=hardware.gradient_checkpointing)
    demos = load_demos(config.sft, env, tokenizer, use_chat_template=config.chat_template)
    display.message(
        f"cold start: {config.sft.steps} supervised steps on {len(demos)} demonstrations, cached for later runs"
    )
    unknown = sum(tokenizer.unk_token_id in demo.token_ids for demo in demos)
    if unknown:
        display.message(
            f"{unknown} of them hold words that the task's vocabulary lacks, which the policy cannot read or write: "
            "sorl-check-task names them"
        )
    with display.stage("cold start", config.sft.steps) as advance:

        def on_step(step: int, metrics: dict[str, float]) -> None:
            advance(1)
            if step % REPORT_EVERY == 0:
                share = metrics["sft/confident"]
                display.message(
                    f"cold start, step {step}: sure of {share:.0%} of the demonstrated tokens (p > .5)"
                )

        fine_tune(
            model,
            demos,
            config.sft,
            tokenizer.pad_token_id,
            on_step,
            seed=config.seed,
            dtype=hardware.dtype,
        )
    model.save_pretrained(folder)
