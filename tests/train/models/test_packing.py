"""Packed rows: the log-probabilities and gradients of padded ones, for each architecture that can be packed."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel

from sorl_train.models import packing
from sorl_train.models.forward import action_stats
from sorl_train.models.policy import Critic
from sorl_train.rollout.kv_cache import RowCache, feed
from sorl_train.rollout.model_check import try_packing, try_packing_critic

from ..rollout.architectures import EXACT, MORE_EXACT, NEW, build

PADDED_ONLY = {
    "gpt_oss": ["it has 'eager' attention"],  # attention sinks
    # capped scores; transformers says the first or the second
    "gemma2": ["it has 'eager' attention", "softcap"],
    "llama4, chunks": ["would differ"],  # chunks are in the mask alone
}


def rows(vocabulary: int = 97) -> tuple[Tensor, Tensor]:
    """Two groups of shared prompts, a shared turn, lone rows, observations, a row without loss tokens, padding."""
    draws = torch.Generator().manual_seed(0)
    token_ids = torch.randint(3, vocabulary, (8, 41), generator=draws)
    token_ids[1:3, :13] = token_ids[0, :13]
    token_ids[2, :23] = token_ids[1, :23]
    token_ids[4, :6] = token_ids[3, :6]
    mask = torch.zeros(8, 40, dtype=torch.bool)
    for row, (start, stop) in enumerate([(12, 20), (12, 38), (12, 25), (5, 30), (5, 9), (0, 11), (30, 40)]):
        mask[row, start:stop] = True
        mask[row, start + 2 : start + 4] = False  # an observation
        token_ids[row, stop + 1 :] = 0
    return token_ids, mask


def both(model: Any, token_ids: Tensor, mask: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probabilities and entropies, and the gradients of a sum of them with unequal weights."""
    model.zero_grad()
    found = action_stats(model, token_ids, mask, entropy=True, temperature=0.7)
    assert found.entropy is not None
    weights = torch.linspace(-1.0, 2.0, mask.numel(), device=mask.device).view(mask.shape)
    ((found.log_probs + 0.3 * found.entropy) * weights).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [found.log_probs.detach(), found.entropy.detach()], gradients


def assert_same(model: Any) -> None:
    token_ids, mask = rows()
    model.set_attn_implementation("sdpa")
    values, gradients = both(model, token_ids, mask)
    packing.enable_packing(model)
    packed, packed_gradients = both(model, token_ids, mask)
    torch.testing.assert_close(packed, values, atol=1e-5, rtol=1e-5)
    scale = max(float(g.abs().max()) for g in gradients)
    torch.testing.assert_close(packed_gradients, gradients, atol=1e-5 * scale, rtol=1e-5)


def decoding(model: Any) -> list[Tensor]:
    """Logits of two rows in the sampler's cache: of their prompts, of one token, and of a reply."""
    cache = RowCache(model, 2, torch.float32, 64)
    fed = ([[5, 6, 7, 8], [9, 10]], [[11], [12]], [[13, 14], [15]])
    return [feed(model, cache, slice(0, 2), tokens) for tokens in fed]


@pytest.mark.parametrize("name", EXACT)
def test_packed_rows_compute_what_padded_ones_do(name: str) -> None:
    """In the trainer, and through the sampler's cache: prefill and decoding of two rows, which may share keys."""
    model = build(*EXACT[name])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "`past_key_values` is deprecated")
        before, decoded = model.config._attn_implementation, decoding(model)
    why = try_packing(model, 256)
    if name in PADDED_ONLY:
        assert why is not None and any(reason in why for reason in PADDED_ONLY[name])
        assert model.config._attn_implementation == before and not packing.uses_packing(model)
    else:
        assert why is None
        torch.testing.assert_close(decoding(model), decoded, atol=1e-5, rtol=1e-5)
        assert_same(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_EXACT)
def test_more_models_are_packed_exactly_or_not_at_all(name: str) -> None:
    model = build(*MORE_EXACT[name])
    if try_packing(model, 256) is None:
        assert_same(model)


