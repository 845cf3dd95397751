"""Policy losses against arithmetic done by hand, and their edges."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_train.algorithms import ALGORITHMS, SurrogateName
from sorl_train.config.find_algorithm import find_algorithm
from sorl_train.losses.advantages import gae, group_advantages
from sorl_train.losses.clip_bias import LossStats, normalization
from sorl_train.losses.policy import SURROGATES, ClipRange, LossOutput
from sorl_train.losses.terms import aggregate, loss_denominator

from .keywords import policy_loss

F64 = torch.float64
LEVELS = ("token", "turn", "sequence")

# Two trajectories of two turns. Row 0 has an observation between its turns; the turns of row 1 are adjacent, the
# second has one token, and their ids neither start at 0 nor are contiguous.
MASK = torch.tensor([[0, 1, 1, 0, 1, 1], [1, 1, 1, 0, 0, 0]], dtype=torch.bool)
TURNS = torch.tensor([[-1, 0, 0, -1, 1, 1], [3, 3, 7, -1, -1, -1]])
RATIOS = torch.tensor([[9.0, 2.0, 0.5, 9.0, 1.96, 1.0], [0.81, 1.0, 0.5, 9.0, 9.0, 9.0]], dtype=F64)
OLD = torch.tensor([[-9.0, -1.0, -2.0, -9.0, -0.7, -3.0], [-0.1, -1.0, -2.5, -9.0, -9.0, -9.0]], dtype=F64)
ADVANTAGES = torch.tensor([[9.0, 1, -1, 9, 2, -3], [1, -2, -1, 9, 9, 9]], dtype=F64)

A = math.sqrt(0.5)  # advantage of reward 1 in a group {1, 0}: (1 - 1/2) / sqrt(1/2); that of reward 0 is -A
W = (
    1.96**0.25
)  # sequence ratio of row 0: (2 * 0.5 * 1.96 * 1)^(1/4); that of row 1, 0.405^(1/3) = 0.74, is clipped

# loss; gradient of the loss; the clipped c_t = w_t A_t
TOKEN_GAE = (
    -((1.2 - 0.8 + 2.4 - 3.0) / 4 + (0.81 - 2.0 - 0.8) / 3) / 2,
    [[0, 0, 0, 0, 0, 3 / 8], [-0.81 / 6, 2 / 6, 0, 0, 0, 0]],
    [2.0, -0.5, 3.92, -0.5],
)
TURN_GAE = (  # turn ratios 1, 1.4; 0.9, 0.5
    -((1.0 - 1.0 + 2.4 - 4.2) / 4 + (0.9 - 1.8 - 0.8) / 3) / 2,
    [[0, 0, 0, 0, 1.4 * 3 / 2 / 8, 1.4 * 3 / 2 / 8], [0.9 / 2 / 6, 0.9 / 2 / 6, 0, 0, 0, 0]],
    [2.8, -0.5],
)
TOKEN_GROUP = (
    -((1.2 + 0.5 + 1.2 + 1.0) * A / 4 - (0.81 + 1.0 + 0.8) * A / 3) / 2,
    [[0, 0, -0.5 * A / 8, 0, 0, -A / 8], [0.81 * A / 6, A / 6, 0, 0, 0, 0]],
    [2.0 * A, 1.96 * A, -0.5 * A],
)
SEQUENCE_GROUP = (
    -(W * A - 0.8 * A) / 2,
    [[0, -W * A / 8, -W * A / 8, 0, -W * A / 8, -W * A / 8], [0, 0, 0, 0, 0, 0]],
    [-(0.405 ** (1 / 3)) * A] * 3,
)
EXPECTED = {
    "ppo": TOKEN_GAE,
    "turn_ppo": TURN_GAE,
    "s_ppo": TOKEN_GAE,
    "so_ppo": TURN_GAE,
    "grpo": TOKEN_GROUP,
    "gspo": SEQUENCE_GROUP,
    "so_grpo": TOKEN_GROUP,
    # other advantages in the same objective: test_turn_credit; other surrogates: test_theory
    "rloo": TOKEN_GROUP,
    "mt_grpo": TOKEN_GROUP,
    "gigpo": TOKEN_GROUP,
}


def log_probs() -> Tensor:
    return (OLD + RATIOS.log()).requires_grad_()


def hand_loss(
    level: str = "turn", lp: Tensor | None = None, advantages: Tensor = ADVANTAGES, **options
) -> LossOutput:
    return policy_loss(
        log_probs() if lp is None else lp, OLD, advantages, MASK, TURNS, ratio_level=level, **options
    )


def advantages_of(algorithm: str) -> Tensor:
    if ALGORITHMS[algorithm].needs_groups:
        per_row = group_advantages(
            torch.tensor([1.0, 0.0], dtype=F64), torch.tensor([4, 4]), torch.tensor([True, True]), eps=0.0
        )
        return per_row[:, None].expand(2, 6)
    rewards = torch.zeros(2, 6, dtype=F64)
    rewards[0, 5] = 1.0  # with gamma = lambda = 1 the advantage is the return, 1 or 0, less the value
    values = torch.tensor([[1.0], [0.0]], dtype=F64) - ADVANTAGES
    return gae(rewards, values, MASK)[0]


@pytest.mark.parametrize("name", EXPECTED)
def test_each_algorithm_by_hand(name: str) -> None:
    loss, gradient, outside = EXPECTED[name]
    algorithm, lp = find_algorithm(name), log_probs()
    output = hand_loss(algorithm.ratio, lp, advantages_of(name))
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(lp.grad, torch.tensor(gradient, dtype=F64), atol=1e-12, rtol=0)
    assert output.stats.norm("token") == pytest.approx(math.hypot(*outside), abs=1e-12)
    scales = normalization(output.stats, norm="token", target="gradient")
    assert scales.grad_scale == pytest.approx(1 / max(math.hypot(*outside), 1.0), abs=1e-12)
    assert output.stats.metrics()["clip_frac"] == pytest.approx(
        len(outside) / 7 if name != "turn_ppo" else 2 / 7
    )


def test_another_ratio_level_changes_nothing_else() -> None:
    changed = find_algorithm("so_grpo", "turn")
    assert (changed.ratio, changed.normalize, changed.advantage) == ("turn", True, "group")
    assert find_algorithm("so_grpo").ratio == "token"
    with pytest.raises(ValueError, match="unknown ratio level 'turns'"):
        find_algorithm("so_ppo", "turns")


def test_metrics_by_hand() -> None:
    metrics = hand_loss("turn").stats.metrics()
    ratios = [1.0, 1.0, 1.4, 1.4, 0.9, 0.9, 0.5]
    mean = sum(ratios) / 7
    assert metrics["ratio_mean"] == pytest.approx(mean)
    assert metrics["ratio_std"] == pytest.approx(math.sqrt(sum((r - mean) ** 2 for r in ratios) / 7))
    logs = [math.log(r) for r in (2.0, 0.5, 1.96, 1.0, 0.81, 1.0, 0.5)]  # the tokens' own, at every level
    assert metrics["approx_kl"] == pytest.approx(0.5 * sum(x * x for x in logs) / 7)


def test_token_mean_divides_by_the_tokens_of_the_batch() -> None:
    terms = (1.2 - 0.8 + 2.4 - 3.0) + (0.81 - 2.0 - 0.8)
    assert hand_loss("token", aggregation="token_mean").loss.item() == pytest.approx(-terms / 7)
    given = hand_loss("token", aggregation="token_mean", denominator=70)
    assert given.loss.item() == pytest.approx(-terms / 70)
    assert loss_denominator(MASK) == 2.0
    assert loss_denominator(MASK, "token_mean") == 7.0


def test_half_precision_is_computed_in_float32() -> None:
    lp = log_probs().detach().to(torch.bfloat16).requires_grad_()
    output = hand_loss("turn", lp)
    output.loss.backward()
    assert output.loss.dtype == torch.float32 and output.stats.bias_square_sum.dtype == torch.float32
    assert lp.grad is not None and lp.grad.dtype == torch.bfloat16
    exact = hand_loss("turn", lp.detach().float().requires_grad_())
    assert output.loss.item() == exact.loss.item()


@pytest.mark.parametrize("level", LEVELS)
def test_what_lies_off_the_loss_mask_is_never_read(level: str) -> None:
    def spoil(x: Tensor, value: float) -> Tensor:
        return torch.where(MASK, x.detach(), value).requires_grad_(x.requires_grad)

    clean, spoilt = log_probs(), spoil(log_probs(), math.nan)
    scale = torch.rand(2, 6, dtype=F64)
    expected = hand_loss(level, clean, logit_scale=scale)
    output = policy_loss(
        spoilt,
        spoil(OLD, -math.inf),
        spoil(ADVANTAGES, math.nan),
        MASK,
        torch.where(MASK, TURNS, 10**9),
        ratio_level=level,
        logit_scale=spoil(scale, math.inf),
    )
    expected.loss.backward()
    output.loss.backward()
    assert output.loss.item() == expected.loss.item()
    assert spoilt.grad is not None and torch.equal(spoilt.grad, clean.grad)
    assert output.stats.norms() == expected.stats.norms()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(2, 6), (0, 6), (2, 0)])
def test_no_tokens_at_all_is_zero_and_not_nan(level: str, shape: tuple[int, int]) -> None:
    lp = torch.zeros(shape, requires_grad=True)
    mask, turns = torch.zeros(shape, dtype=torch.bool), torch.full(shape, -1)
    output = policy_loss(lp, lp.detach(), lp.detach(), mask, turns, ratio_level=level)
    output.loss.backward()
    assert output.loss.item() == 0.0 and lp.grad is not None and not lp.grad.any()
    assert set(output.stats.norms().values()) == {0.0}
    assert set(output.stats.metrics().values()) == {0.0}
    assert normalization(output.stats).update_scale == 1.0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("gap", [20.0, 50.0, 1e4, math.inf])
def test_extreme_log_ratios_stay_finite(level: str, name: SurrogateName, gap: float) -> None:
    for sign in (1.0, -1.0):
        lp = (OLD.float() + sign * gap).nan_to_num(posinf=1e30, neginf=-1e30).requires_grad_()
        output = hand_loss(level, lp, ADVANTAGES.float(), surrogate=SURROGATES[name])
        output.loss.backward()
        assert torch.isfinite(output.loss) and lp.grad is not None and torch.isfinite(lp.grad).all()
        assert all(math.isfinite(x) for x in output.stats.norms().values())
        if (
            sign > 0 and gap > 20
        ):  # beyond the clamp the loss does not move; the bias still reports w = exp(20)
            assert not lp.grad.any() and output.stats.norm("token") > math.exp(20)


def test_a_nan_in_a_loss_token_is_not_hidden() -> None:
    lp = log_probs().detach()
    lp[0, 4] = math.nan
    assert torch.isnan(hand_loss("turn", lp.requires_grad_()).loss)


def test_loss_mask_may_be_a_part_of_a_turn() -> None:
    mask = MASK.clone()
    mask[0, 4] = False  # turn 1 of row 0 is left with the token of ratio 1, which then has ratio 1
    output = policy_loss(log_probs(), OLD, ADVANTAGES, mask, TURNS, ratio_level="turn")
    assert output.loss.item() == pytest.approx(-((1.0 - 1.0 - 3.0) / 3 + (0.9 - 1.8 - 0.8) / 3) / 2)


def whole_row(log_ratio: Tensor, advantages: Tensor, level: str, **options: Any) -> LossOutput:
    """All tokens are in the loss, and those of a row in one turn of the same number."""
    ones = torch.ones_like(log_ratio, dtype=torch.bool)
    old = torch.zeros_like(log_ratio)
    return policy_loss(log_ratio, old, advantages, ones, (~ones).short(), ratio_level=level, **options)


def test_neighbouring_rows_with_the_same_turn_id_stay_apart() -> None:
    ratios = torch.tensor([[1.1, 1.1], [0.9, 0.9]], dtype=F64)
    output = whole_row(ratios.log().requires_grad_(), torch.ones_like(ratios), "turn")
    assert output.loss.item() == pytest.approx(-(1.1 + 0.9) / 2)
    assert output.stats.metrics()["ratio_std"] == pytest.approx(0.1)


def test_turn_ids_that_break_their_contract() -> None:
    for wrong, message in ((-1, "has -1 on a loss token"), (2, "has 2 on a loss token of trajectory 1")):
        turns = TURNS.clone()
        turns[1, 2] = wrong
        with pytest.raises(ValueError, match=f"turn_ids {message}"):
            policy_loss(log_probs(), OLD, ADVANTAGES, MASK, turns, ratio_level="turn")


def test_clear_errors() -> None:
    with pytest.raises(ValueError, match=r"unknown ratio_level 'turns'.*Did you mean 'turn'\?"):
        hand_loss("turns")
    with pytest.raises(ValueError, match=r"advantages has shape \(2, 1\), the first input \(2, 6\)"):
        hand_loss("token", advantages=ADVANTAGES[:, :1])
    with pytest.raises(ValueError, match="unknown aggregation 'mean'"):
        hand_loss("token", aggregation="mean")
    with pytest.raises(ValueError, match="dual_clip must be above 1"):
        hand_loss("token", dual_clip=0.5)
    with pytest.raises(ValueError, match="denominator must not be negative, not -1"):
        hand_loss("token", denominator=-1)


@pytest.mark.parametrize("level", LEVELS)
def test_a_surrogate_of_ones_own_replaces_the_clipped_one(level: str) -> None:
    """w A without any clipping; the statistics still count what PPO's clip range would cut."""

    def unclipped(ratio: Tensor, advantage: Tensor, clip: ClipRange) -> Tensor:
        return ratio * advantage

    free, lp, wide = log_probs(), log_probs(), {"clip_eps": 1.0, "clip_eps_high": 1e6}
    output, expected = hand_loss(level, free, surrogate=unclipped), hand_loss(level, lp, **wide)
    output.loss.backward()
    expected.loss.backward()
    assert output.loss.item() == expected.loss.item()
    assert free.grad is not None and torch.equal(free.grad, lp.grad)
    assert output.stats.norms() == hand_loss(level).stats.norms()
    with pytest.raises(ValueError, match=r"surrogate has shape \(\), the first input \(7,\)"):
        hand_loss(level, surrogate=lambda ratio, advantage, clip: (ratio * advantage).sum())


