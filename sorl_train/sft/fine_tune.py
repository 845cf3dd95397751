"""Supervised fine-tuning on demonstrations, for ``--stage sft`` and for the cold start of ``model: tiny``.

Demonstrations are dialogues to imitate, played by a task's scripted expert or read from a file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from sorl_env.envs.prompts import make_codec
from sorl_env.envs.text_env import TextEnv, require_tool_env
from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.rollout import RolloutJob, SampledTurn, TrajectoryBuilder
from sorl_env.task.data import read_rows
from sorl_env.trajectory import StopReason, Trajectory
from sorl_env.turns.tags import parse_turn
from sorl_env.turns.tokens import Tokenizer, encode_prompt, encode_text
from sorl_train.config.run_settings import SftConfig
from sorl_train.config.seeds import generator
from sorl_train.models.forward import action_stats, autocast


@dataclass(frozen=True, eq=False)
class Demo:
    """The tokens of one dialogue, (L,); ``action_mask``, also (L,), marks those to imitate."""

    token_ids: NDArray[np.int32]
    action_mask: NDArray[np.bool_]


def expert_trajectory(
    env: ToolUseEnv, tokenizer: Tokenizer, job: RolloutJob, *, use_chat_template: bool
) -> Trajectory | None:
    """A trajectory that the task's scripted expert plays, or None where it gives up. Experts write tags; in another
    format their turns are written in that one. Raises ``UserError`` if the task has no expert."""
    expert = env.task.expert
    if expert is None:
        raise UserError(f"task {env.task.name!r} has no scripted expert: give demonstrations with sft.demos")
    codec = make_codec(env, tokenizer, use_chat_template=use_chat_template)
    prompt, _ = env.reset(seed=job.seed, options={"index": job.example_index})
    growing = TrajectoryBuilder(env, codec, job, prompt)
    observations: list[str] = []
    while True:
        text = expert(env.example, observations)
        if text is None:
            return None
        parsed = parse_turn(text, env.toolbox.names, env.task.require_think)
        text, ids = codec.written_turn(parsed, text)
        sampled, result = SampledTurn(ids, [0.0] * len(ids), "stop"), env.play_turn(text)
        if growing.overflows(sampled, result):
            result = env.truncate(StopReason.MAX_TOKENS)
        growing.append(sampled, text, result)
        if result.stop_reason is not None:
            return growing.build(result.stop_reason, result.error)
        observations.append(result.observation)


def expert_demos(env: ToolUseEnv, tokenizer: Tokenizer, count: int, *, use_chat_template: bool) -> list[Demo]:
    """The expert's trajectories on the first ``count`` examples, without those on which it gives up. Raises
    ``UserError`` if it fails on all of them."""
    demos, solved, tried = [], 0, min(count, len(env.examples.examples))
    failed = ""  # how the first one ended that earned nothing
    for index in range(tried):
        job = RolloutJob(id=f"demo-{index}", group_id=f"demo-{index}", example_index=index, seed=0)
        trajectory = expert_trajectory(env.spawn(), tokenizer, job, use_chat_template=use_chat_template)
        if trajectory is None:
            failed = failed or "it gives up on the first"
            continue
        solved += trajectory.reward > 0
        if trajectory.reward <= 0:
            failed = failed or f"the first ends with {trajectory.error or trajectory.stop_reason.value}"
        demos.append(Demo(trajectory.token_ids, trajectory.action_mask))
    if not solved:
        raise UserError(
            f"the expert of task {env.task.name!r} failed on all of {tried} examples, {failed}: see it play with "
            "sorl-play TASK --auto expert, with the same --data and --search"
        )
    return demos


def file_demos(
    path: str,
    tokenizer: Tokenizer,
    max_tokens: int,
    *,
    use_chat_template: bool,
    system_prompt: str | None = None,
    tools: Collection[str] = (),
) -> list[Demo]:
    """Demonstrations from the rows of a JSONL or Parquet file. A row is a trajectory as a run writes it (``prompt``,
    and ``turns`` with ``text`` and ``observation``), or has ``messages``: one from the ``user``, then ``assistant``
    turns, each but the last followed by a ``tool`` (or ``user``) message, which becomes the observation unchanged. No
    text of a row becomes a control token. ``tools`` are the names of the task's tools (see ``encode_prompt``). Raises
    ``UserError`` for a row of another form or with more than ``max_tokens``; the message names file and line."""
    demos = []
    for where, row in read_rows(path):
        try:
            prompt, parts = _dialogue(row, where)
        except UserError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{where}: not a demonstration ({type(error).__name__}: {error})") from error
        if not all(isinstance(text, str) for text in (prompt, *(text for _, text in parts))):
            raise UserError(
                f"{where}: each content of a demonstration must be a text; tool_calls are not read"
            )
        if not any(sampled for sampled, _ in parts):
            raise UserError(f"{where}: the demonstration has no turn to imitate")
        ids = encode_prompt(
            tokenizer, prompt, system_prompt, use_chat_template=use_chat_template, tools=tools
        )
        mask = [False] * len(ids)
        for sampled, text in parts:
            new = encode_text(tokenizer, text, tools)
            ids, mask = ids + new, mask + [sampled] * len(new)
        if len(ids) > max_tokens:
            raise UserError(f"{where}: {len(ids)} tokens, limits.max_trajectory_tokens is {max_tokens}")
        demos.append(Demo(np.asarray(ids, dtype=np.int32), np.asarray(mask)))
    if not demos:
        raise UserError(f"{path} holds no demonstrations")
    return demos


def _dialogue(row: Mapping[str, Any], where: str) -> tuple[str, Sequence[tuple[bool, str]]]:
    if "messages" in row:
        messages = row["messages"]
        roles = [message.get("role") for message in messages]
        if len(messages) < 2 or roles[0] != "user" or "assistant" not in roles or "system" in roles:
            raise UserError(f"{where}: messages must be user, then assistant and tool in turns, not {roles}")
        return messages[0]["content"], [(m["role"] == "assistant", m["content"]) for m in messages[1:]]
    if "prompt" in row and "turns" in row:
        turns = json.loads(row["turns"]) if isinstance(row["turns"], str) else row["turns"]
        parts = [part for turn in turns for part in ((True, turn["text"]), (False, turn["observation"]))]
        return row["prompt"], [(sampled, text) for sampled, text in parts if text]
    raise UserError(
        f"{where}: a demonstration has 'messages', or 'prompt' and 'turns'; this row has {sorted(row)}"
    )


def load_demos(sft: SftConfig, env: TextEnv, tokenizer: Any, *, use_chat_template: bool) -> list[Demo]:
    """Demonstrations from ``sft.demos`` or, without it, from the task's scripted expert."""
    if sft.demos is None:
        played = require_tool_env(env, "a scripted expert (sft.demos without a file)")
        return expert_demos(played, tokenizer, sft.num_demos, use_chat_template=use_chat_template)
    return file_demos(
        sft.demos,
        tokenizer,
        env.limits.max_trajectory_tokens,
        use_chat_template=use_chat_template,
        system_prompt=env.task.system_prompt,
        tools=env.toolbox.names if isinstance(env, ToolUseEnv) else (),
    )


