"""The scale of steps in a foreign trainer: by hand, over micro-batches, and through the optimizer's hooks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sorl_train.losses.policy import LossOutput
from sorl_train.plugins.objective import Objective

# One clipped token of four: w = 2, A = 1, so c = 2 and rms = sqrt(4 / 4) = 1.
LOG_RATIO = torch.tensor([[math.log(2.0), 0.0, 0.0, 0.0]])
ONES = torch.ones(1, 4)


def objective(**options: Any) -> Objective:
    return Objective("so_grpo", **({"clip_bias_delta": 0.25} | options))


def lose(o: Objective, log_ratio: torch.Tensor = LOG_RATIO, advantage: float = 1.0) -> LossOutput:
    log_probs = log_ratio.clone().requires_grad_()
    return o.loss(
        log_probs,
        torch.zeros_like(log_ratio),
        torch.full_like(log_ratio, advantage),
        torch.ones_like(log_ratio),
        aggregation="trajectory_mean",
        denominator=1.0,
    )


def sgd(o: Objective | None = None, lr: Any = 1.0) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    """A weight and its optimizer, whose steps the objective scales."""
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=lr)
    if o is not None:
        o.steps.attach(optimizer)
    return weight, optimizer


def test_the_scale_is_delta_over_the_norm() -> None:
    o = objective()
    assert o.steps.scale() == 1.0 and not o.steps.pending
    lose(o)
    assert o.steps.scale() == pytest.approx(0.25)
    assert o.steps.metrics["clip_bias_norm"] == pytest.approx(1.0)
    assert o.steps.metrics["clip_frac"] == 0.25
    lose(o, torch.zeros(3, 4))  # 16 tokens: rms = sqrt(4 / 16)
    assert o.steps.scale() == pytest.approx(0.5)


def test_below_the_threshold_and_without_normalization_steps_are_whole() -> None:
    for o in (objective(clip_bias_delta=1.5), Objective("grpo", clip_bias_delta=0.25)):
        lose(o)
        assert o.steps.scale() == 1.0


@pytest.mark.parametrize("rate", [1.0, torch.tensor(1.0)], ids=["number", "tensor"])
def test_a_step_takes_the_sums_and_the_next_loss_begins_anew(rate: Any) -> None:
    """A rate in a tensor stays the same tensor, as compiled steps read it."""
    o = objective()
    weight, optimizer = sgd(o, rate)
    lose(o)
    optimizer.step()
    assert weight.item() == pytest.approx(-0.25)
    assert optimizer.param_groups[0]["lr"] is rate and rate == 1.0
    assert not o.steps.pending
    lose(o, torch.zeros(1, 4))
    optimizer.step()
    assert weight.item() == pytest.approx(-1.25)


def test_everywhere_takes_the_first_step_after_a_loss_only() -> None:
    o = objective()
    handles = o.steps.attach_everywhere()
    try:
        (critic, critics), (policy, policies) = sgd(), sgd()
        critics.step()
        lose(o)
        policies.step()
        critics.step()
    finally:
        for handle in handles:
            handle.remove()
    assert policy.item() == pytest.approx(-0.25) and critic.item() == -2.0
    assert policies.param_groups[0]["lr"] == 1.0


def test_a_step_that_failed_leaves_no_scale_behind() -> None:
    o = objective()
    weight, optimizer = sgd(o)
    lose(o)

    def fails() -> float:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        optimizer.step(fails)
    optimizer.step()
    assert weight.item() == pytest.approx(-0.25) and optimizer.param_groups[0]["lr"] == 1.0


def test_an_evaluation_does_not_count() -> None:
    o = objective()
    with torch.no_grad():
        o.loss(LOG_RATIO, ONES, ONES, ONES, aggregation="token_mean", denominator=4.0)
    assert not o.steps.pending


@pytest.mark.parametrize(("log_ratio", "advantage"), [(math.nan, 1.0), (math.log(2.0), math.inf)])
def test_what_is_not_finite_takes_no_step(
    log_ratio: float, advantage: float, caplog: pytest.LogCaptureFixture
) -> None:
    o = objective()
    weight, optimizer = sgd(o)
    lose(o, torch.full((1, 4), log_ratio), advantage)
    optimizer.step()
    assert weight.item() == 0.0 and "no step is taken" in caplog.text
    lose(o, torch.zeros(1, 4))  # nothing of it stays
    optimizer.step()
    assert weight.item() == -1.0


def test_no_tokens_and_no_signal() -> None:
    o = objective(skip_without_signal=True)
    lose(o, advantage=0.0)
    assert o.steps.scale() == 0.0
    o = objective()
    lose(o, advantage=0.0)
    assert o.steps.scale() == 1.0
    o = objective()
    empty = torch.zeros(1, 4, requires_grad=True)
    o.loss(empty, ONES, ONES, torch.zeros(1, 4), aggregation="token_mean", denominator=1.0)
    assert o.steps.scale() == 0.0


def test_the_rate_of_a_trust_region_joins_in() -> None:
    o = objective()
    o.steps.rate = 0.5
    lose(o)
    assert o.steps.scale() == pytest.approx(0.125)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_bias_norm": "logit"}, "unknown clip_bias_norm 'logit'.*scalar, token, rms"),
        ({"clip_bias_norm": "rmse"}, "Did you mean 'rms'"),
        ({"clip_bias_delta": 0.0}, "must be positive, not 0.0"),
        ({"ratio": "turns"}, "Did you mean 'turn'"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        objective(**options)
