"""Losses with the signatures of prime-rl, NeMo-RL, torchtitan and SkyRL: the same loss on the same tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sorl_train.losses.policy import LossOutput, LossSettings, policy_loss
from sorl_train.losses.surrogates import ClipRange
from sorl_train.plugins import nemo_rl, prime_rl, skyrl, torchtitan
from sorl_train.plugins.objective import objective_of_process, turn_ids_of


def tensors(rows: int = 3, width: int = 14) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(11)
    old = -2 * torch.rand(rows, width, generator=g)
    return {
        "mask": torch.rand(rows, width, generator=g) < 0.6,
        "old": old,
        "log_probs": (old + 0.4 * torch.randn(rows, width, generator=g)).requires_grad_(),
        "advantages": torch.randn(rows, 1, generator=g).expand(rows, width).contiguous(),
    }


def expected(
    t: dict[str, torch.Tensor],
    mean: Any,
    denominator: float,
    level: Any = "turn",
    turns: torch.Tensor | None = None,
) -> LossOutput:
    return policy_loss(
        t["log_probs"],
        t["old"],
        t["advantages"],
        t["mask"],
        turn_ids_of(t["mask"] if turns is None else turns),
        LossSettings(level, clip=ClipRange(0.1, 0.3), aggregation=mean),
        denominator=denominator,
    )


OPTIONS: dict[str, Any] = {"algorithm": "so_grpo", "clip_eps": 0.1, "clip_eps_high": 0.3, "ratio": "turn"}


def test_prime_rl_adds_sequences_up() -> None:
    t = tensors()
    total = torch.tensor(0.0)
    for i in range(3):
        inputs = SimpleNamespace(
            trainer_logprobs=t["log_probs"][i],
            inference_logprobs=t["old"][i],
            advantages=t["advantages"][i],
            loss_mask=t["mask"][i],
            loss_weights=None,
        )
        loss, metrics = prime_rl.sequence_loss(inputs, **OPTIONS)
        total = total + loss
    whole = expected(t, "token_mean", 1.0)
    torch.testing.assert_close(total, whole.loss)
    assert set(metrics) == {"clip_frac", "approx_kl", "ratio_mean"}
    steps = objective_of_process(algorithm="so_grpo", clip=ClipRange(0.1, 0.3), ratio="turn").steps
    assert steps.scale() == pytest.approx(0.003 / whole.clip_bias.norm("rms"))
    steps.clear()


@pytest.mark.parametrize("token_level", [True, False])
def test_nemo_rl(token_level: bool) -> None:
    t = tensors()
    wide = {
        name: torch.cat([torch.full((3, 1), 7.0), t[name].float()], dim=1) for name in ("old", "advantages")
    }
    data = {
        "token_mask": torch.cat([torch.ones(3, 1), t["mask"].float()], dim=1),
        "sample_mask": torch.tensor([1.0, 0.0, 1.0]),
        "advantages": wide["advantages"],
        "prev_logprobs": wide["old"],
    }
    t["mask"] = t["mask"] & torch.tensor([[True], [False], [True]])
    loss_fn = nemo_rl.SorlLoss(token_level_loss=token_level, **OPTIONS)
    loss, metrics = loss_fn(
        next_token_logprobs=t["log_probs"],
        data=data,
        global_valid_seqs=torch.tensor(4.0),
        global_valid_toks=torch.tensor(40.0),
    )
    whole = expected(t, *(("token_mean", 40.0) if token_level else ("trajectory_mean", 4.0)))
    torch.testing.assert_close(loss, whole.loss)
    assert metrics["num_valid_samples"] == 2.0
    assert loss_fn.loss_type.name == ("TOKEN_LEVEL" if token_level else "SEQUENCE_LEVEL")


def test_torchtitan_packs_sequences_and_leaves_out_what_the_sampler_did_not_report() -> None:
    g = torch.Generator().manual_seed(2)
    logits = torch.randn(20, 9, generator=g, requires_grad=True)
    labels = torch.randint(0, 9, (20,), generator=g)
    t = tensors(1, 20)
    mask = t["mask"][0].clone()
    mask[:3] = True
    labels[~mask] = -100
    old = t["old"][0].clone()
    old[1] = float("nan")
    loss, metrics = torchtitan.SorlLoss(**OPTIONS)(
        logits,
        labels,
        torch.tensor(50.0),
        generator_logprobs=old,
        advantages=t["advantages"][0],
        loss_mask=mask,
    )
    turns = mask[None].clone()
    mask[1] = False  # it does not split its turn
    chosen = logits.log_softmax(-1)[torch.arange(20), labels.clamp(min=0)]
    t |= {"log_probs": chosen[None], "old": old[None], "mask": mask[None]}
    whole = expected(t, "token_mean", 50.0, turns=turns)
    torch.testing.assert_close(loss, whole.loss)
    assert float(metrics["loss/ratio_clipped_frac"]) == pytest.approx(float(whole.stats.clipped) / 50.0)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert torch.isfinite(gradient).all()


def test_a_packed_row_has_no_sequences() -> None:
    with pytest.raises(ValueError, match="which a packed row does not show"):
        torchtitan.SorlLoss("gspo")


def test_skyrl_scales_advantages_and_the_norm_does_not_mind() -> None:
    """Whatever its unit, the norm is that of advantages whose root mean square is 1."""
    t = tensors()
    mask = t["mask"]
    t["advantages"] = t["advantages"] / t["advantages"][mask].square().mean().sqrt()
    whole = expected(t, "token_mean", 1.0)
    config = SimpleNamespace(eps_clip_low=0.1, eps_clip_high=0.3)
    steps = objective_of_process(
        algorithm="so_grpo", clip=ClipRange(0.1, 0.3), relative=True, ratio="turn"
    ).steps
    for unit in (1.0, 1e-3):
        for rows in (slice(0, 2), slice(2, 3)):
            _, metrics = skyrl.policy_loss(
                t["log_probs"][rows],
                t["old"][rows],
                unit * t["advantages"][rows],
                config,
                mask[rows],
                None,
                algorithm="so_grpo",
                ratio="turn",
            )
        assert steps.scale() == pytest.approx(0.003 / whole.clip_bias.norm("rms"), rel=1e-4)
        steps.clear()
    assert 0.0 <= metrics["clip_ratio"] <= 1.0


def test_skyrl_registers_every_algorithm() -> None:
    found: dict[str, Any] = {}
    skyrl.register(SimpleNamespace(register=found.__setitem__))
    assert {"sorl_so_ppo", "sorl_so_grpo", "sorl_gspo"} <= set(found)
    t = tensors()
    config = SimpleNamespace(eps_clip_low=0.1, eps_clip_high=0.3)
    loss, _ = found["sorl_ppo"](t["log_probs"], t["old"], t["advantages"], config, t["mask"])
    torch.testing.assert_close(loss, expected(t, "token_mean", 1.0, "token").loss)