def fine_tune(
    model: Any,
    demos: Sequence[Demo],
    sft: SftConfig,
    pad_id: int,
    on_step: Callable[[int, dict[str, float]], None],
    *,
    seed: int,
    dtype: str,
) -> None:
    """Minimize the mean negative log-likelihood of the demonstrations' action tokens. ``pad_id`` fills shorter rows;
    ``seed`` is of the order of the demonstrations; for ``dtype`` see ``compute_dtype``.
    ``on_step`` is called after each optimizer step with its number, from 1, and its metrics. Raises ``UserError`` if
    the loss or its gradient is not finite."""
    device = next(model.parameters()).device
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=sft.lr, weight_decay=0.0, betas=(0.9, 0.95), fused=True)
    model.train()
    batches = _batches(len(demos), sft.batch_size, seed)
    for step in range(1, sft.steps + 1):
        batch = [demos[i] for i in next(batches)]
        lr = _lr(sft, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad(set_to_none=True)
        total = sum(int(d.action_mask[1:].sum()) for d in batch)
        loss_sum, confident = 0.0, 0.0
        batch.sort(key=lambda d: len(d.token_ids))
        for start in range(0, len(batch), sft.micro_batch_size):
            token_ids, mask = _pad(batch[start : start + sft.micro_batch_size], pad_id)
            mask = mask.to(device)
            with autocast(dtype, device):
                log_probs = action_stats(model, token_ids.to(device), mask).log_probs
            loss = -log_probs.sum() / total
            loss.backward()
            loss_sum += float(loss.detach())
            confident += float((log_probs.detach() > math.log(0.5)).float()[mask].sum())
        norm = float(nn.utils.clip_grad_norm_(parameters, sft.max_grad_norm))
        if not (math.isfinite(norm) and math.isfinite(loss_sum)):
            raise UserError(
                f"supervised step {step}: the loss or its gradient is not finite; lower sft.lr ({sft.lr})"
            )
        optimizer.step()
        share = confident / total  # of tokens that have more than half of the probability
        on_step(step, {"sft/loss": loss_sum, "sft/confident": share, "sft/grad_norm": norm, "sft/lr": lr})


def _batches(size: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Each demonstration once in an epoch, in a seeded order; the next epoch fills an incomplete last batch."""
    waiting: list[int] = []
    epoch = 0
    while True:
        while len(waiting) < batch_size:
            waiting += generator(seed, "sft", epoch).permutation(size).tolist()
            epoch += 1
        yield waiting[:batch_size]
        waiting = waiting[batch_size:]


def _pad(demos: Sequence[Demo], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (B, L), and the mask (B, L - 1) of the positions to score."""
    token_ids = [torch.from_numpy(demo.token_ids).long() for demo in demos]
    masks = [torch.from_numpy(demo.action_mask) for demo in demos]
    padded = pad_sequence(token_ids, batch_first=True, padding_value=pad_id)
    return padded, pad_sequence(masks, batch_first=True)[:, 1:]


def _lr(sft: SftConfig, step: int) -> float:
    warmup = max(1, round(sft.warmup_ratio * sft.steps))
    if step <= warmup:
        return sft.lr * step / warmup
    progress = (step - warmup) / max(1, sft.steps - warmup)
    return sft.lr * (0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * progress)))
