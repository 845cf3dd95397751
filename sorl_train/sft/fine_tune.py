"""Supervised fine-tuning on demonstrations: ``--stage sft``, and the cold start before reinforcement learning."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from sorl_env.env import ToolUseEnv
from sorl_env.errors import UserError
from sorl_train.config.seeds import generator
from sorl_train.config.settings import SftConfig, TrainConfig
from sorl_train.models.forward import action_stats, autocast
from sorl_train.sft.demos import Demo, expert_demos, file_demos


def load_demos(config: TrainConfig, env: ToolUseEnv, tokenizer: Any) -> list[Demo]:
    """Demonstrations from ``sft.demos``, or else from the task's scripted expert."""
    template = config.hardware.chat_template
    if config.sft.demos is None:
        return expert_demos(env, tokenizer, config.sft.num_demos, use_chat_template=template)
    limit = env.limits.max_trajectory_tokens
    return file_demos(
        config.sft.demos, tokenizer, limit, use_chat_template=template, system_prompt=env.task.system_prompt
    )


def fine_tune(
    model: Any,
    demos: Sequence[Demo],
    config: TrainConfig,
    pad_id: int,
    on_step: Callable[[int, dict[str, float]], None],
) -> None:
    """Minimize the mean negative log-likelihood of the demonstrators' tokens; the rest is only read."""
    sft = config.sft
    device = next(model.parameters()).device
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=sft.lr, weight_decay=0.0, betas=(0.9, 0.95), fused=True)
    model.train()
    batches = _batches(len(demos), sft.batch_size, config.seed)
    for step in range(1, sft.steps + 1):
        batch = [demos[i] for i in next(batches)]
        lr = _lr(sft, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad(set_to_none=True)
        total, correct = sum(int(d.action_mask[1:].sum()) for d in batch), 0.0
        loss_sum = 0.0
        batch.sort(key=lambda d: len(d.token_ids))
        for start in range(0, len(batch), sft.micro_batch_size):
            token_ids, mask = _pad(batch[start : start + sft.micro_batch_size], pad_id)
            with autocast(config.hardware, device):
                log_probs = action_stats(model, token_ids.to(device), mask.to(device)).log_probs
            loss = -log_probs.sum() / total
            loss.backward()
            loss_sum += float(loss.detach())
            correct += float((log_probs.detach() > math.log(0.5)).float()[mask.to(device)].sum())
        norm = float(nn.utils.clip_grad_norm_(parameters, sft.max_grad_norm))
        if not (math.isfinite(norm) and math.isfinite(loss_sum)):
            raise UserError(
                f"supervised step {step}: the loss or its gradient is not finite; lower sft.lr ({sft.lr})"
            )
        optimizer.step()
        metrics = {
            "sft/loss": loss_sum,
            "sft/confident": correct / total,
            "sft/grad_norm": norm,
            "sft/lr": lr,
        }
        on_step(step, metrics)


def _batches(size: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Every demonstration once an epoch, in a seeded order; a last incomplete batch is filled from the next epoch."""
    waiting: list[int] = []
    epoch = 0
    while True:
        while len(waiting) < batch_size:
            waiting += generator(seed, "sft", epoch).permutation(size).tolist()
            epoch += 1
        yield waiting[:batch_size]
        waiting = waiting[batch_size:]


def _pad(demos: Sequence[Demo], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, L) token ids and the (B, L - 1) mask of scored positions."""
    length = max(len(d.token_ids) for d in demos)
    token_ids = torch.full((len(demos), length), pad_id, dtype=torch.long)
    mask = torch.zeros((len(demos), length), dtype=torch.bool)
    for i, demo in enumerate(demos):
        token_ids[i, : len(demo.token_ids)] = torch.from_numpy(demo.token_ids)
        mask[i, : len(demo.token_ids)] = torch.from_numpy(demo.action_mask)
    return token_ids, mask[:, 1:]


def _lr(sft: SftConfig, step: int) -> float:
    warmup = max(1, round(sft.warmup_ratio * sft.steps))
    if step <= warmup:
        return sft.lr * step / warmup
    progress = (step - warmup) / max(1, sft.steps - warmup)
    return sft.lr * (0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * progress)))
