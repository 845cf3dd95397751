"""The trust region in a plain loop: with weights split over ranks, with LoRA, and over a resume."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sorl_train.learner import trust_region
from sorl_train.learner.trust_region import NoisyKLError, TrustRegion
from sorl_train.models.policy import load_policy

from ...docs.blocks import python_blocks
from ..ranks import spawn_two_ranks

# torch 2.6 runs FSDP2 on GPUs alone
KINDS = ("ddp", "fsdp2") if torch.__version__ >= "2.7" else ("ddp",)
LIMIT, ROWS, LR = 0.01, 64, 0.3  # far too large a rate


def policy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 5))


def mean(values: Tensor) -> float:
    """Over all ranks, which have equally many."""
    total = values.detach().double().mean()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return float(total)


def train_batch(model: Any, optimizer: Any, region: TrustRegion, seed: int, rows: slice) -> list[float]:
    """Four steps of the policy gradient on a batch, of which this rank has the ``rows``; returns what the region did.

    The forward pass before each step is that of its loss, so that weights which FSDP2 has gathered for it are stale
    after a move.
    """
    noise = torch.Generator().manual_seed(seed)
    inputs, advantages = torch.randn(ROWS, 6, generator=noise)[rows], torch.randn(ROWS, generator=noise)[rows]
    actions = torch.randint(5, (ROWS, 1), generator=noise)[rows]

    def log_probs() -> Tensor:
        return model(inputs).log_softmax(-1).gather(1, actions).squeeze(1)

    with torch.no_grad():
        old = log_probs()
    region.begin()
    kls = []
    for _ in range(4):
        new = log_probs()
        while region.step(kl := mean((new - old).square() / 2)):
            new = log_probs()
        kls.append(kl)
        (-((new - old).exp() * advantages).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        while region.end(kl := mean((log_probs() - old).square() / 2)):
            pass
    assert max(*kls, kl) <= LIMIT
    return [region.moves, region.scale, region.largest, *kls, kl]


def trained(kind: str, rows: slice) -> tuple[list[list[float]], list[Tensor]]:
    """What the region did in each of three batches, and the weights after them, whole."""
    model: Any = policy()
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    region = TrustRegion(optimizer, LIMIT, model=model if kind == "fsdp2" else None)
    found = [train_batch(model, optimizer, region, seed, rows) for seed in range(3)]
    if kind == "fsdp2":
        local = [p.to_local().numel() for p in optimizer.param_groups[0]["params"]]
        assert [start.numel() for start in region._start] == local  # copies of its own shards only
        with pytest.raises(ValueError, match="give TrustRegion model="):
            TrustRegion(optimizer, LIMIT).begin()
    assert optimizer.param_groups[0]["lr"] == LR  # scaled for single steps only
    weights = optimizer.param_groups[0]["params"]  # a module of FSDP2 may have gathered ones
    return found, [p.full_tensor() if kind == "fsdp2" else p.detach() for p in weights]


def rank_main(rank: int, folder: str) -> None:
    half = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
    results = {kind: trained(kind, half) for kind in KINDS}
    region = TrustRegion(torch.optim.SGD(policy().parameters()), LIMIT)
    region.begin()
    with pytest.raises(RuntimeError, match="the KL differs between ranks"):
        region.step(0.001 * rank)
    with pytest.raises(NoisyKLError, match="had not moved"):
        region.step(0.006)
    torch.save(results, f"{folder}/{rank}.pt")


def test_two_processes_are_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP and FSDP2, each with half of each batch."""
    spawn_two_ranks(rank_main, tmp_path, monkeypatch)
    wanted, whole = trained("alone", slice(None))
    assert wanted[0][0] >= 1 and wanted[-1][1] < 0.5
    distance = max(float((a - b).abs().max()) for a, b in zip(whole, policy().parameters(), strict=True))
    for rank in range(2):
        for kind, (found, weights) in torch.load(tmp_path / f"{rank}.pt").items():
            for ours, theirs in zip(found, wanted, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-3), kind
            for one, other in zip(weights, whole, strict=True):
                torch.testing.assert_close(one, other, atol=1e-3 * distance, rtol=0)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
