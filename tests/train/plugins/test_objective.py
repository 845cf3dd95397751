"""Algorithms as losses for other trainers: turns from a mask, agreement with ``policy_loss``, what it imports."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch

from sorl_train.algorithms import ALGORITHMS, Algorithm
from sorl_train.losses.policy import SURROGATES, ClipRange, LossSettings, policy_loss
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
