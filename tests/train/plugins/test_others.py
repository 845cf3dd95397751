"""The recipes of docs/interop/plugins.md, each with the arguments of the trainer that it is for."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sorl_train.losses.policy import LossOutput, LossSettings, policy_loss
from sorl_train.plugins.objective import objective_of_process, turn_ids_of

from ...docs.blocks import python_blocks
from ..losses.keywords import drawn

PAGE = "docs/interop/plugins.md"


def recipe(trainer: str, monkeypatch: pytest.MonkeyPatch, **theirs: Any) -> dict[str, Any]:
    """What the page's block defines that imports ``trainer``, whose names are ``theirs``."""
    (block,) = (block for block in python_blocks(PAGE) if trainer in block)
    for place in re.findall(r"from ((?:prime_rl|nemo_rl|skyrl)\S*)", block):
        parts = place.split(".")
        for count in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(parts[count - 1]))
        for name, value in theirs.items():
            setattr(sys.modules[place], name, value)
    found: dict[str, Any] = {}
    exec(compile(block, PAGE, "exec"), found)
    return found


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
        LossSettings(level, aggregation=mean),
        denominator=denominator,
    )


def test_prime_rl_adds_sequences_up(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = recipe("prime_rl", monkeypatch, LossOutputs=SimpleNamespace)["loss"]
    t = drawn(11, 3, 14)
    total = torch.tensor(0.0)
    for i in range(3):
        inputs = SimpleNamespace(
            trainer_logprobs=t["log_probs"][i],
            inference_logprobs=t["old"][i],
            advantages=t["advantages"][i],
            loss_mask=t["mask"][i],
            loss_weights=None,
        )
        total = total + loss(inputs).loss
    whole = expected(t, "token_mean", 1.0)
    torch.testing.assert_close(total, whole.loss)
    steps = objective_of_process(algorithm="so_grpo", ratio="turn").steps
    assert steps.scale() == pytest.approx(0.003 / whole.stats.norm("rms"))


def test_nemo_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    SorlLoss = recipe("nemo_rl", monkeypatch, LossType=SimpleNamespace(SEQUENCE_LEVEL="s"))["SorlLoss"]
    t = drawn(11, 3, 14)
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
    loss, metrics = SorlLoss()(
        next_token_logprobs=t["log_probs"],
        data=data,
        global_valid_seqs=torch.tensor(4.0),
        global_valid_toks=torch.tensor(40.0),
    )
    torch.testing.assert_close(loss, expected(t, "trajectory_mean", 4.0).loss)
    assert metrics["num_valid_samples"] == 2.0


def test_torchtitan_packs_sequences_and_leaves_out_what_the_sampler_did_not_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    g = torch.Generator().manual_seed(2)
    logits = torch.randn(20, 9, generator=g, requires_grad=True)
    labels = torch.randint(0, 9, (20,), generator=g)
    t = drawn(11, 1, 20)
    mask = t["mask"][0].clone()
    mask[:3] = True
    labels[~mask] = -100
    old = t["old"][0].clone()
    old[1] = float("nan")
    loss, _ = recipe("generator_logprobs", monkeypatch)["loss"](
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
    torch.testing.assert_close(loss, expected(t, "token_mean", 50.0, turns=turns).loss)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert torch.isfinite(gradient).all()


def test_skyrl_scales_advantages_and_the_norm_does_not_mind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its unit, the norm is that of advantages whose root mean square is 1."""
    registered: dict[str, Any] = {}
    registry = SimpleNamespace(register=registered.__setitem__)
    recipe("skyrl", monkeypatch, PolicyLossRegistry=registry)
    loss = registered["sorl_so_grpo"]
    t = drawn(11, 3, 14)
    mask = t["mask"]
    t["advantages"] = t["advantages"] / t["advantages"][mask].square().mean().sqrt()
    whole = expected(t, "token_mean", 1.0)
    steps = objective_of_process(algorithm="so_grpo", ratio="turn", relative=True).steps
    for unit in (1.0, 1e-3):
        for rows in (slice(0, 2), slice(2, 3)):
            given = (t["log_probs"][rows], t["old"][rows], unit * t["advantages"][rows])
            _, metrics = loss(*given, SimpleNamespace(), mask[rows], None)
        assert steps.scale() == pytest.approx(0.003 / whole.stats.norm("rms"), rel=1e-4)
        steps.clear()
    assert 0.0 <= metrics["clip_ratio"] <= 1.0
