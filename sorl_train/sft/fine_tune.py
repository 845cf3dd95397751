"""Supervised fine-tuning on demonstrations, for ``--stage sft`` and for the cold start of ``model: tiny``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from sorl_env.env import ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.text_env import TextEnv, need_tools
from sorl_train.config.run_settings import SftConfig
from sorl_train.config.seeds import generator
from sorl_train.config.settings import TrainConfig
from sorl_train.models.forward import action_stats, autocast
from sorl_train.sft.demos import Demo, expert_demos, file_demos


def load_demos(config: TrainConfig, env: TextEnv, tokenizer: Any) -> list[Demo]:
    """Demonstrations from ``sft.demos`` or, without it, from the task's scripted expert."""
    template = config.chat_template
    if config.sft.demos is None:
        played = need_tools(env, "a scripted expert (sft.demos without a file)")
        return expert_demos(played, tokenizer, config.sft.num_demos, use_chat_template=template)
    limit = env.limits.max_trajectory_tokens
    return file_demos(
        config.sft.demos,
        tokenizer,
        limit,
        use_chat_template=template,
        system_prompt=env.task.system_prompt,
        tools=env.toolbox.names if isinstance(env, ToolUseEnv) else (),
    )


def fine_tune(
    model: Any,
    demos: Sequence[Demo],
    config: TrainConfig,
    pad_id: int,
    on_step: Callable[[int, dict[str, float]], None],
) -> None:
    """Minimize the mean negative log-likelihood of the demonstrations' action tokens.

    Args:
        pad_id: the token that fills shorter rows.
        on_step: called after each optimizer step with its number, from 1, and its metrics.

    Raises:
        UserError: the loss or its gradient is not finite.
    """
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
        total = sum(int(d.action_mask[1:].sum()) for d in batch)
        loss_sum, confident = 0.0, 0.0
        batch.sort(key=lambda d: len(d.token_ids))
        for start in range(0, len(batch), sft.micro_batch_size):
            token_ids, mask = _pad(batch[start : start + sft.micro_batch_size], pad_id)
            mask = mask.to(device)
            with autocast(config.hardware.dtype, device):
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
