"""AdamW of both engines: which parameters decay, and what a checkpoint keeps of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sorl_train.config.settings import OptimConfig
from sorl_train.learner.backend import set_lr
from sorl_train.learner.optimizer_step import adamw, load_optimizers, save_optimizers
from sorl_train.models.policy import load_critic

OPTIM = OptimConfig(weight_decay=0.5)


def step(critic: torch.nn.Module, optimizer: torch.optim.Optimizer, gradient: float) -> None:
    """One step at a rate of .1, where every gradient is the same."""
    for parameter in critic.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    set_lr(optimizer, 0.1)
    optimizer.step()


def test_biases_and_norms_do_not_decay(tiny_folder: str) -> None:
    """With gradients of zero a step is the decay alone: 1 - .1 * .5."""
    critic = load_critic(tiny_folder, "cpu")
    for parameter in critic.parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.0)
    before = {name: p.detach().clone() for name, p in critic.named_parameters()}
    step(critic, adamw(critic, OPTIM), 0.0)
    kept = [name for name, p in critic.named_parameters() if torch.equal(p, before[name])]
    assert kept == [name for name in before if "norm" in name or name.endswith("bias")]
    assert {"head.bias", "backbone.norm.weight", "backbone.layers.1.post_attention_layernorm.weight"} <= {
        *kept
    }
    for name, parameter in critic.named_parameters():
        if name not in kept:
            torch.testing.assert_close(parameter.detach(), before[name] * 0.95)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_checkpoint_numbers_moments_by_the_models_parameters(
    frozen: bool, tiny_folder: str, tmp_path: Path
) -> None:
    """As it did before biases and norms had a group of their own, so older checkpoints are read rightly."""
    critic = load_critic(tiny_folder, "cpu")
    if frozen:
        critic.backbone.embed_tokens.requires_grad_(False)
    optimizer = adamw(critic, OPTIM)
    for number, parameter in enumerate(p for p in critic.parameters() if p.requires_grad):
        parameter.grad = torch.full_like(parameter, float(number))
    optimizer.step()
    save_optimizers(tmp_path / "o.safetensors", {"critic": optimizer})
    found = load_file(tmp_path / "o.safetensors")
    trained = [p for p in critic.parameters() if p.requires_grad]
    assert len(found) == 3 * len(trained)
    for number, parameter in enumerate(trained):
        moment = found[f"critic.{number}.exp_avg"]
        assert moment.shape == parameter.shape and moment.flatten()[0] == pytest.approx(0.1 * number)
    for weight_decay in (0.5, 0.0):
        other = adamw(critic, replace(OPTIM, weight_decay=weight_decay))
        load_optimizers(tmp_path / "o.safetensors", {"critic": other})
        assert [group["weight_decay"] for group in other.param_groups] == [weight_decay, 0.0]
        for parameter in trained:
            for key, value in optimizer.state[parameter].items():
                assert torch.equal(other.state[parameter][key], value), key
