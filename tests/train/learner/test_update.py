"""Optimizer steps: what reaches the gradient, and what does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.rollout import RolloutJob
from sorl_env.trajectory import StopReason, Trajectory
from sorl_train.config.seeds import generator
from sorl_train.config.settings import TrainConfig
from sorl_train.learner.advantages import estimate_advantages
from sorl_train.learner.backend import TorchBackend
from sorl_train.learner.batch import Batch, collate
from sorl_train.learner.optimizer_step import Means, NonFiniteError
from sorl_train.learner.update import CriticUpdate, PolicyUpdate
from sorl_train.learner.update_settings import learning_rate, mini_batches, steps_of_batch
from sorl_train.models import packing
from sorl_train.models.forward import action_stats
from sorl_train.models.packing import enable_packing
from sorl_train.models.policy import load_critic, load_policy, load_tokenizer

from ..conftest import short_config, weights_of
from ..rollout.test_sampler import roll
from .test_batch import trajectory


def off_policy(batch: Batch, seed: int = 0, spread: float = 0.4) -> Batch:
    """Old log-probabilities away from the current ones and random advantages: much is clipped."""
    noise = torch.Generator().manual_seed(seed)
    shape = batch.rollout_log_probs.shape
    drift = torch.randn((shape[0], 1), generator=noise) + 0.3 * torch.randn(shape, generator=noise)
    old = batch.rollout_log_probs + spread * drift
    advantages = torch.randn(old.shape, generator=noise) * batch.action_mask
    return batch.with_fields(old_log_probs=old * batch.action_mask, advantages=advantages)


def step(
    folder: str, batch: Batch, config: TrainConfig, optimizer: str = "sgd", packed: bool = False
) -> tuple[Any, dict[str, float]]:
    """Parameters after one optimizer step, and its metrics."""
    model = load_policy(folder, config.hardware.device)
    if packed:
        enable_packing(model)
    kind = torch.optim.SGD if optimizer == "sgd" else torch.optim.AdamW
    update = PolicyUpdate(TorchBackend(model, kind(model.parameters(), lr=0.1)), config)
    means = Means()
    update.step(batch, 0.1, means)
    return weights_of(model), means.result()


@pytest.mark.parametrize(("norm", "target"), [("rms", "update"), ("logit", "gradient")])
def test_micro_batches_do_not_matter(
    norm: str, target: str, tiny_folder: str, trajectories: list[Trajectory]
) -> None:
    batch = off_policy(collate(trajectories))
    options = {"loss.clip_bias_norm": norm, "loss.clip_bias_target": target, "loss.clip_bias_delta": 1e-3}
    whole, one = step(tiny_folder, batch, short_config(**options, **{"update.micro_batch_size": 8}))
    pieces, many = step(tiny_folder, batch, short_config(**options, **{"update.micro_batch_size": 3}))
    torch.testing.assert_close(whole, pieces, atol=1e-6, rtol=1e-5)
    assert one["loss/normalizer"] == pytest.approx(many["loss/normalizer"], rel=1e-5)
    assert one["loss/normalizer"] != 1.0
    assert one["loss/clip_frac"] > 0.1


class Counting(TorchBackend):
    """Counts backward passes."""

    backwards = 0

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        self.backwards += 1
        super().backward(loss, last)


@pytest.mark.parametrize(
    ("micro_batches", "options", "expected"),
    [
        ([], {}, 4),
        ([1, 2], {}, 2),
        ([1, 2], {"loss.entropy_coef": 0.01}, 4),  # the entropy has a gradient without advantages
        ([0, 1, 2, 3], {}, 0),  # Adam gets zeros, so that its moments decay
    ],
)
def test_the_backward_pass_of_micro_batches_without_advantages_is_left_out(
    micro_batches: list[int],
    options: dict[str, Any],
    expected: int,
    tiny_folder: str,
    trajectories: list[Trajectory],
) -> None:
    """Weights and figures are the same to the bit: what is left out is zero."""
    config = short_config(**options, **{"update.micro_batch_size": 2})
    batch = off_policy(collate(trajectories))
    assert batch.advantages is not None
    for number, (rows, _) in enumerate(batch.micro_batches(2)):
        if number in micro_batches:
            batch.advantages[rows] = 0.0
    found = []
    for always in (True, False):
        model = load_policy(tiny_folder, "cpu")
        backend = Counting(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        backend.always_backward = always
        update, means = PolicyUpdate(backend, config), Means()
        for _ in range(2):
            update.step(batch, 0.01, means)
        assert backend.backwards == 2 * (4 if always else expected)
        found.append((weights_of(model), means.result()))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("size", [8, 3])
def test_packed_rows_take_the_same_step(
    size: int, tiny_folder: str, minihop_env: ToolUseEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of four rollouts, whose prompts are shared: in padded rows whole, and packed in micro-batches."""
    packs: list[bool] = []
    packing_pack = packing.pack
    monkeypatch.setattr(packing, "pack", lambda *args: packs.append(True) or packing_pack(*args))
    jobs = [RolloutJob(f"g{i}/{j}", f"g{i}", i, seed=100 * i + j) for i in range(2) for j in range(4)]
    found, _ = roll(minihop_env, load_policy(tiny_folder), load_tokenizer(tiny_folder), jobs, 16)
    batch = off_policy(collate(found))
    options = {"loss.clip_bias_norm": "logit", "loss.clip_bias_delta": 1e-3}
    padded, one = step(tiny_folder, batch, short_config(**options, **{"update.micro_batch_size": 8}))
    assert not packs
    packed, other = step(
        tiny_folder, batch, short_config(**options, **{"update.micro_batch_size": size}), packed=True
    )
    assert len(packs) == 8 // size + bool(8 % size)
    torch.testing.assert_close(packed, padded, atol=1e-6, rtol=1e-5)
    for name in ("loss/normalizer", "loss/policy", "loss/entropy", "loss/grad_norm", "loss/clip_frac"):
        assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-7)


