"""The losses against the paper's lemmas, against objectives written down as loops, and the formulas of the page."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from sorl_train.algorithms import SurrogateName
from sorl_train.losses.policy import SURROGATES, ClipRange, Surrogate, cispo, sapo, topr

from .keywords import policy_loss

F64 = torch.float64
LEVELS = ("token", "turn", "sequence")
EPS = 0.2


@dataclass(frozen=True)
class Case:
    """A log-linear policy over V tokens with parameters theta (D, V), and what it is trained on."""

    theta: Tensor
    features: Tensor  # (B, T, D)
    targets: Tensor  # (B, T)
    old: Tensor
    advantages: Tensor
    mask: Tensor
    turns: Tensor

    def log_probs(self) -> Tensor:
        logits = self.features @ self.theta
        return torch.log_softmax(logits, -1).gather(-1, self.targets[..., None]).squeeze(-1)

    def loss(self, level: str, **options):
        return policy_loss(
            self.log_probs(), self.old, self.advantages, self.mask, self.turns, ratio_level=level, **options
        )

    def gradient(self, scalar: Tensor) -> Tensor:
        return torch.autograd.grad(scalar, self.theta, retain_graph=True)[0]

    def segments(self, level: str) -> list[list[tuple[int, list[int]]]]:
        """For each trajectory its segments as (row, token positions), in plain Python."""
        rows = []
        for b in range(len(self.mask)):
            tokens = [t for t in range(self.mask.shape[1]) if self.mask[b, t]]
            keys = {"token": list(range(self.mask.shape[1])), "turn": self.turns[b].tolist()}.get(
                level, [0] * self.mask.shape[1]
            )
            distinct = sorted({keys[t] for t in tokens})
            rows.append([(b, [t for t in tokens if keys[t] == k]) for k in distinct])
        return rows


def case(seed: int, drift: float = 0.7) -> Case:
    """Random layouts: prompts, one-token turns, turns with and without observations between, an empty row."""
    g = torch.Generator().manual_seed(seed)
    rows, columns, width, vocabulary = 5, 19, 4, 6
    mask = torch.zeros(rows, columns, dtype=torch.bool)
    turns = torch.full((rows, columns), -1)
    for b in range(rows - 1):
        t, turn = int(torch.randint(0, 4, (), generator=g)), 0
        while t < columns:
            end = t + int(torch.randint(1, 6, (), generator=g))
            mask[b, t:end], turns[b, t:end] = True, turn
            t = end + int(torch.randint(0, 3, (), generator=g))
            turn += int(torch.randint(1, 3, (), generator=g))
    theta = torch.randn(width, vocabulary, dtype=F64, generator=g)
    features = torch.randn(rows, columns, width, dtype=F64, generator=g)
    targets = torch.randint(0, vocabulary, (rows, columns), generator=g)
    advantages = torch.randn(rows, columns, dtype=F64, generator=g)
    before = theta + drift * torch.randn(theta.shape, dtype=F64, generator=g)
    old = Case(before, features, targets, advantages, advantages, mask, turns).log_probs()
    return Case(theta.requires_grad_(), features, targets, old, advantages, mask, turns)


def ratio_of(c: Case, log_probs: Tensor, b: int, tokens: list[int]) -> Tensor:
    """eq:turn_level_IS."""
    return torch.exp((log_probs[b, tokens] - c.old[b, tokens]).sum() / len(tokens))


def unclipped(w: float, advantage: float) -> bool:
    """Membership in B, the paper's B^+ and B^-."""
    return w <= 1 + EPS if advantage >= 0 else w >= 1 - EPS


def objective(c: Case, level: str) -> Tensor:
    """J of eq:ppo_obj, eq:turn_level_PPO and GSPO with min and clip, for autograd to differentiate."""
    log_probs, rows = c.log_probs(), []
    for segments in c.segments(level):
        terms = []
        for b, tokens in segments:
            w = ratio_of(c, log_probs, b, tokens)
            terms += [torch.minimum(w * a, w.clamp(1 - EPS, 1 + EPS) * a) for a in c.advantages[b, tokens]]
        if terms:
            rows.append(torch.stack(terms).mean())
    return torch.stack(rows).mean()


