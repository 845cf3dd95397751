"""One GRPO step next to TRL's, and multi-turn rollouts next to a loop around transformers' ``generate``.

Both sides of each comparison have the same policy, prompts, limits, batches, threads and dtype, and their rounds are
interleaved in one process, so that a busy machine slows both. The ratios are medians over the rounds.

- One GRPO step: prompts with 8 completions each, every one of exactly 24 tokens (tokens that would end it have no
  probability, in the model itself), a reward function, one optimizer step.
- Multi-turn rollouts on MiniHop with its search tool. The loop takes the whole left-padded history of all live
  dialogues to ``generate`` once a turn; closing tags end a row, and finished dialogues leave.

    python benchmarks/train_step.py --json train_step.json
    python benchmarks/train_step.py --config minihop_smollm2 --model COLD_START --prompts 4 --micro_batch_size 8 \\
        --dialogues 32 --rounds 3 --warm_up 1

In bfloat16 both sides keep float32 weights: TRL's step runs under autocast, and ``generate`` in a bfloat16 copy.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from sorl_env import Example, FormatError, Limits, ParsedTurn, Task, ToolUseEnv, parse_turn
from sorl_env.envs.prompts import make_codec
from sorl_env.rollout import RolloutJob, RolloutSettings, SampledTurn, TrajectoryBuilder
from sorl_env.trajectory import StopReason, Trajectory
from sorl_env.turns.tokens import turn_text
from sorl_train.config.files import load_config
from sorl_train.config.settings import TrainConfig
from sorl_train.engine import LocalEngine
from sorl_train.learner.advantages import estimate_advantages
from sorl_train.models.forward import compute_dtype
from sorl_train.models.policy import load_policy, load_tokenizer
from sorl_train.rollout.environments import make_env
from sorl_train.rollout.jobs import run_jobs, training_jobs
from sorl_train.rollout.metrics import rollout_metrics
from sorl_train.rollout.model_check import try_packing
from sorl_train.rollout.sampler import TransformersSampler
from sorl_train.run.display import Display
from sorl_train.run.folder import RunDir
from sorl_train.sft.cold_start import resolve_model

GROUP, TOKENS = 8, 24
LEARNING_RATE = 1e-5
CLOSING = ("</search>", "</answer>")


def opens_answer(turn: ParsedTurn) -> float:
    """A reward of the format: an answer was begun (and, as its closing tag cannot be drawn, not ended)."""
    return float(turn.error is FormatError.UNCLOSED)


def single_turns(prompts: int) -> Task:
    """Some of MiniHop's questions, to be continued by one turn with no tool."""
    minihop = ToolUseEnv("minihop")
    examples = minihop.examples.examples[:prompts]
    return Task(
        name="single_turns",
        prompt=minihop.task.prompt,
        reward=lambda example, turns: {"format": opens_answer(turns[-1])},
        parse_row=lambda row: Example(id=str(row["id"]), question=str(row["question"])),
        embedded=lambda split: examples,
        limits=Limits(
            max_turns=1, max_prompt_tokens=320, max_new_tokens=TOKENS, max_trajectory_tokens=320 + TOKENS
        ),
    )


TASK = single_turns  # what the engine below loads from this file


def forbid_ends(model: Any, tokenizer: Any) -> None:
    """No token that ends a turn, or is a part of a closing tag, has any probability, at no cost: a frozen bias of the
    vocabulary projection."""
    ends = [number for token, number in tokenizer.get_vocab().items() if "/" in token]
    ends += [tokenizer.eos_token_id, tokenizer.pad_token_id]
    bias = torch.zeros(model.config.vocab_size)
    bias[ends] = -1e9
    model.lm_head.bias = nn.Parameter(bias, requires_grad=False)


