"""Algorithms as losses for other trainers, and the scale of their steps: by hand, and through the optimizer's hooks."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from sorl_train.algorithms import ALGORITHMS, Algorithm
from sorl_train.losses.policy import SURROGATES, ClipRange, LossOutput, LossSettings, policy_loss
from sorl_train.plugins.objective import Objective, clip_range, loss_algorithms, turn_ids_of

from ..losses.keywords import drawn


def test_turns_are_runs_of_ones() -> None:
    """Every mask of eight tokens, against a loop."""
    masks = torch.tensor(list(itertools.product([0, 1], repeat=8)))
    assert torch.equal(turn_ids_of(masks.bool()), turn_ids_of(masks))
    assert turn_ids_of(masks[:, :0]).shape == (256, 0)
    for mask, found in zip(masks.tolist(), turn_ids_of(masks).tolist(), strict=True):
        expected, turn, last = [], -1, 0
        for here in mask:
            turn += here > last
            expected.append(turn if here else -1)
            last = here
        assert found == expected


@pytest.mark.parametrize("name", loss_algorithms())
def test_the_loss_is_that_of_the_table(name: str) -> None:
    given, row = drawn(3, 5, 12), ALGORITHMS[name]
    mask = given["mask"]
    tensors = (given["log_probs"], given["old"], given["advantages"])
    more: Any = {"denominator": 7.0, "correction": torch.rand(5, 12)}
    output = Objective(name).loss(*tensors, mask.long(), aggregation="token_mean", **more)
    settings = LossSettings(row.ratio, SURROGATES[row.surrogate_name], clip_range(row), "token_mean")
    expected = policy_loss(*tensors, mask, turn_ids_of(mask), settings, **more)
    assert output.loss.item() == expected.loss.item()


def test_the_clip_range_is_the_rows_unless_it_is_given() -> None:
    assert clip_range(ALGORITHMS["cispo"]) == ClipRange(0.2, 4.0)
    assert clip_range(ALGORITHMS["cispo"], eps_high=1.0, dual=None) == ClipRange(0.2, 1.0)
    assert clip_range(ALGORITHMS["so_grpo"], eps=0.1) == ClipRange(0.1)


def test_another_ratio_and_an_algorithm_of_ones_own() -> None:
    assert Objective("so_grpo", ratio="turn").algorithm.ratio == "turn"
    mine = Algorithm("turn", "group", surrogate=lambda ratio, advantage, clip: ratio * advantage)
    assert Objective(mine).algorithm is mine


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *(
            (name, "differs from 'grpo' in its advantages only")
            for name in ALGORITHMS
            if name not in loss_algorithms()
        ),
        ("rloo", "take 'grpo'"),
        ("gigpo", "states that turns started in"),
        ("so_gpro", "Did you mean 'so_grpo'"),
    ],
)
def test_every_algorithm_is_a_loss_or_says_why_not(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(name)


def test_an_import_loads_torch_and_nothing_else_that_is_heavy() -> None:
    """Beyond what torch itself loads."""
    code = (
        "import sys, torch; before = set(sys.modules); "
        "import sorl_train.plugins.objective; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = set(loaded.stdout.split()) - set(sys.stdlib_module_names)
    assert "sorl_train" in ours and ours <= {"sorl_train", "torch"}


# --- the scale of steps ---

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
    weight.grad = torch.ones(1)
    lose(o, torch.zeros(1, 4))  # nothing of it stays
    optimizer.step()
    assert weight.item() == -1.0


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_gradient_that_is_not_finite_reaches_neither_weights_nor_moments(kind: Any) -> None:
    o, weight = objective(), torch.nn.Parameter(torch.ones(1))
    optimizer = kind([weight], lr=0.1)
    o.steps.attach(optimizer)
    for log_ratio, gradient in ((math.nan, math.nan), (0.0, 1.0)):
        lose(o, torch.full((1, 4), log_ratio))
        weight.grad = torch.full((1,), gradient)
        optimizer.step()
    assert 0.8 < weight.item() < 1.0


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
def test_mistakes_in_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        objective(**options)