def test_a_model_keeps_its_attention_where_the_sampler_would_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decoding has an attention of its own, which the trainer's packed rows say nothing about."""
    model = build(*EXACT[next(name for name in EXACT if name not in PADDED_ONLY)])
    one_token = packing._one_token
    monkeypatch.setattr(packing, "_one_token", lambda *args: one_token(*args) * 1.01)
    why = try_packing(model, 256, sampled=True)
    assert why is not None and "log-probabilities would differ" in why and not packing.uses_packing(model)
    monkeypatch.undo()
    assert try_packing(model, 256, sampled=True) is None and packing.uses_packing(model)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "phi3, window", "llama4, chunks"])
def test_a_critic_on_packed_rows_gives_the_same_values(name: str) -> None:
    model_type, settings = EXACT[name]
    critic = Critic(AutoModel.from_config(build(model_type, settings).config, dtype=torch.float32)).eval()
    torch.nn.init.normal_(critic.head.weight, std=0.5, generator=torch.Generator().manual_seed(0))
    before = critic.backbone.config._attn_implementation
    why = try_packing_critic(critic, 256)
    assert (why is None) == (name not in PADDED_ONLY) == packing.uses_packing(critic.backbone)
    token_ids, mask = rows()

    def values_and_gradients() -> tuple[Tensor, list[Tensor]]:
        critic.zero_grad()
        values = critic(token_ids, mask)
        (values * torch.linspace(-1.0, 2.0, mask.numel()).view(mask.shape)).sum().backward()
        return values.detach(), [p.grad.clone() for p in critic.parameters() if p.grad is not None]

    packed, packed_gradients = values_and_gradients()
    critic.backbone.set_attn_implementation(before)
    values, gradients = values_and_gradients()
    assert not values[~mask].any() and values[mask].all()
    torch.testing.assert_close(packed, values, atol=1e-5, rtol=1e-5)
    scale = max(float(g.abs().max()) for g in gradients)
    for one, other in zip(packed_gradients, gradients, strict=True):
        assert float((one - other).abs().max()) <= 1e-5 * scale


def test_the_layout_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows share a prompt of two tokens. What follows a last scored token is left out, as is a row without one."""
    monkeypatch.setattr(packing, "WORTH_A_BRANCH", 2)
    token_ids = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 3, 0, 0], [4, 4, 4, 4, 4]])
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    packed = packing.pack(token_ids, mask)
    assert packed is not None
    prompt, own = packed.blocks
    assert prompt.queries.tolist() == prompt.keys.tolist() == [[0, 1]] and prompt.begins.tolist() == [0]
    assert own.queries.tolist() == [[2]] and own.keys.tolist() == [[0, 1, 2]]
    assert own.begins.tolist() == [2]
    # the state of 6 scores both first tokens, that of 7 the 8
    assert packed.token_ids.tolist() == [[5, 6, 7]]
    assert packed.positions.tolist() == [[0, 1, 2]]
    assert packed.where.tolist() == [[0, 1, 2, 0], [0, 1, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("worth", [1, 3, 8])
def test_trees_of_any_shape(worth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows over two tokens branch anywhere, end inside of one another, and are equal; each finds all of its tokens."""
    monkeypatch.setattr(packing, "WORTH_A_BRANCH", worth)
    draws = torch.Generator().manual_seed(worth)
    model = build("llama", NEW)
    assert try_packing(model, 256) is None
    saved = 0
    for _ in range(40):
        token_ids = torch.randint(3, 5, (9, 14), generator=draws)
        token_ids[torch.rand(9, generator=draws) < 0.5, : int(torch.randint(0, 14, (), generator=draws))] = 3
        mask = torch.rand(9, 13, generator=draws) < 0.3
        packed = packing.pack(token_ids, mask)
        if packed is None:
            continue
        ends = [int(row.nonzero()[-1, 0]) + 1 if row.any() else 0 for row in mask]
        for row, end in enumerate(ends):
            places = packed.where[row, :end]
            assert packed.token_ids[0, places].tolist() == token_ids[row, :end].tolist()
            assert packed.positions[0, places].tolist() == list(range(end))
        prefixes = {
            tuple(token_ids[row, :stop].tolist())
            for row, end in enumerate(ends)
            for stop in range(1, end + 1)
        }
        assert len(prefixes) <= packed.token_ids.numel() <= sum(ends)
        assert worth > 1 or packed.token_ids.numel() == len(prefixes)  # nothing is computed twice
        saved += sum(ends) - packed.token_ids.numel()
    assert saved > 500
    values, gradients = both(model, token_ids, mask)
    model.set_attn_implementation("sdpa")
    padded, padded_gradients = both(model, token_ids, mask)
    torch.testing.assert_close(values, padded, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients, padded_gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("extra", [{"softcap": 50.0}, {"s_aux": torch.zeros(2)}, {"dropout": 0.1}])
def test_an_attention_that_packed_rows_do_not_know_is_refused(extra: dict[str, Any]) -> None:
    """A model that asks for it keeps padded rows, as ``try_packing`` takes the error for an answer."""
    token_ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]])
    packed = packing.pack(token_ids, torch.tensor([[0, 0, 1], [0, 0, 1]], dtype=torch.bool))
    assert packed is not None
    heads = torch.zeros(1, 2, packed.token_ids.shape[1], 4)
    packing.attention(
        None, heads, heads, heads, None, packed=packed, scaling=0.5, sliding_window=None, softcap=None
    )
    with pytest.raises(TypeError, match=next(iter(extra))):
        packing.attention(None, heads, heads, heads, None, packed=packed, **extra)