def sorl_step(model: str, folder: Path, prompts: int, micro_batch: int, dtype: str) -> Callable[[int], int]:
    """One training step as ``trainer.train`` takes it, without the log; returns the number of tokens drawn."""
    batch = prompts * GROUP
    overrides = {
        "algo": "grpo",
        "task": f"{Path(__file__).resolve()}:TASK",
        "task_args": {"prompts": prompts},
        "model": model,
        "chat_template": False,  # TRL, too, gets the prompt as text
        "hardware.dtype": dtype,
        "sampler.max_concurrency": batch,
        "rollout.batch_size": batch,
        "rollout.group_size": GROUP,
        "update.mini_batch_size": batch,
        "update.micro_batch_size": micro_batch,
        "update.log_prob_micro_batch_size": micro_batch,
        "loss.kl_coef": 0.0,
        "optim.lr": LEARNING_RATE,
    }
    config = load_config("minihop", overrides)
    engine = LocalEngine(config, RunDir.create(folder, config), Display(sys.stderr), model)
    engine.load(None)
    forbid_ends(engine.policy, engine.tokenizer)

    def step(number: int) -> int:
        collected = engine.collect(number)
        assert collected.batch is not None
        metrics = rollout_metrics(collected.trajectories, engine.answers)
        metrics |= engine.update(estimate_advantages(collected.batch, "group", engine.config.loss), number)
        return sum(trajectory.num_action_tokens for trajectory in collected.trajectories)

    return step