def test_aggregate_by_hand() -> None:
    x = torch.tensor([[math.nan, 1.0, 3.0], [2.0, math.nan, math.nan]], requires_grad=True)
    mask = torch.tensor([[False, True, True], [True, False, False]])
    mean = aggregate(x, mask)
    assert mean.item() == pytest.approx((2.0 + 2.0) / 2)
    assert aggregate(x, mask, aggregation="token_mean").item() == pytest.approx(2.0)
    assert aggregate(x, mask, denominator=8).item() == pytest.approx(0.5)
    (gradient,) = torch.autograd.grad(mean, x)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 0.25, 0.25], [0.5, 0.0, 0.0]]))


@pytest.mark.parametrize(
    ("level", "ratios", "advantages", "terms", "gradient"),
    [
        # A = -1 at ratio 3 is held at 2 A without a gradient, at ratio 1.5 it is not; A = 1 at ratio 3 is PPO's to clip
        ("token", [3.0, 1.5, 3.0], [-1.0, -1.0, 1.0], -2.0 - 1.5 + 1.2, [0.0, 1.5 / 3, 0.0]),
        # of a turn at ratio 3 the token with A = -1 is held, that with A = 1 clipped, that with A = 0 neither
        ("turn", [3.0, 3.0, 3.0], [-1.0, 1.0, 0.0], -2.0 + 1.2, [0.0, 0.0, 0.0]),
    ],
)
def test_dual_clip_by_hand(
    level: str, ratios: list[float], advantages: list[float], terms: float, gradient: list[float]
) -> None:
    """Only what PPO's own clip cuts counts as clipped."""
    log_probs = torch.tensor([ratios], dtype=F64).log().requires_grad_()
    found = whole_row(log_probs, torch.tensor([advantages], dtype=F64), level, dual_clip=2.0)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(-terms / 3)
    torch.testing.assert_close(log_probs.grad, torch.tensor([gradient], dtype=F64))
    assert float(found.stats.clipped) == 1


