"""Log-probabilities and values of a collected batch, before it is trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sorl_train.config import ModelConfig
from sorl_train.metrics_log import read_jsonl as read_metrics
from sorl_train.models import autocast, load_critic

from .conftest import train_short


def test_the_sampler_is_checked_while_only_the_critic_trains_too(tmp_path: Path) -> None:
    """On policy the step's own log-probabilities are the trainer's; a step of the critic alone has none."""
    settings = {"update__mini_batch_size": 16, "update__critic_warmup_steps": 1, "loss__kl_coef": 0.0}
    run_dir, _ = train_short(tmp_path / "run", **settings)
    first, second = read_metrics(run_dir.metrics)[1:]
    assert "loss/value" in first and "loss/policy" not in first and "loss/policy" in second
    names = {name for line in (first, second) for name in line if name.startswith("rollout/mismatch")}
    assert {"rollout/mismatch_kl", "rollout/mismatch_ratio_p99", "rollout/mismatch_kl_turn0"} <= names
    assert first["rollout/mismatch_max"] < 1e-3 and second["rollout/mismatch_max"] < 1e-3


def test_values_of_a_critic_in_bfloat16_are_not_rounded(tiny_folder: str) -> None:
    config = ModelConfig(device="cpu", dtype="bfloat16")
    critic: Any = load_critic(tiny_folder, config)
    torch.nn.init.normal_(critic.head.weight, std=0.05, generator=torch.Generator().manual_seed(0))
    torch.nn.init.constant_(critic.head.bias, 0.7)
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad(), autocast(config, torch.device("cpu")):
        values = critic(ids)
        hidden = critic.backbone(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    assert values.dtype == torch.float32
    assert torch.equal(values, critic.head(hidden.float()).squeeze(-1))