def compare_steps(model: str, args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Seconds of each step of both; TRL's trainer runs, and one of our steps after each of its own."""
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    rounds, batch, micro_batch = args.rounds + args.warm_up, args.prompts * GROUP, args.micro_batch_size
    task = single_turns(args.prompts)
    assert task.embedded is not None
    prompts = [task.prompt(example) for example in task.embedded("train")]
    policy, tokenizer = load_policy(model), load_tokenizer(model)
    forbid_ends(policy, tokenizer)
    ours: list[float] = []
    theirs: list[float] = []
    drawn: list[int] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        drawn.append(sum(map(len, completion_ids)))
        return [opens_answer(parse_turn(text, ())) for text in completions]

    with tempfile.TemporaryDirectory() as folder:
        step = sorl_step(model, Path(folder) / "run", args.prompts, micro_batch, dtype)

        class Interleave(transformers.TrainerCallback):
            started = 0.0

            def on_train_begin(self, *_: Any, **__: Any) -> None:
                self.started = time.perf_counter()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                between = time.perf_counter()
                tokens = step(len(ours) + 1)
                if not tokens == drawn[-1] == batch * TOKENS:
                    raise RuntimeError(f"ours drew {tokens} tokens, TRL {drawn[-1]}, not {batch * TOKENS}")
                theirs.append(between - self.started)
                self.started = time.perf_counter()
                ours.append(self.started - between)

        settings = GRPOConfig(
            output_dir=folder,
            max_steps=rounds,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=batch // micro_batch,
            num_generations=GROUP,
            max_completion_length=TOKENS,
            shuffle_dataset=False,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            loss_type="grpo",
            beta=0.0,
            use_cpu=True,
            bf16=dtype == "bfloat16",
            gradient_checkpointing=False,
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=policy,
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": prompts * rounds}),
            processing_class=tokenizer,
            callbacks=[Interleave()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    pairs = list(zip(ours, theirs, strict=True))[args.warm_up :]
    print(f"\none GRPO step, {batch} completions of {TOKENS} tokens; seconds, sorl and TRL {version('trl')}:")
    return summarize(pairs)


def generate_rollouts(
    env: ToolUseEnv, tokenizer: Any, model: Any, jobs: Sequence[RolloutJob]
) -> list[Trajectory]:
    """The straightforward loop: once a turn, ``generate`` on the whole left-padded history of all live dialogues."""
    live = []
    for job in jobs:
        own = env.spawn()
        codec = make_codec(own, tokenizer, use_chat_template=True)
        prompt, _ = own.reset(seed=job.seed, options={"index": job.example_index})
        live.append((own, TrajectoryBuilder(own, codec, job, prompt)))
    closing = [tokenizer.encode(tag, add_special_tokens=False) for tag in CLOSING]
    ends, stopping = [tokenizer.eos_token_id], {"stop_strings": list(CLOSING), "tokenizer": tokenizer}
    if all(len(ids) == 1 for ids in closing):
        ends, stopping = [*ends, *(ids[0] for ids in closing)], {}
    finished = []
    while live:
        width = max(len(dialogue.token_ids) for _, dialogue in live)
        token_ids = torch.full((len(live), width), tokenizer.pad_token_id)
        mask = torch.zeros_like(token_ids)
        for row, (_, dialogue) in enumerate(live):
            token_ids[row, width - len(dialogue.token_ids) :] = torch.tensor(dialogue.token_ids)
            mask[row, width - len(dialogue.token_ids) :] = 1
        output = model.generate(
            token_ids,
            attention_mask=mask,
            max_new_tokens=env.limits.max_new_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            eos_token_id=ends,
            pad_token_id=tokenizer.pad_token_id,
            **stopping,
        )
        going_on = []
        for (own, dialogue), ids in zip(live, output[:, width:].tolist(), strict=True):
            written = len(ids)
            while stopping and written > 1 and ids[written - 1] == tokenizer.pad_token_id:
                written -= 1
            last = next((place for place, token in enumerate(ids[:written]) if token in ends), written - 1)
            turn = SampledTurn(ids[: last + 1], [0.0] * (last + 1), "stop")
            text = turn_text(tokenizer, turn.token_ids, CLOSING)
            result = own.play_turn(text)
            if dialogue.overflows(turn, result):
                result = own.truncate(StopReason.MAX_TOKENS)
            dialogue.append(turn, text, result)
            if result.stop_reason is not None:
                finished.append(dialogue.build(result.stop_reason, result.error))
            else:
                going_on.append((own, dialogue))
        live = going_on
    return finished


def compare_rollouts(model: str, config: TrainConfig, args: argparse.Namespace) -> dict[str, Any]:
    """Action tokens a second of both on the same questions, taking turns in going first."""
    env, tokenizer = make_env(config), load_tokenizer(model)
    assert isinstance(env, ToolUseEnv)  # as MiniHop is
    policy = load_policy(model, config.hardware.device).eval()
    theirs = copy.deepcopy(policy).to(compute_dtype(config.hardware.dtype, policy.device))
    if why := try_packing(policy, env.limits.max_trajectory_tokens, sampled=True):  # as the engine does
        raise SystemExit(f"the policy keeps torch's attention: {why}")
    most = config.sampler.max_concurrency
    sampler = TransformersSampler(policy, tokenizer, most, config.hardware.dtype)
    settings = RolloutSettings(1.0, config.sampler.top_p, config.chat_template, most)
    sides: tuple[Callable[[Sequence[RolloutJob]], list[Trajectory]], ...] = (
        lambda jobs: run_jobs(env, tokenizer, sampler, jobs, settings),
        lambda jobs: generate_rollouts(env, tokenizer, theirs, jobs),
    )
    pairs: list[tuple[float, float]] = []
    torch.manual_seed(config.seed)
    for number in range(args.rounds + args.warm_up):
        jobs = training_jobs(config.rollout, config.seed, len(env.examples.examples), number + 1)
        speeds = [0.0, 0.0]
        for side in (0, 1) if number % 2 else (1, 0):
            started = time.perf_counter()
            trajectories = sides[side](jobs)
            tokens = sum(trajectory.num_action_tokens for trajectory in trajectories)
            speeds[side] = tokens / (time.perf_counter() - started)
        pairs.append((speeds[0], speeds[1]))
    print(f"\nmulti-turn rollouts, {len(jobs)} dialogues; tokens a second, sorl and generate once a turn:")
    return summarize(pairs[args.warm_up :])


def summarize(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Medians of both sides over the rounds, and of the ratio of ours to theirs."""
    medians = [statistics.median(side) for side in zip(*pairs, strict=True)]
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    print(f"{medians[0]:.3f} and {medians[1]:.3f}, ratio {ratio:.2f}")
    return {"medians": medians, "ratio": ratio, "rounds": len(pairs)}


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    sizes = {"rounds": (8, "interleaved"), "warm_up": (2, "rounds before that"), "prompts": (16, "of a step")}
    sizes |= {
        "micro_batch_size": (64, "completions of a pass"),
        "threads": (0, "of torch; 0: its own choice"),
    }
    for name, (default, text) in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: %(default)s)")
    parser.add_argument("--dialogues", type=int, help="of a round of rollouts (default: the config's batch)")
    parser.add_argument("--config", default="minihop", help="limits and dtype (default: %(default)s)")
    parser.add_argument(
        "--model", help="the policy's folder (default: the config's, cold-started if need be)"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="(default: the config's)")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    overrides = {"rollout.batch_size": args.dialogues, "hardware.dtype": args.dtype}
    config = load_config(args.config, {name: value for name, value in overrides.items() if value is not None})
    model = args.model or resolve_model(config, Display(sys.stderr))
    figures = {name: version(name) for name in ("torch", "transformers", "trl")}
    steps = compare_steps(model, args, config.hardware.dtype)
    rollouts = compare_rollouts(model, config, args)
    if args.json:
        args.json.write_text(
            json.dumps(figures | {"grpo_step": steps, "rollouts": rollouts}, indent=2) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