# --- norms of the clipping bias, and what the normalization scales ---

# token ratios 2, 1/2 and 3, 1, 1/2 with these advantages clip c = 2, -1/2 of two tokens, and 3, -2 of three
BIAS_RATIOS = torch.tensor([[2.0, 0.5, 1.0], [3.0, 1.0, 0.5]], dtype=F64)
BIAS_ADVANTAGES = torch.tensor([[1.0, -1.0, 9.0], [1.0, 1.0, -4.0]], dtype=F64)
BIAS_MASK = torch.tensor([[True, True, False], [True, True, True]])
SCALE = torch.tensor([[0.5, 1.0, 1.0], [0.1, 1.0, 0.2]], dtype=F64)
NORMS = {
    "scalar": ((2 - 0.5) / 2 + (3 - 2) / 3) / 2,
    "token": math.sqrt(4 + 0.25 + 9 + 4),
    "rms": math.sqrt((4 + 0.25 + 9 + 4) / 5),
    "logit": math.sqrt((2 * 0.5) ** 2 + 0.5**2 + (3 * 0.1) ** 2 + (2 * 0.2) ** 2),
}


def bias(scale: Tensor | None = SCALE) -> LossStats:
    tensors = (BIAS_RATIOS.log(), torch.zeros(2, 3, dtype=F64), BIAS_ADVANTAGES, BIAS_MASK)
    return policy_loss(*tensors, torch.zeros(2, 3).long(), ratio_level="token", logit_scale=scale).stats


