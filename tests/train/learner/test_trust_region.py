"""Steps that leave the trust region are taken back: by how much, from where, and what they leave."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.errors import UserError
from sorl_train.config.settings import TrainConfig
from sorl_train.learner.backend import TorchBackend
from sorl_train.learner.batch import Batch, collate
from sorl_train.learner.optimizer_step import Means, NonFiniteError
from sorl_train.learner.trust_region import (
    GROWTH,
    MOST_MOVES,
    SHRINK,
    TrustRegion,
    final_kl_sample,
)
from sorl_train.learner.update import PolicyUpdate, token_kl
from sorl_train.models.forward import action_stats
from sorl_train.models.policy import load_policy, load_tokenizer

from ..conftest import short_config, weights_of
from ..rollout.test_sampler import roll

LIMIT = 0.01


@pytest.fixture(scope="module")
def batch(tiny_folder: str, minihop_env: ToolUseEnv) -> Batch:
    """Nine trajectories of the policy itself, whose advantages are large and random."""
    rolled = collate(roll(minihop_env, load_policy(tiny_folder), load_tokenizer(tiny_folder), 9)[0])
    old = current(load_policy(tiny_folder), rolled)
    noise = torch.Generator().manual_seed(0)
    advantages = torch.randn(old.shape, generator=noise) * rolled.action_mask
    return rolled.with_fields(old_log_probs=old, advantages=advantages)


@torch.no_grad()
def current(model: Any, batch: Batch) -> Tensor:
    return action_stats(model, batch.token_ids, batch.action_mask, temperature=1.0).log_probs.float()


def config(**more: Any) -> TrainConfig:
    return short_config(**{"update.trust_kl": LIMIT, "optim.max_grad_norm": None, **more})


def update_of(model: Any, settings: TrainConfig, *, sgd: bool = False) -> PolicyUpdate:
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(model.parameters(), lr=1.0)
        if sgd
        else torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0)
    )
    return PolicyUpdate(TorchBackend(model, optimizer), settings)


def train_on(update: PolicyUpdate, minis: list[Batch], look: Batch, lr: float) -> dict[str, float]:
    means = Means()
    update.begin_batch()
    for mini in minis:
        update.step(mini, lr, means)
    update.end_batch(look, means)
    return means.result()


def trust_of(update: PolicyUpdate) -> TrustRegion:
    assert update.trust is not None
    return update.trust


# -- the numbers ------------------------------------------------------------------------------------------------------


def test_token_kl_is_half_the_mean_square_over_the_loss_tokens(batch: Batch) -> None:
    assert batch.old_log_probs is not None
    shifted = batch.old_log_probs + 0.2
    assert token_kl(shifted, batch) == pytest.approx(0.02, rel=1e-5)
    off = shifted.masked_fill(~batch.loss_mask, math.nan)
    assert token_kl(off, batch) == pytest.approx(0.02, rel=1e-5)
    began = batch.with_fields(start_log_probs=batch.old_log_probs + 0.1)
    assert token_kl(shifted, began) == pytest.approx(0.005, rel=1e-4)  # to the weights that began the batch
    assert token_kl(shifted.fill_(math.nan), batch) == math.inf
    assert token_kl(shifted, batch.with_fields(loss_mask=torch.zeros_like(batch.loss_mask))) == 0.0


@pytest.mark.parametrize("kl", [0.011, 0.04, 3.0, math.inf])
def test_going_back_interpolates_and_shrinks_the_scale_once(kl: float) -> None:
    weights = [torch.zeros(3), torch.ones(2, 2)]
    moved = [w.clone() for w in weights]
    trust = TrustRegion(lambda: moved, LIMIT)
    trust.begin()
    for w in moved:
        w += 8.0
    share = math.sqrt(LIMIT / 2 / kl)
    assert trust.step(kl)
    for start, now in zip(weights, moved, strict=True):
        torch.testing.assert_close(now, start + share * 8.0)
    assert trust.scale == min(max(share, SHRINK[0]), SHRINK[1])
    assert trust.step(torch.tensor(kl))
    assert trust.scale == min(max(share, SHRINK[0]), SHRINK[1]) and trust.moves == 2
    moved[0].fill_(math.nan)
    for _ in range(MOST_MOVES - 1):
        assert trust.step(math.nan)
    assert not trust.step(math.inf)  # for the loss to name what is not finite
    assert all(torch.equal(now, start) for start, now in zip(weights, moved, strict=True))


def test_the_scale_grows_by_what_the_batches_of_late_leave_room_for() -> None:
    trust = TrustRegion(list, LIMIT)
    trust.begin()

    def after(kl: float) -> float:
        """What the scale is multiplied by after a batch with this largest KL."""
        before, trust.largest = trust.scale, kl
        assert not trust.end(0.0)
        return trust.scale / before

    trust.scale = 0.01
    assert after(LIMIT / 2 / 1.21) == pytest.approx(1.1)
    assert after(LIMIT / 2 / 1.21) == pytest.approx(1.1)
    assert after(LIMIT * 0.6) == after(LIMIT * 7) == 1.0
    # a batch that hardly moves does not say that the next one will not: .7, .49, .343 of the limit
    assert [after(1e-9) for _ in range(3)] == pytest.approx(
        [1.0, math.sqrt(0.5 / 0.49), math.sqrt(0.5 / 0.343)]
    )
    for _ in range(20):
        after(1e-9)
    assert after(1e-9) == 1.0 == trust.scale  # at its largest
    trust.scale, trust.max_scale = 0.9, 100.0
    assert after(1e-9) == pytest.approx(GROWTH)
    other = TrustRegion(list, LIMIT, 100.0)
    other.load_state_dict(trust.state_dict())
    assert (other.scale, other.recent_max_kl) == (trust.scale, trust.recent_max_kl)


def test_the_last_kl_is_that_of_every_fourth_trajectory_with_loss_tokens() -> None:
    """Rows 0, 4, 8, .. are filtered: every fourth row would see nothing."""
    masks = torch.ones(20, 6, dtype=torch.bool)
    assert final_kl_sample(masks) == [0, 4, 8, 12, 16]
    masks[::4] = False
    assert final_kl_sample(masks) == [1, 6, 11, 17]
    masks[:19] = False
    assert final_kl_sample(masks) == [19]
    assert final_kl_sample(masks[:19]) == []


# -- updates ----------------------------------------------------------------------------------------------------------


def test_small_steps_are_those_without_a_trust_region(tiny_folder: str, batch: Batch) -> None:
    free, held = load_policy(tiny_folder), load_policy(tiny_folder)
    minis = [batch.rows(range(4)), batch.rows(range(4, 9))]
    without = train_on(update_of(free, config(**{"update.trust_kl": None})), minis, batch, 1e-4)
    found = train_on(update_of(held, config()), minis, batch, 1e-4)
    assert torch.equal(weights_of(free), weights_of(held))
    assert {name: value for name, value in found.items() if "trust" not in name} == without
    assert found["loss/trust_moves_back"] == 0.0 and 0 < found["loss/trust_kl"] < LIMIT


def test_the_last_step_is_taken_back_along_its_line(tiny_folder: str, batch: Batch) -> None:
    """One step of plain SGD that goes too far: what stays is a part of it, and its KL is what is reported."""
    model = load_policy(tiny_folder)
    before = weights_of(model)
    update = update_of(model, config(), sgd=True)
    means = Means()
    update.begin_batch()
    update.step(batch, 30.0, means)
    there = weights_of(model)
    kls = [token_kl(current(model, batch), batch)]
    assert kls[0] > LIMIT
    update.end_batch(batch, means)
    share = 1.0
    for kept in torch.linspace(0, 1, 4001):  # the one number that explains all weights
        if torch.allclose(
            weights_of(model),
            torch.lerp(before, there, kept),
            atol=1e-4 * float((there - before).abs().max()),
        ):
            share = float(kept)
            break
    assert 0.0 < share < 1.0
    assert share <= math.sqrt(LIMIT / 2 / kls[0]) + 1e-3
    result = means.result()
    assert token_kl(current(model, batch), batch) == pytest.approx(result["loss/trust_kl"], rel=1e-3)
    assert result["loss/trust_kl"] <= LIMIT < result["loss/trust_kl_max"]
    assert result["loss/trust_scale"] < 1.0 and result["loss/trust_moves_back"] >= 1


@pytest.mark.parametrize(
    ("lr", "algo"),
    [(1e-2, "so_ppo"), (1e4, "so_ppo"), (1.0, "topr")],
)
def test_no_rate_leaves_the_region(lr: float, algo: str, tiny_folder: str, batch: Batch) -> None:
    """Batch after batch at absurd rates: each ends inside the region, and the weights stay finite."""
    model = load_policy(tiny_folder)
    update = update_of(model, config(algo=algo))
    scales = []
    for _ in range(4):
        start = batch.with_fields(old_log_probs=current(model, batch))
        found = train_on(update, [start.rows(range(k, 9, 3)) for k in range(3)], start, lr)
        assert torch.isfinite(weights_of(model)).all()
        assert token_kl(current(model, start), start) <= LIMIT * 1.001
        scales.append(found["loss/trust_scale"])
    assert scales[0] < 1.0 and scales[-1] < min(1.0, 0.1 / lr), scales


def test_weights_that_are_not_finite_go_back_to_where_the_batch_began(tiny_folder: str, batch: Batch) -> None:
    model = load_policy(tiny_folder)
    update = update_of(model, config())
    before, means = weights_of(model), Means()
    update.begin_batch()
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    update.step(batch, 0.0, means)
    assert torch.equal(weights_of(model), before)
    broken = batch.with_fields(advantages=torch.full_like(batch.rollout_log_probs, math.nan))
    with pytest.raises(NonFiniteError, match="the policy loss"):  # no weights help against that
        update.step(broken, 0.0, means)


NOISE = 1e-5  # of bfloat16


@pytest.mark.parametrize(
    ("limit", "stops", "field"),
    [(1.9e-5, True, "old_log_probs"), (1.9e-5, True, "start_log_probs"), (1e-3, False, "old_log_probs")],
)
def test_a_limit_below_the_noise_of_unmoved_weights_ends_the_run(
    limit: float, stops: bool, field: str, tiny_folder: str, batch: Batch
) -> None:
    """Nothing has moved, so nothing is taken back, and the scale does not shrink for what is rounding."""
    assert batch.old_log_probs is not None
    noisy = batch.with_fields(**{field: batch.old_log_probs + math.sqrt(2 * NOISE)})
    model = load_policy(tiny_folder)
    update = update_of(model, config(**{"update.trust_kl": limit}))
    before, trust, means = weights_of(model), trust_of(update), Means()
    update.begin_batch()
    if stops:
        with pytest.raises(
            UserError, match=rf"trust_kl: a limit of {limit:g} .* was 1e-05 .*at least 0.0001"
        ):
            update.step(noisy, 1e-4, means)
    else:
        update.step(noisy, 1e-9, means)
    assert trust.scale == 1.0 and trust.moves == 0 and torch.equal(weights_of(model), before) == stops


def test_noise_also_shows_where_the_first_step_cannot_show_it(tiny_folder: str, batch: Batch) -> None:
    """On policy the first pass gives the old log-probabilities; the last look goes all the way back and finds noise."""
    model = load_policy(tiny_folder)
    update, means = update_of(model, config(**{"update.trust_kl": 1e-6})), Means()
    update.begin_batch()
    assert batch.old_log_probs is not None
    old, _ = update.step(dataclasses.replace(batch, old_log_probs=None), 1e-2, means)
    assert trust_of(update).moves == 0
    with pytest.raises(UserError, match="had not moved"):
        update.end_batch(batch.with_fields(old_log_probs=old + math.sqrt(2 * NOISE)), means)


def test_without_advantages_nothing_moves_and_the_scale_stays(tiny_folder: str, batch: Batch) -> None:
    """Adam would go on from its momentum, and a batch that says nothing must not make the next steps larger."""
    model = load_policy(tiny_folder)
    update = update_of(model, config(**{"update.trust_max_scale": 100.0}))
    silent = batch.with_fields(advantages=torch.zeros_like(batch.rollout_log_probs))
    assert train_on(update, [silent], silent, 1e-6)["loss/trust_scale"] == 1.0
    grown = train_on(update, [batch], batch, 1e-6)["loss/trust_scale"]
    before = weights_of(model)
    assert grown > 1.0 and train_on(update, [silent], silent, 1e-3)["loss/trust_scale"] == grown
    assert torch.equal(weights_of(model), before)
