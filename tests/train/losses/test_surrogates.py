"""The surrogates: values by hand, gradients against explicit ones and against finite differences, and TRL's losses."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from sorl_train.algorithms import SurrogateName
from sorl_train.losses.policy import (
    SURROGATES,
    ClipRange,
    LossSettings,
    Surrogate,
    cispo,
    policy_loss,
    sapo,
    topr,
)
from sorl_train.losses.segments import MAX_LOG_RATIO

from .test_theory import Case, case, ratio_of

F64 = torch.float64
LEVELS = ("token", "turn", "sequence")
EVERY = tuple(SURROGATES)
DETACHED: dict[Surrogate, Any] = {  # the constant weight of A log w, written down as a plain function
    cispo: lambda w, a: min(w, 1.2),
    topr: lambda w, a: 1.0 if a > 0 else min(w, 1.0),
}


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def value_and_gradient(surrogate: Surrogate, ratio: Tensor, advantage: Tensor, clip: ClipRange) -> Any:
    """The values, and their gradients with respect to the log-ratio."""
    log_ratio = ratio.log().requires_grad_()
    values = surrogate(log_ratio.exp(), advantage, clip)
    return values, torch.autograd.grad(values.sum(), log_ratio)[0]


# --- by hand --------------------------------------------------------------------------------------------------
LN2 = 0.69314718056


def test_cispo_by_hand() -> None:
    """The weight is bounded above, at 1.5, on both sides of A, and not below; no token is without a gradient."""
    ratio, advantage = tensor(2.0, 2.0, 0.5, 0.5, 1.0, 2.0), tensor(1, -1, 1, -1, 3, 0)
    values, gradient = value_and_gradient(cispo, ratio, advantage, ClipRange(0.2, 0.5))
    torch.testing.assert_close(
        values, tensor(1.5 * LN2, -1.5 * LN2, -0.5 * LN2, 0.5 * LN2, 0, 0), atol=1e-10, rtol=0
    )
    torch.testing.assert_close(gradient, tensor(1.5, -1.5, 0.5, -0.5, 3, 0), atol=1e-12, rtol=0)


def test_sapo_by_hand() -> None:
    """sigmoid(2) = .8808 for A > 0 with tau 2 at w = 2; sigmoid(0.5) = .6225 for A < 0 with tau 0.5 there."""
    ratio, advantage = tensor(2.0, 2.0, 1.0, 1.0, 2.0), tensor(1, -1, 1, -2, 0)
    values, gradient = value_and_gradient(sapo, ratio, advantage, ClipRange(tau_pos=2.0, tau_neg=0.5))
    positive, negative = 0.88079707798, 0.62245933120
    expected = tensor(2 * positive, -8 * negative, 1, -2 * 8 * 0.5, 0)
    torch.testing.assert_close(values, expected, atol=1e-10, rtol=0)
    slopes = tensor(4 * positive * (1 - positive) * 2, -4 * negative * (1 - negative) * 2, 1, -2, 0)
    torch.testing.assert_close(gradient, slopes, atol=1e-10, rtol=0)


def test_topr_by_hand() -> None:
    """A > 0: weight 1 at every ratio. A < 0: the ratio itself, at most 1."""
    ratio, advantage = tensor(2.0, 0.5, 2.0, 0.5, 2.0), tensor(1, 1, -1, -1, 0)
    values, gradient = value_and_gradient(topr, ratio, advantage, ClipRange())
    torch.testing.assert_close(values, tensor(LN2, -LN2, -LN2, 0.5 * LN2, 0), atol=1e-10, rtol=0)
    torch.testing.assert_close(gradient, tensor(1, 1, -1, -0.5, 0), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", EVERY)
def test_on_policy_all_have_the_policy_gradient(name: SurrogateName) -> None:
    advantage = tensor(1.0, -2.0, 0.3)
    _, gradient = value_and_gradient(SURROGATES[name], tensor(1, 1, 1), advantage, ClipRange())
    torch.testing.assert_close(gradient, advantage, atol=1e-12, rtol=0)


# One trajectory of two turns with two tokens each. Token ratios 4, 1 and 1, 0.25: turn ratios 2 and 0.5, that of the
# sequence 1.
TOKENS = torch.tensor([[4.0, 1.0, 1.0, 0.25]], dtype=F64)
TURNS = torch.tensor([[0, 0, 1, 1]])
MIXED = torch.tensor([[1.0, -3.0, -1.0, -3.0]], dtype=F64)


@pytest.mark.parametrize(
    ("surrogate", "level", "expected"),
    [
        # weights 1.5, 1; 1, 0.25 on a token's own
        (cispo, "token", [1.5, -3.0, -1.0, -0.75]),
        # a turn: weight 1.5 and the mean advantage -1 for both tokens; weight 0.5 and the mean -2
        (cispo, "turn", [-1.5, -1.5, -1.0, -1.0]),
        (cispo, "sequence", [-1.5, -1.5, -1.5, -1.5]),
        (topr, "token", [1.0, -3.0, -1.0, -0.75]),
        # a turn: weight 1 for A = 1 and for A = -3, whose ratio of 2 is truncated; then weight 0.5
        (topr, "turn", [-1.0, -1.0, -1.0, -1.0]),
        (topr, "sequence", [-1.5, -1.5, -1.5, -1.5]),
    ],
)
def test_tokens_of_a_segment_share_weight_and_credit(
    surrogate: Surrogate, level: Any, expected: list[float]
) -> None:
    """What each token's log p gets, times the four tokens that the loss divides by."""
    log_probs = TOKENS.log().requires_grad_()
    settings = LossSettings(level, surrogate, ClipRange(0.2, 0.5))
    mask = torch.ones(1, 4, dtype=torch.bool)
    policy_loss(log_probs, torch.zeros(1, 4, dtype=F64), MIXED, mask, TURNS, settings).loss.backward()
    assert log_probs.grad is not None
    torch.testing.assert_close(-4 * log_probs.grad[0], tensor(*expected), atol=1e-12, rtol=0)


