"""A mini-batch cut into micro-batches, or over ranks, is the same mini-batch: gradient and normalizer."""

from __future__ import annotations

import itertools
from dataclasses import astuple, dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sorl_train.learner.diagnostics import RatioDiagnostics, diagnose_ratios
from sorl_train.losses.policy import SURROGATES, LossOutput, LossSettings
from sorl_train.losses.terms import loss_denominator, value_loss

from ..ranks import spawn_two_ranks
from .keywords import policy_loss

LEVELS, MEANS = ("token", "turn", "sequence"), ("trajectory_mean", "token_mean")
SETTINGS = (
    *itertools.product(LEVELS, MEANS, ["clipped"]),
    *itertools.product(["turn"], ["trajectory_mean"], [name for name in SURROGATES if name != "clipped"]),
)


@dataclass(frozen=True)
class Result:
    gradient: Tensor
    norms: dict[str, float]
    loss: float
    metrics: dict[str, float]


def inputs() -> dict[str, Tensor]:
    """Nine trajectories; the third and the last two carry no loss."""
    g = torch.Generator().manual_seed(7)
    rows, columns = 9, 24
    mask = torch.rand(rows, columns, generator=g) < 0.6
    mask[[2, 7, 8]] = False
    return {
        "features": torch.randn(rows, columns, 5, generator=g),
        "old": 0.8 * torch.randn(rows, columns, generator=g),
        "advantages": torch.randn(rows, columns, generator=g),
        "mask": mask,
        "turns": (torch.rand(rows, columns, generator=g) < 0.2).cumsum(1),
        "scale": torch.rand(rows, columns, generator=g),
        "correction": (4 * torch.rand(rows, columns, generator=g)).floor() / 1.5,  # weights of 0 to 2
    }


def micro(
    data: dict[str, Tensor], rows: slice, theta: Tensor, denominator: float, setting: tuple
) -> LossOutput:
    level, aggregation, surrogate = setting
    part = {name: tensor[rows] for name, tensor in data.items()}
    return policy_loss(
        part["features"] @ theta,
        part["old"],
        part["advantages"],
        part["mask"],
        part["turns"],
        ratio_level=level,
        surrogate=SURROGATES[surrogate],
        aggregation=aggregation,
        denominator=denominator,
        logit_scale=part["scale"],
        correction=part["correction"],
    )


def run(
    data: dict[str, Tensor], cuts: list[slice], denominator: float, setting: tuple, reduce: bool = False
) -> Result:
    """What a trainer does: backward for each micro-batch, sums over them and over the ranks."""
    theta = torch.full((5,), 0.3, requires_grad=True)
    outputs = [micro(data, rows, theta, denominator, setting) for rows in cuts]
    for output in outputs:
        output.loss.backward()
    stats = outputs[0].stats
    for output in outputs[1:]:
        stats = stats + output.stats
    loss = sum(output.loss.detach() for output in outputs)
    assert isinstance(loss, Tensor) and theta.grad is not None
    if reduce:
        stats = stats.all_reduce()
        dist.all_reduce(theta.grad)
        dist.all_reduce(loss)
    return Result(theta.grad, stats.norms(), loss.item(), stats.metrics())


def same(result: Result, expected: Result) -> None:
    torch.testing.assert_close(result.gradient, expected.gradient, atol=1e-6, rtol=1e-6)
    assert result.norms == pytest.approx(expected.norms, rel=1e-6, abs=1e-6)
    assert result.loss == pytest.approx(expected.loss, rel=1e-6, abs=1e-6)
    assert result.metrics == pytest.approx(expected.metrics, rel=1e-6, abs=1e-6)


def whole(data: dict[str, Tensor], setting: tuple) -> Result:
    result = run(data, [slice(0, 9)], loss_denominator(data["mask"], setting[1]), setting)
    assert result.gradient.norm() > 0.01 and result.metrics["clip_frac"] > 0.0
    return result


@pytest.mark.parametrize("setting", SETTINGS, ids="-".join)
def test_uneven_micro_batches(setting: tuple) -> None:
    data = inputs()
    cuts = [
        slice(0, 1),
        slice(1, 2),
        slice(2, 3),
        slice(3, 7),
        slice(7, 9),
    ]  # two of them carry no loss at all
    denominators = [loss_denominator(data["mask"][rows], setting[1]) for rows in cuts]
    same(run(data, cuts, sum(denominators), setting), whole(data, setting))


# of two ranks; the last one has no loss token
SHARES = ((slice(0, 3), slice(3, 9)), (slice(0, 7), slice(7, 9)))


def diagnostics(data: dict[str, Tensor], rows: slice) -> RatioDiagnostics:
    part = {name: tensor[rows] for name, tensor in data.items()}
    log_probs, turns = part["features"][..., 0], part["turns"]
    arguments = (log_probs, part["old"], part["advantages"], part["mask"], turns, (turns % 5).to(torch.int8))
    return diagnose_ratios(*arguments, settings=LossSettings("turn"))


def rank_main(rank: int, folder: str) -> None:
    data = inputs()
    cuts = [[slice(0, 2), slice(2, 3)], [slice(3, 4), slice(4, 9)]][rank]
    results = []
    for setting in SETTINGS:
        count = torch.tensor(sum(loss_denominator(data["mask"][rows], setting[1]) for rows in cuts))
        dist.all_reduce(count)
        results.append(run(data, cuts, count.item(), setting, reduce=True))
    torch.save([astuple(result) for result in results], f"{folder}/{rank}.pt")
    diagnosed = [diagnostics(data, shares[rank]).all_reduce().metrics() for shares in SHARES]
    torch.save(diagnosed, f"{folder}/diagnostics_{rank}.pt")


def test_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spawn_two_ranks(rank_main, tmp_path, monkeypatch)
    data = inputs()
    for rank in range(2):
        saved = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for setting, result in zip(SETTINGS, saved, strict=True):
            same(Result(*result), whole(data, setting))
        expected = diagnostics(data, slice(0, 9)).metrics()
        assert {"log_ratio_p01_turn", "ess_sequence", "clip_frac_turn3", "clip_frac_tag"} <= set(expected)
        for found in torch.load(tmp_path / f"diagnostics_{rank}.pt", weights_only=True):
            assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("aggregation", ["trajectory_mean", "token_mean"])
def test_value_loss_in_micro_batches(aggregation: str) -> None:
    data = inputs()
    values = data["old"].clone().requires_grad_()

    def part(rows: slice, denominator: float) -> Tensor:
        return value_loss(
            values[rows],
            data["advantages"][rows],
            data["mask"][rows],
            old_values=data["scale"][rows],
            clip_eps=0.1,
            aggregation=aggregation,
            denominator=denominator,
        )

    count = loss_denominator(data["mask"], aggregation)
    full, parts = part(slice(0, 9), count), [part(slice(0, 2), count), part(slice(2, 9), count)]
    expected = torch.autograd.grad(full, values)[0]
    gradient = torch.autograd.grad(parts[0] + parts[1], values)[0]
    torch.testing.assert_close(gradient, expected, atol=1e-7, rtol=1e-6)
    assert (parts[0] + parts[1]).item() == pytest.approx(full.item(), rel=1e-5)