def test_a_resume_is_bit_for_bit(kind: Any, tmp_path: Path) -> None:
    def begun() -> tuple[nn.Module, Any, TrustRegion]:
        model = policy()
        optimizer = kind(model.parameters(), lr=30.0 if kind is torch.optim.SGD else LR)
        return model, optimizer, TrustRegion(optimizer, LIMIT)

    straight, killed, resumed = begun(), begun(), begun()
    found = [train_batch(*straight, seed, slice(None)) for seed in range(4)]
    assert [train_batch(*killed, seed, slice(None)) for seed in range(2)] == found[:2]
    torch.save([part.state_dict() for part in killed], tmp_path / "state.pt")
    for part, state in zip(resumed, torch.load(tmp_path / "state.pt", weights_only=True), strict=True):
        part.load_state_dict(state)
    assert [train_batch(*resumed, seed, slice(None)) for seed in range(2, 4)] == found[2:]
    assert found[0][0] >= 1 and found[1][1] < 1.0  # there was something to resume
    for one, other in zip(straight[0].parameters(), resumed[0].parameters(), strict=True):
        assert torch.equal(one, other)


def test_with_lora_only_adapters_are_copied_and_moved(tiny_folder: str) -> None:
    model: Any = get_peft_model(load_policy(tiny_folder), LoraConfig(r=2, target_modules="all-linear"))
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)  # of all parameters
    region = TrustRegion(optimizer, LIMIT)
    ids = torch.randint(10, 90, (4, 12), generator=torch.Generator().manual_seed(0))

    def log_probs() -> Tensor:
        return model(ids[:, :-1]).logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)

    with torch.no_grad():
        old = log_probs()
    region.begin()
    assert len(region._start) == len(adapters) > 0
    log_probs().mean().backward()
    optimizer.step()
    there = [p.detach().clone() for p in adapters]
    kl = (log_probs() - old).square().mean() / 2
    assert kl > LIMIT and region.step(kl)
    share = (LIMIT / 2 / float(kl)) ** 0.5
    for start, far, now in zip(region._start, there, adapters, strict=True):
        torch.testing.assert_close(now, start + share * (far - start))
    while region.end((log_probs() - old).square().mean() / 2):
        pass
    for name, p in model.named_parameters():
        assert p.requires_grad or torch.equal(p, frozen[name])


def test_the_scale_is_that_of_a_step_however_the_rate_is_set() -> None:
    """Whether or not the caller measures again after a move, a new step begins a new excursion."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    region = TrustRegion(optimizer, LIMIT)
    region.begin()
    for rate, scale in ((1.0, 1.0), (2.0, 0.5)):
        before = weight.item()
        optimizer.param_groups[0]["lr"] = rate  # as a schedule does
        weight.grad = torch.ones(1)
        optimizer.step()
        assert weight.item() == pytest.approx(before - rate * scale)
        assert optimizer.param_groups[0]["lr"] == rate
        assert region.step(2 * LIMIT)
        assert region.scale == pytest.approx(scale / 2)


def test_mistakes() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    with pytest.raises(ValueError, match=r"not limit=0\.0, max_scale=1\.0"):
        TrustRegion(optimizer, 0.0)
    with pytest.raises(ValueError, match=r"max_scale=0\.5"):
        TrustRegion(optimizer, LIMIT, 0.5)


def test_the_loop_of_the_documentation() -> None:
    """As plugins.md has it, at a rate of which plain Adam would go far outside."""
    (block,) = (block for block in python_blocks("docs/interop/plugins.md") if "TrustRegion" in block)
    model, inputs, passes = policy(), torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(0)), 0
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)

    class Part:
        def __init__(self) -> None:
            self.old = log_probs(self).detach()

        def mini_batches(self) -> list[Part]:
            return [self] * 3

    def log_probs(_: Any) -> Tensor:
        nonlocal passes
        passes += 1
        return model(inputs).log_softmax(-1)[:, 0]

    given: dict[str, Any] = {"optimizer": optimizer, "batches": [Part()], "log_probs": log_probs}
    exec(block, given | {"loss": lambda new, _: -new.mean()})
    assert passes > 5  # one at the start, three mini-batches, the end, and those after moves
    (batch,) = given["batches"]
    assert 0.0 < float((log_probs(batch) - batch.old).square().mean() / 2) <= LIMIT


def test_the_file_can_be_copied() -> None:
    """It imports the standard library and torch."""
    tree = ast.parse(Path(trust_region.__file__).read_text(encoding="utf-8"))
    names = [a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names]
    names += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in names} <= {"torch", *sys.stdlib_module_names}