# --- gradients ------------------------------------------------------------------------------------------------
def loss_of(c: Case, level: Any, surrogate: Surrogate, log_probs: Tensor | None = None) -> Tensor:
    given = c.log_probs() if log_probs is None else log_probs
    settings = LossSettings(level, surrogate, ClipRange(0.2))
    return policy_loss(given, c.old, c.advantages, c.mask, c.turns, settings).loss


@pytest.mark.parametrize("level", LEVELS)
def test_the_gradient_of_sapo_is_that_of_finite_differences(level: str) -> None:
    c = case(2)
    leaf = c.log_probs().detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda lp: loss_of(c, level, sapo, lp), leaf)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("surrogate", [cispo, topr])
def test_detached_weights_have_the_gradient_of_the_lemma(level: str, seed: int, surrogate: Surrogate) -> None:
    """(1/|y|) sum over segments k of (1/|y^k|) sum_t weight_t A_t times grad log pi(y^k), in parameters.

    Finite differences would move the weights as well, so the gradient is written down, with weights that are numbers.
    """
    c = case(seed)
    log_probs, rows = c.log_probs(), []
    for segments in c.segments(level):
        length = sum(len(tokens) for _, tokens in segments)
        total = torch.zeros_like(c.theta)
        for b, tokens in segments:
            w = float(ratio_of(c, log_probs.detach(), b, tokens))
            credit = sum(DETACHED[surrogate](w, float(a)) * a for a in c.advantages[b, tokens])
            total += credit / len(tokens) * c.gradient(log_probs[b, tokens].sum()) / length
        if segments:
            rows.append(total)
    expected = torch.stack(rows).mean(0)
    torch.testing.assert_close(-c.gradient(loss_of(c, level, surrogate)), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("gap", [MAX_LOG_RATIO, 1e4])
def test_far_ratios_stay_finite(name: SurrogateName, gap: float) -> None:
    for sign in (1.0, -1.0):
        log_probs = torch.full((1, 4), sign * gap, requires_grad=True)
        mask = torch.ones(1, 4, dtype=torch.bool)
        settings = LossSettings("turn", SURROGATES[name])
        advantages = MIXED.float()
        output = policy_loss(log_probs, torch.zeros(1, 4), advantages, mask, TURNS, settings)
        output.loss.backward()
        assert math.isfinite(output.loss.item())
        assert log_probs.grad is not None and torch.isfinite(log_probs.grad).all()


# --- the table ------------------------------------------------------------------------------------------------
def documented() -> dict[str, str]:
    """The formula of each surrogate, from the table of docs/algorithms.md."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    table = page.partition("<!-- surrogates:")[2].partition("<!-- end -->")[0].splitlines()[3:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {name.strip("`"): formula.strip("`") for name, formula, *_ in rows}


def test_the_table_has_every_name() -> None:
    assert set(SURROGATES) == set(get_args(SurrogateName)) == set(documented())


@pytest.mark.parametrize("name", EVERY)
def test_the_formula_is_what_the_function_computes(name: SurrogateName) -> None:
    """The formula of the documentation, read as Python: a space between two factors is their product."""
    formula = documented()[name].replace("log w", "log(w)")
    product = re.sub(r"(?<=[\w)])(?<!if)(?<!else) (?!if\b|else\b)(?=[\w(])", "*", formula)
    for w in (0.3, 0.9, 1.1, 1.4, 3.0):
        for a in (-1.5, 0.0, 2.0):
            known = {
                "w": w,
                "A": a,
                "eps_high": 0.3,
                "tau": 1.1 if a > 0 else 1.4,
                "sg": lambda x: x,
                "clip": lambda x: min(max(x, 0.8), 1.3),
                "log": math.log,
                "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
                "min": min,
            }
            clip = ClipRange(0.2, 0.3, tau_pos=1.1, tau_neg=1.4)
            found = SURROGATES[name](tensor(w), tensor(a), clip).item()
            assert found == pytest.approx(eval(product, {"__builtins__": {}}, known), abs=1e-12), (w, a)


def test_temperatures_are_above_zero() -> None:
    with pytest.raises(ValueError, match=r"tau_neg, a temperature of sapo, must be above 0, not 0\.0"):
        ClipRange(tau_neg=0.0)