def test_rows_that_would_gain_nothing_stay_padded() -> None:
    token_ids = torch.arange(30).view(3, 10)
    mask = torch.zeros(3, 9, dtype=torch.bool)
    assert packing.pack(token_ids, mask) is None  # nothing to score
    mask[:, 4:] = True
    assert packing.pack(token_ids, mask) is None
    assert packing.pack(token_ids[:, :10].repeat(2, 1), mask.repeat(2, 1)) is not None  # shared prompts


def test_gradient_checkpointing_sees_the_same_rows() -> None:
    model = build("llama", NEW)
    assert try_packing(model, 256) is None
    token_ids, mask = rows()
    model.train()
    _, gradients = both(model, token_ids, mask)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    _, again = both(model, token_ids, mask)
    torch.testing.assert_close(again, gradients, atol=1e-6, rtol=1e-5)


def test_the_saved_model_does_not_know_of_it(tmp_path: Path) -> None:
    model = build("llama", NEW)
    assert try_packing(model, 256) is None
    model.save_pretrained(tmp_path)
    assert packing.PACKED not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"


# --- on a GPU: one row with the mask of a tree ---


def grouped(rows: int, length: int, group: int) -> packing.Packed:
    """Groups that share a third of their tokens, and half of each group a half, with ends of their own."""
    draws = torch.Generator().manual_seed(length)
    token_ids = torch.randint(3, 97, (rows, length), generator=draws)
    for first in range(0, rows, group):
        token_ids[first : first + group, : length // 3] = token_ids[first, : length // 3].clone()
        token_ids[first : first + group // 2, : length // 2] = token_ids[first, : length // 2].clone()
    mask = torch.zeros(rows, length - 1, dtype=torch.bool)
    mask[:, length // 4 :] = True
    for row in mask:
        row[length - 1 - int(torch.randint(0, length // 4, (), generator=draws)) :] = False
    packed = packing.pack(token_ids, mask)
    assert packed is not None
    return packed


def heads(packed: packing.Packed) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of four heads, and keys and values of two, as of Qwen's shared heads."""
    draws, tokens = torch.Generator().manual_seed(1), packed.token_ids.shape[1]
    query, key, value = (torch.randn(1, count, tokens, 16, generator=draws) for count in (4, 2, 2))
    return query, key, value


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 7, 150])
@pytest.mark.parametrize(("rows", "length", "group"), [(8, 41, 4), (8, 300, 4), (16, 200, 8), (4, 700, 4)])
def test_a_tree_in_one_row_is_what_the_blocks_are(
    rows: int, length: int, group: int, window: int | None
) -> None:
    packed = grouped(rows, length, group)
    query, key, value = heads(packed)
    blocks, _ = packing.attention(
        None, query, key, value, None, packed=packed, scaling=0.3, sliding_window=window
    )
    tree = packing.tree_attention(packed, query, key, value, window, 0.3)
    torch.testing.assert_close(tree.transpose(1, 2), blocks, atol=1e-5, rtol=1e-5)
    assert len({len(part.queries) for part in packed.blocks}) > 1 or len(packed.blocks) > 2


@pytest.mark.parametrize("window", [None, 40])
def test_the_list_of_blocks_leaves_no_pair_out(window: int | None) -> None:
    """What the compiled kernel computes: all of a whole block, what the mask says of a partial one, nothing else."""
    packed = grouped(8, 300, 4)
    tokens = packed.token_ids.shape[1]
    made = packing._block_mask(packed.until, packed.positions[0], window)
    places = torch.arange(tokens)
    sees = made.mask_mod(torch.tensor(0), torch.tensor(0), places[:, None], places[None])
    full = torch.zeros(tokens, tokens, dtype=torch.bool)
    partial = full.clone()
    assert made.full_kv_num_blocks is not None and made.full_kv_indices is not None
    lists = (
        (made.full_kv_num_blocks, made.full_kv_indices, full),
        (made.kv_num_blocks, made.kv_indices, partial),
    )
    for counts, indices, where in lists:
        for block, count in enumerate(counts[0, 0].tolist()):
            for other in indices[0, 0, block, :count].tolist():
                one, two = (slice(128 * number, 128 * number + 128) for number in (block, other))
                where[one, two] = True
    assert not (full & partial).any() and (full.any() or window is not None)
    assert sees[full].all() and not sees[~(full | partial)].any()
    kept = [value for value in made.as_tuple() if isinstance(value, Tensor)]
    assert (
        sum(value.nbytes for value in kept) <= 32 * len(made.kv_num_blocks[0, 0]) ** 2 + 32 * 12
    )  # the plan's formula
    parts = [packed.until, *(part for block in packed.blocks for part in vars(block).values())]
    # nothing grows with pairs of tokens
    assert max(value.numel() for value in (*kept, *parts)) <= 8 * 300 + 300


@pytest.mark.slow
def test_the_compiled_kernel_computes_the_same() -> None:
    packed = grouped(8, 300, 4)
    query, key, value = heads(packed)
    blocks, _ = packing.attention(None, query, key, value, None, packed=packed, scaling=0.3)
    compiled = torch.compile(
        packing.flex_attention, dynamic=False
    )  # the CPU's compiler fails with dynamic sizes
    tree = packing.tree_attention(packed, query, key, value, None, 0.3, compiled)
    torch.testing.assert_close(tree.transpose(1, 2), blocks, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["llama", "phi3, window"])
def test_packed_rows_on_a_gpu(name: str) -> None:
    model = build(*EXACT[name]).cuda()
    assert try_packing(model, 256) is None
    token_ids, mask = (tensor.cuda() for tensor in rows())
    packed, packed_gradients = both(model, token_ids, mask)
    model.set_attn_implementation("sdpa")
    values, gradients = both(model, token_ids, mask)
    torch.testing.assert_close(packed, values, atol=1e-4, rtol=1e-4)
    scale = max(float(g.abs().max()) for g in gradients)
    torch.testing.assert_close(packed_gradients, gradients, atol=1e-4 * scale, rtol=1e-4)


@pytest.mark.parametrize("layers", [1, 4])
def test_all_layers_keep_one_mask(layers: int) -> None:
    """Autograd keeps each layer's mask until the backward pass, so one for each would grow with the layers."""
    model = build("llama", {**NEW, "num_hidden_layers": layers})
    assert try_packing(model, 512) is None
    packed = grouped(8, 100, 4)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**packing.inputs(packed))
    masks = {mask.untyped_storage().data_ptr(): mask.nbytes for mask in packed.masks.values()}
    found = [tensor for tensor in kept if tensor.untyped_storage().data_ptr() in masks]
    with_beginning = [block for block in packed.blocks if block.begins.any()]
    assert len(masks) == len(with_beginning) and len(found) == layers * len(masks)
    shared = model.config.num_attention_heads // model.config.num_key_value_heads
    assert sum(masks.values()) <= 8 * 100**2 * 4 * shared  # the plan's formula