def test_targets_agree_under_sgd_and_differ_under_adam(
    tiny_folder: str, trajectories: list[Trajectory]
) -> None:
    """With plain SGD scaling the gradient is scaling the step; Adam divides a constant scale out again."""
    batch = off_policy(collate(trajectories))
    results = {}
    for target in ("gradient", "update"):
        options = {
            "loss.clip_bias_target": target,
            "loss.clip_bias_delta": 0.01,
        }
        config = short_config(**options, **{"optim.max_grad_norm": None})
        results[target] = [step(tiny_folder, batch, config, kind)[0] for kind in ("sgd", "adam")]
    torch.testing.assert_close(results["gradient"][0], results["update"][0], atol=1e-7, rtol=1e-5)
    assert (results["gradient"][1] - results["update"][1]).abs().max() > 0.01


def test_normalization_comes_before_gradient_clipping(
    tiny_folder: str, trajectories: list[Trajectory]
) -> None:
    """A gradient of norm 5 that is normalized by 1/100 passes a limit of 1 unclipped."""
    batch = off_policy(collate(trajectories), spread=2.0)
    base = {"loss.clip_bias_target": "gradient", "loss.clip_bias_norm": "token", "loss.clip_bias_delta": 1.0}
    free, metrics = step(tiny_folder, batch, short_config(**base, **{"optim.max_grad_norm": None}))
    limit = metrics["loss/grad_norm"] / 50
    clipped_later, _ = step(tiny_folder, batch, short_config(**base, **{"optim.max_grad_norm": limit}))
    assert metrics["loss/normalizer"] <= 0.01
    torch.testing.assert_close(free, clipped_later)


