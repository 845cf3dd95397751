"""The surrogates: values against the page's formulas, gradients against explicit ones and finite differences."""

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


@pytest.mark.parametrize("name", EVERY)
def test_on_policy_all_have_the_policy_gradient(name: SurrogateName) -> None:
    advantage, log_ratio = tensor(1.0, -2.0, 0.3), tensor(0, 0, 0).requires_grad_()
    SURROGATES[name](log_ratio.exp(), advantage, ClipRange()).sum().backward()
    torch.testing.assert_close(log_ratio.grad, advantage, atol=1e-12, rtol=0)


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
