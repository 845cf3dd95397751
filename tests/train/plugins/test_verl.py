"""verl 0.9.1: registered through the entry point, ours on random multi-turn batches, and verl's own losses."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed (make test-verl)")
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

from sorl_train.algorithms import ALGORITHMS
from sorl_train.losses.clip_bias import normalization
from sorl_train.losses.policy import SURROGATES, ClipRange, LossSettings, policy_loss
from sorl_train.plugins import verl as plugin
from sorl_train.plugins.objective import objective_of_process, turn_ids_of

from ..losses.keywords import drawn

pytestmark = pytest.mark.verl
F64 = torch.float64
CLIP = ClipRange(0.2, 0.3, 3.0)


def config(**options: Any) -> Any:
    values: dict[str, Any] = {
        "strategy": "fsdp",
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.3,
        "rollout_n": 4,
        "use_dynamic_bsz": True,
    }
    return ActorConfig(**(values | options))


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Six trajectories of several turns, one of them without a loss token, by verl's names."""
    found = drawn(seed, 6, 17, F64)
    names = {"old_log_prob": "old", "log_prob": "log_probs", "advantages": "advantages"}
    mask = found["mask"].long()
    mask[3] = 0
    return {theirs: found[ours] for theirs, ours in names.items()} | {"response_mask": mask}


def loss_of(mode: str, data: dict[str, torch.Tensor], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and gradient of a loss_mode."""
    options = {"config": config(), "loss_agg_mode": "seq-mean-token-mean"} | options
    loss, _ = core_algos.get_policy_loss_fn(mode)(**data, **options)
    (gradient,) = torch.autograd.grad(loss, data["log_prob"])
    return loss, gradient


def test_verl_loads_the_plugin_through_its_entry_point() -> None:
    code = (
        "import verl.trainer.ppo.core_algos as c, sys; "
        "print('sorl_train.plugins.verl' in sys.modules, *sorted(c.POLICY_LOSS_REGISTRY))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert found[0] == "True"
    ours = "ppo turn_ppo s_ppo so_ppo grpo so_grpo topr sorl_gspo sorl_cispo sorl_sapo"
    assert set(ours.split()) <= set(found) and {"vanilla", "gspo", "cispo", "sapo"} <= set(found)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mode", ["so_ppo", "so_grpo", "turn_ppo", "topr", "sorl_gspo"])
def test_the_loss_is_ours(mode: str, seed: int) -> None:
    data = batch(seed)
    name = mode.removeprefix("sorl_")
    row = ALGORITHMS[name]
    mask = data["response_mask"].bool()
    clip = ClipRange(0.2, 0.3) if row.ratio == "sequence" else CLIP
    surrogate = SURROGATES[row.surrogate_name]
    expected = policy_loss(
        data["log_prob"],
        data["old_log_prob"],
        data["advantages"],
        mask,
        turn_ids_of(mask),
        LossSettings(row.ratio, surrogate, clip),
    )
    loss, gradient = loss_of(mode, data)
    torch.testing.assert_close(loss, expected.loss)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.loss, data["log_prob"])[0])
    if row.normalize:
        steps = objective_of_process(algorithm=name, clip=clip).steps
        scale = normalization(expected.stats, norm="rms", delta=0.003).update_scale
        assert steps.scale() == pytest.approx(scale) and scale < 1.0
        steps.clear()


# verl adds 1e-8 to a sequence's number of tokens.
CLOSE: dict[str, Any] = {"atol": 1e-7, "rtol": 1e-6}


@pytest.mark.parametrize("mean", list(plugin._MEANS))
@pytest.mark.parametrize("info", [{}, {"dp_size": 2, "batch_num_tokens": 150, "global_batch_size": 12}])
def test_ppo_is_verls_vanilla_with_every_mean(mean: str, info: dict[str, Any]) -> None:
    data = batch(0)
    weights = torch.rand(6, 17, dtype=F64, generator=torch.Generator().manual_seed(9))
    settings = config()
    settings.global_batch_info.update(info)
    options = {"config": settings, "loss_agg_mode": mean, "rollout_is_weights": weights}
    for ours, theirs in zip(
        loss_of("ppo", data, **options), loss_of("vanilla", data, **options), strict=True
    ):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("name", ["gspo", "sapo"])
def test_what_verl_calls_the_same_is_the_same(name: str) -> None:
    data = batch(1)
    for ours, theirs in zip(loss_of(f"sorl_{name}", data), loss_of(name, data), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_cispo_has_the_same_gradient_without_verls_lower_bound() -> None:
    data, settings = batch(2), config(clip_ratio_low=1.0)
    (ours, one), (theirs, other) = (loss_of(mode, data, config=settings) for mode in ("sorl_cispo", "cispo"))
    torch.testing.assert_close(one, other, **CLOSE)
    assert ours != theirs  # A log w and A log p: a constant
    assert not torch.allclose(loss_of("sorl_cispo", data)[1], loss_of("cispo", data)[1])


def test_the_next_step_is_scaled() -> None:
    data, settings = batch(4), config()
    steps = objective_of_process(algorithm="so_grpo", clip=CLIP).steps
    steps.clear()
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(1)
    core_algos.get_policy_loss_fn("so_grpo")(**data, config=settings)
    scale = steps.scale()
    optimizer.step()
    optimizer.step()  # as a critic's would be
    assert scale < 1.0 and weight.item() == pytest.approx(-scale - 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": config(strategy="megatron")}, "take strategy=fsdp"),
        ({"config": config(), "loss_agg_mode": "token_mean"}, "Did you mean 'token-mean'"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        core_algos.get_policy_loss_fn("so_ppo")(**batch(0), **options)


def test_a_name_of_verls_is_not_taken() -> None:
    with pytest.raises(ValueError, match="verl has a loss_mode 'gspo' already"):
        plugin.register("gspo", "gspo")