@pytest.mark.parametrize("skip", [False, True])
def test_a_mini_batch_without_advantages_moves_nothing_if_asked(
    skip: bool, tiny_folder: str, trajectories: list[Trajectory]
) -> None:
    """Adam's momentum of the step before goes on by itself."""
    config = short_config(**{"update.skip_without_signal": skip, "optim.max_grad_norm": None})
    model = load_policy(tiny_folder, config.hardware.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    update = PolicyUpdate(TorchBackend(model, optimizer), config)
    batch = off_policy(collate(trajectories))
    means = Means()
    update.step(batch, 1e-3, means)
    before = weights_of(model)
    silent = Means()
    update.step(batch.with_fields(advantages=torch.zeros_like(batch.rollout_log_probs)), 1e-3, silent)
    after = weights_of(model)
    assert torch.equal(before, after) == skip
    assert silent.result()["loss/signal_frac"] == 0.0 < means.result()["loss/signal_frac"]


def test_a_teacher_alone_moves_each_token_by_its_log_ratio(
    tiny_folder: str, trajectories: list[Trajectory]
) -> None:
    """The reverse KL's gradient is the mean over tokens of (log p - log q) d log p; rewards have no part in it, and a
    trust region, which skips mini-batches without advantages, takes the step. Its scale grows, too."""
    options = {"loss.kl_in": "alone", "loss.kl_coef": 1.0, "loss.kl_type": "k2", "optim.max_grad_norm": None}
    options |= {"loss.aggregation": "token_mean", "update.trust_kl": 1.0, "update.trust_max_scale": 2.0}
    config = short_config(**options)
    batch = collate(trajectories)
    teacher = torch.randn(batch.rollout_log_probs.shape, generator=torch.Generator().manual_seed(1)) - 3.0
    batch = batch.with_fields(ref_log_probs=teacher * batch.action_mask)
    batch = estimate_advantages(batch, config.algorithm.advantage, config.loss)
    assert batch.advantages is not None and not batch.advantages.any()

    model = load_policy(tiny_folder, "cpu")
    before, mask = weights_of(model), batch.loss_mask
    found = action_stats(model, batch.token_ids, mask, temperature=1.0).log_probs
    ((found.detach() - teacher) * found)[mask].mean().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    update = PolicyUpdate(TorchBackend(model, torch.optim.SGD(model.parameters(), lr=0.1)), config)
    model.zero_grad()
    update.begin_batch()
    means = Means()
    batch = batch.with_fields(old_log_probs=found.detach())
    update.step(batch, 0.1, means)
    torch.testing.assert_close(before - weights_of(model), 0.1 * gradient, atol=1e-6, rtol=1e-4)
    assert float(gradient.norm()) > 0.1
    update.end_batch(batch, means)
    assert update.trust is not None and update.trust.scale > 1.0


def test_a_mini_batch_without_loss_tokens_does_not_move_the_critic(
    tiny_folder: str, trajectories: list[Trajectory]
) -> None:
    """Its gradient is zero, but Adam would follow the momentum of the steps before; the optimizer is left as it is."""
    critic = load_critic(tiny_folder, "cpu")
    optimizer = torch.optim.AdamW(critic.parameters(), lr=0.01)
    update, means = CriticUpdate(TorchBackend(critic, optimizer), short_config()), Means()
    batch = collate(trajectories).with_fields(
        returns=torch.ones_like(collate(trajectories).rollout_log_probs)
    )

    def state() -> tuple[torch.Tensor, torch.Tensor]:
        moments = [value.flatten() for s in optimizer.state.values() for value in s.values()]
        return weights_of(critic), torch.cat(moments)

    update.step(batch, 0.01, means)
    before = state()
    update.step(batch.with_fields(loss_mask=torch.zeros_like(batch.loss_mask)), 0.01, means)
    assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    update.step(batch, 0.01, means)
    assert not torch.equal(before[0], state()[0])


def test_the_target_kl_is_measured_from_the_weights_that_began_the_batch(
    tiny_folder: str, trajectories: list[Trajectory]
) -> None:
    """The distance that an update went does not depend on how old its batch is."""
    config = short_config(**{"update.target_kl": 0.02})
    model = load_policy(tiny_folder, config.hardware.device)
    batch = off_policy(collate(trajectories))
    now = action_stats(model, batch.token_ids, batch.action_mask, temperature=1.0).log_probs.detach()

    def is_past(batch: Batch, settings: TrainConfig = config) -> bool:
        update = PolicyUpdate(TorchBackend(model, torch.optim.SGD(model.parameters(), lr=0.0)), settings)
        update.step(batch, 0.0, Means())
        return update.past_target_kl

    assert is_past(batch)  # the old log-probabilities are those of the weights that began it
    assert not is_past(batch, short_config())  # off by default
    assert not is_past(batch.with_fields(start_log_probs=now))
    assert is_past(batch.with_fields(old_log_probs=now, start_log_probs=now + 0.3))


def test_excluded_trajectories_leave_no_trace(tiny_folder: str, trajectories: list[Trajectory]) -> None:
    """A batch with tool outages in it gives the gradient of the batch without them."""
    broken = [
        dataclasses.replace(t, stop_reason=StopReason.ERROR, id=f"{t.id}-out") for t in trajectories[:3]
    ]
    clean, mixed = collate(trajectories), collate([*broken, *trajectories])
    assert mixed.included.tolist() == [False] * 3 + [True] * 8
    config = short_config(**{"update.micro_batch_size": 16})
    expected, _ = step(tiny_folder, off_policy(clean), config)
    filled = off_policy(clean)
    assert filled.old_log_probs is not None and filled.advantages is not None
    width = mixed.action_mask.shape[1]
    old, advantages = torch.full((11, width), -3.0), torch.full((11, width), 100.0)
    old[3:, : filled.old_log_probs.shape[1]] = filled.old_log_probs
    advantages[3:, : filled.advantages.shape[1]] = filled.advantages
    actual, _ = step(tiny_folder, mixed.with_fields(old_log_probs=old, advantages=advantages), config)
    torch.testing.assert_close(actual, expected, atol=1e-7, rtol=1e-6)


def test_non_finite_loss_names_its_trajectories(tiny_folder: str, trajectories: list[Trajectory]) -> None:
    batch = off_policy(collate(trajectories))
    assert batch.advantages is not None
    advantages = batch.advantages.clone()
    advantages[2][batch.action_mask[2]] = float("nan")
    config = short_config(**{"update.micro_batch_size": 1})
    with pytest.raises(NonFiniteError) as caught:
        step(tiny_folder, batch.with_fields(advantages=advantages), config)
    assert caught.value.trajectory_ids == (batch.ids[2],)


def test_learning_rate_schedule() -> None:
    optim = dataclasses.replace(short_config().optim, schedule="constant")
    rates = [learning_rate(optim, 1.0, 0.25, i, 8) for i in range(8)]
    assert rates == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    linear = dataclasses.replace(optim, schedule="linear")
    assert [learning_rate(linear, 1.0, 0.0, i, 4) for i in range(4)] == [1.0, 0.75, 0.5, 0.25]
    cosine = dataclasses.replace(optim, schedule="cosine")
    assert learning_rate(cosine, 1.0, 0.0, 2, 4) == pytest.approx(0.5)


WHOLE = collate([trajectory(f"t{n}", [1, 2, 3], [-1, 0, 0], [1.0]) for n in range(32)])


@pytest.mark.parametrize("size", [4, 8, 32])
@pytest.mark.parametrize("epochs", [1, 2])
def test_what_exclusions_leave_is_spread_evenly(size: int, epochs: int) -> None:
    """For every number of trajectories that may be left: all once an epoch, in as few mini-batches as hold them, whose
    sizes differ by one at most; none is a remainder that would take a whole step of Adam for itself."""
    config = short_config(rollout__batch_size=32, update__mini_batch_size=size, update__epochs=epochs)
    for left in range(1, 33):
        batch = WHOLE.rows(list(range(left)))
        minis = list(mini_batches(batch, config, step=3))
        per_epoch, most = len(minis) // epochs, steps_of_batch(32, config.update)
        assert per_epoch == -(-left // size) and len(minis) == per_epoch * epochs <= most
        for epoch in range(epochs):
            part = minis[epoch * per_epoch : (epoch + 1) * per_epoch]
            sizes = [len(mini) for mini in part]
            assert max(sizes) <= size and max(sizes) - min(sizes) <= 1
            assert sorted(name for mini in part for name in mini.ids) == sorted(batch.ids)


def test_a_batch_without_exclusions_is_cut_as_it_always_was() -> None:
    """Consecutive pieces of the seed's order: the bytes of earlier runs depend on it."""
    config = short_config(rollout__batch_size=32, update__mini_batch_size=8, update__epochs=2)
    found = [mini.ids for mini in mini_batches(WHOLE, config, step=5)]
    for epoch in range(2):
        order = generator(config.seed, "mini_batches", 5, epoch).permutation(32)
        for number in range(4):
            expected = tuple(f"t{i}" for i in order[8 * number : 8 * number + 8])
            assert found[4 * epoch + number] == expected
