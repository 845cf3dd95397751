"""Log-probabilities and values of a collected batch, before it is trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel

from sorl_train.models.forward import autocast
from sorl_train.models.policy import load_critic, load_tokenizer
from sorl_train.run.files import read_jsonl as read_metrics

from ..conftest import train_short


def test_the_sampler_is_checked_while_only_the_critic_trains_too(tmp_path: Path) -> None:
    """On policy the step's own log-probabilities are the trainer's; a step of the critic alone has none."""
    settings = {"update__mini_batch_size": 16, "update__critic_warmup_steps": 1, "loss__kl_coef": 0.0}
    run_dir, _ = train_short(tmp_path / "run", **settings)
    first, second = read_metrics(run_dir.metrics)[1:]
    assert "loss/value" in first and "loss/policy" not in first and "loss/policy" in second
    names = {name for line in (first, second) for name in line if name.startswith("rollout/mismatch")}
    assert {"rollout/mismatch_kl", "rollout/mismatch_ratio_p99", "rollout/mismatch_kl_turn0"} <= names
    assert first["rollout/mismatch_max"] < 1e-3 and second["rollout/mismatch_max"] < 1e-3


def test_dropout_does_not_move_the_ratios(tiny_folder: str, tmp_path: Path) -> None:
    """GPT-2 has dropout of a tenth by default. At a rate of next to nothing the policy stays what it was."""
    tokenizer = load_tokenizer(tiny_folder)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    settings = {"optim__lr": 1e-9, "loss__kl_coef": 0.0, "limits__max_new_tokens": 40}
    settings["limits__max_trajectory_tokens"] = 1024  # GPT-2 has no more positions
    run_dir, _ = train_short(tmp_path / "run", model=str(tmp_path / "gpt2"), **settings)
    for line in read_metrics(run_dir.metrics)[1:]:
        assert abs(line["loss/log_ratio_p01"]) < 1e-4 and line["loss/log_ratio_p99"] < 1e-4
        assert line["rollout/mismatch_max"] < 1e-3
    saved = AutoConfig.from_pretrained(run_dir.checkpoints / "step_000002" / "policy")
    assert saved.resid_pdrop == 0.1  # whoever trains it next decides anew


def test_values_of_a_critic_in_bfloat16_are_not_rounded(tiny_folder: str) -> None:
    critic: Any = load_critic(tiny_folder, "cpu")
    torch.nn.init.normal_(critic.head.weight, std=0.05, generator=torch.Generator().manual_seed(0))
    torch.nn.init.constant_(critic.head.bias, 0.7)
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad(), autocast("bfloat16", torch.device("cpu")):
        values = critic(ids, torch.ones(2, 11, dtype=torch.bool))
        hidden = critic.backbone(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    assert values.dtype == torch.float32
    assert torch.equal(values, critic.head(hidden.float()).squeeze(-1))