def test_norms_by_hand() -> None:
    assert bias().norms() == pytest.approx(NORMS, abs=1e-12)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("delta", [0.4, 1.0, 100.0])
def test_scales_of_both_targets(name: str, delta: float) -> None:
    """Up to the threshold steps are whole; the paper's threshold is 1."""
    f = delta / max(NORMS[name], delta)

    def scales(target: str) -> tuple[float, float, float, float]:
        result = normalization(bias(), norm=name, target=target, delta=delta)
        return result.grad_scale, result.update_scale, result.factor, result.norm

    assert scales("gradient") == pytest.approx((f, 1.0, f, NORMS[name]))
    assert scales("update") == pytest.approx((1.0, f, f, NORMS[name]))


def test_mistakes_in_a_norm_or_a_threshold() -> None:
    with pytest.raises(ValueError, match=r"unknown clip_bias_norm 'tokens'.*Did you mean 'token'\?"):
        normalization(bias(), norm="tokens")
    with pytest.raises(ValueError, match=r"unknown target 'updates'.*Did you mean 'update'\?"):
        normalization(bias(), target="updates")
    with pytest.raises(ValueError, match="must be positive, not -1"):
        normalization(bias(), delta=-1.0)
    without = bias(scale=None)
    assert set(without.norms()) == {"scalar", "token", "rms"}
    with pytest.raises(ValueError, match=r"needs policy_loss\(..., logit_scale=...\)"):
        without.norm("logit")