def bias_terms(c: Case, level: str) -> list[Tensor]:
    """c_t of each loss token, by trajectory."""
    log_probs, rows = c.log_probs().detach(), []
    for segments in c.segments(level):
        terms = []
        for b, tokens in segments:
            w = ratio_of(c, log_probs, b, tokens)
            terms += [w * a * (not unclipped(float(w), float(a))) for a in c.advantages[b, tokens]]
        if terms:
            rows.append(torch.stack(terms))
    return rows


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("seed", range(2))
def test_value_and_gradient_are_those_of_the_objective(level: str, seed: int) -> None:
    c = case(seed)
    output, expected = c.loss(level), objective(c, level)
    torch.testing.assert_close(output.loss, -expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(c.gradient(output.loss), -c.gradient(expected), atol=1e-10, rtol=0)
    assert output.stats.clipped.item() == sum((terms != 0).sum().item() for terms in bias_terms(c, level))
    assert output.stats.clipped.item() > 0, "the case is to exercise clipping"


@pytest.mark.parametrize("seed", range(2))
def test_gradient_decomposes_into_policy_gradient_and_clipping_bias(seed: int) -> None:
    """Lemma eq:ppo_composition: (1/|y|) sum w A grad log pi, less C. In parameters, and per log-probability."""
    c = case(seed)
    log_probs = c.log_probs()
    leaf = log_probs.detach().requires_grad_()
    loss = policy_loss(leaf, c.old, c.advantages, c.mask, c.turns, ratio_level="token").loss
    (per_token,) = torch.autograd.grad(loss, leaf)
    lengths = c.mask.sum(1, keepdim=True)
    weight = c.mask.to(F64) / lengths.clamp(min=1) / (lengths > 0).sum()
    w = torch.exp(log_probs - c.old).detach()
    outside = torch.where(c.advantages >= 0, w > 1 + EPS, w < 1 - EPS)
    policy, bias = weight * w * c.advantages, weight * outside * w * c.advantages
    torch.testing.assert_close(-per_token, policy - bias, atol=1e-10, rtol=0)

    output = c.loss("token")
    policy_gradient = c.gradient((policy * log_probs).sum())
    bias_gradient = c.gradient((bias * log_probs).sum())
    torch.testing.assert_close(-c.gradient(output.loss), policy_gradient - bias_gradient, atol=1e-10, rtol=0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("seed", range(2))
def test_norms_of_the_clipping_bias_are_their_definitions(level: str, seed: int) -> None:
    c = case(seed)
    scale = torch.rand(c.mask.shape, dtype=F64, generator=torch.Generator().manual_seed(seed))
    norms = c.loss(level, logit_scale=scale).stats.norms()
    rows = bias_terms(c, level)
    means = torch.stack([terms.mean() for terms in rows])
    scales = [scale[b][c.mask[b]] for b in range(len(c.mask)) if c.mask[b].any()]
    expected = {
        "scalar": means.mean().abs(),
        "token": torch.cat(rows).norm(),
        "rms": torch.cat(rows).square().mean().sqrt(),
        "logit": (torch.cat(rows) * torch.cat(scales)).norm(),
    }
    assert norms == pytest.approx({name: float(value) for name, value in expected.items()}, abs=1e-10)


def test_logit_norm_is_the_gradient_norm_in_logit_space() -> None:
    """At level token, sqrt(1 - 2 p + sum p^2) |c_t| is the L2 norm of the gradient of w_t A_t by the logits."""
    c = case(1)
    logits = (c.features @ c.theta).detach().requires_grad_()
    log_p = torch.log_softmax(logits, -1)
    log_probs = log_p.gather(-1, c.targets[..., None]).squeeze(-1)
    p = log_p.exp().detach()
    scale = (1 - 2 * log_probs.detach().exp() + p.square().sum(-1)).sqrt()
    w = torch.exp(log_probs - c.old)
    outside = c.mask & torch.where(c.advantages >= 0, w > 1 + EPS, w < 1 - EPS)
    (gradient,) = torch.autograd.grad((w * c.advantages)[outside].sum(), logits)
    norm = policy_loss(
        log_probs, c.old, c.advantages, c.mask, c.turns, ratio_level="token", logit_scale=scale
    ).stats.norm("logit")
    assert norm == pytest.approx(float(gradient.norm()), abs=1e-10)


@pytest.mark.parametrize("level", LEVELS)
def test_float32_is_enough_for_long_turns(level: str) -> None:
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(2, 4096, dtype=F64, generator=g)
    log_probs = (old + 0.3 * torch.randn(2, 4096, dtype=F64, generator=g)).requires_grad_()
    advantages = torch.randn(2, 4096, dtype=F64, generator=g)
    mask = torch.ones(2, 4096, dtype=torch.bool)
    turns = torch.arange(4096).div(1500, rounding_mode="floor").expand(2, 4096)

    def run(dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
        output = policy_loss(
            log_probs.to(dtype), old.to(dtype), advantages.to(dtype), mask, turns, ratio_level=level
        )
        return (
            output.loss.double(),
            torch.autograd.grad(output.loss, log_probs)[0],
            output.stats.norm("token"),
        )

    (loss, gradient, norm), (loss64, gradient64, norm64) = run(torch.float32), run(F64)
    torch.testing.assert_close(loss, loss64, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradient, gradient64, atol=1e-9, rtol=2e-4)
    assert norm == pytest.approx(norm64, rel=1e-5)


# --- surrogates: gradients, and values against the page ---
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


@pytest.mark.parametrize("level", LEVELS)
def test_the_gradient_of_sapo_is_that_of_finite_differences(level: str) -> None:
    c = case(2)
    leaf = c.log_probs().detach().requires_grad_()
    rest = (c.old, c.advantages, c.mask, c.turns)
    assert torch.autograd.gradcheck(
        lambda lp: policy_loss(lp, *rest, ratio_level=level, surrogate=sapo).loss, leaf
    )


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
    torch.testing.assert_close(
        -c.gradient(c.loss(level, surrogate=surrogate).loss), expected, atol=1e-10, rtol=0
    )


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
