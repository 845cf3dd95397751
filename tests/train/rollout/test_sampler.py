"""The sampler: the same tokens as plain generation, the same log-probabilities as the trainer, exact ids."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.rollout import RolloutJob, RolloutSettings, SampledTurn, Sampler, SamplingParams, collect
from sorl_env.trajectory import Trajectory
from sorl_train.learner.batch import collate
from sorl_train.models.forward import action_stats
from sorl_train.models.policy import load_policy, load_tokenizer
from sorl_train.rollout.kv_cache import ActiveRollout, draw
from sorl_train.rollout.sampler import TransformersSampler, _StopTokens


def jobs(count: int) -> list[RolloutJob]:
    return [RolloutJob(f"g{i}/0", f"g{i}", example_index=i, seed=1000 * i) for i in range(count)]


class Recorder:
    """A sampler that notes every id that goes in and comes out."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.seen: dict[str, list[int]] = {}

    async def generate(self, session: str, token_ids: Sequence[int], params: SamplingParams) -> SampledTurn:
        before = list(token_ids)
        turn = await self.sampler.generate(session, token_ids, params)
        self.seen[session] = before + turn.token_ids
        return turn

    def release(self, session: str) -> None:
        self.sampler.release(session)


def roll(
    env: ToolUseEnv,
    model: Any,
    tokenizer: Any,
    wanted: int | list[RolloutJob],
    max_rows: int = 64,
    **how: float,
) -> tuple[list[Trajectory], dict[str, list[int]]]:
    sampler = TransformersSampler(model, tokenizer, max_rows)
    recorder = Recorder(sampler)
    settings = RolloutSettings(max_concurrency=max_rows, **how)  # type: ignore[arg-type]
    with sampler.session():
        wanted = jobs(wanted) if isinstance(wanted, int) else wanted
        trajectories = asyncio.run(collect(env, tokenizer, recorder, wanted, settings))
    return trajectories, recorder.seen


def assert_exact(trajectories: list[Trajectory], seen: dict[str, list[int]], model: Any) -> None:
    """Ids are those of the sampler, and the trainer computes the same log-probabilities."""
    for trajectory in trajectories:
        ids = trajectory.token_ids.tolist()
        assert (
            ids == seen[trajectory.id][: len(ids)] or ids[: len(seen[trajectory.id])] == seen[trajectory.id]
        )
    batch = collate(trajectories)
    with torch.no_grad():
        log_probs = action_stats(model, batch.token_ids, batch.action_mask).log_probs
    assert batch.action_mask.sum() > 0
    torch.testing.assert_close(log_probs, batch.rollout_log_probs, atol=1e-4, rtol=0)


def assert_truncated(trajectories: list[Trajectory], model: Any, temperature: float, top_p: float) -> None:
    """The log-probabilities are those of the distribution that was drawn from, token by token in plain arithmetic."""
    batch = collate(trajectories)
    with torch.no_grad():
        probs = (model(batch.token_ids[:, :-1]).logits.double() / temperature).softmax(-1)[batch.action_mask]
    tokens, told = batch.token_ids[:, 1:][batch.action_mask], batch.rollout_log_probs[batch.action_mask]
    least = []
    for row, token, log_prob in zip(probs, tokens.tolist(), told.tolist(), strict=True):
        ordered = row.sort(descending=True).values
        nucleus = int((ordered.cumsum(0) - ordered < top_p).sum())
        # rounding may move the border by a token
        masses = [float(ordered[:size].sum()) for size in (nucleus - 1, nucleus, nucleus + 1) if size]
        assert any(abs(log_prob - math.log(float(row[token]) / mass)) < 1e-4 for mass in masses)
        assert float(row[token]) >= float(ordered[nucleus - 1]) - 1e-6
        least.append(min(masses))
    assert min(least) < 0.99


def test_log_probs_are_those_of_the_distribution_that_was_drawn_from(
    tiny_folder: str, minihop_env: ToolUseEnv
) -> None:
    model, how = load_policy(tiny_folder), {"temperature": 0.7, "top_p": 0.8}
    trajectories, _ = roll(minihop_env, model, load_tokenizer(tiny_folder), 8, **how)
    assert_truncated(trajectories, model, **how)


@pytest.fixture(scope="module")
def byte_level(minihop_env: ToolUseEnv) -> tuple[Any, Any]:
    """A byte-level BPE trained on the world's text, and a random model over it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(
        [minihop_env.task.prompt(e) for e in minihop_env.examples.examples], trainer
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(wrapped),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,  # grouped heads
        max_position_embeddings=2048,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config).eval(), wrapped


def test_tokens_are_exact(byte_level: tuple[Any, Any], tiny_folder: str, minihop_env: ToolUseEnv) -> None:
    """Those of a tokenizer of words, and of one of bytes."""
    model = load_policy(tiny_folder)
    trajectories, seen = roll(minihop_env, model, load_tokenizer(tiny_folder), 12)
    assert_exact(trajectories, seen, model)
    assert any(len(t.turns) > 1 for t in trajectories)
    model, tokenizer = byte_level
    env = minihop_env.spawn()
    env.limits = type(env.limits)(max_turns=3, max_new_tokens=24, max_trajectory_tokens=600)
    assert_exact(*roll(env, model, tokenizer, 6), model)


def test_greedy_turns_equal_plain_generation(tiny_folder: str, minihop_env: ToolUseEnv) -> None:
    """Rows of different lengths that join and leave the batch draw what ``generate`` draws for each alone."""
    model, tokenizer = load_policy(tiny_folder).eval(), load_tokenizer(tiny_folder)
    trajectories, _ = roll(minihop_env, model, tokenizer, 10, max_rows=4, temperature=0.0)
    for trajectory in trajectories:
        for turn in trajectory.turns:
            context = torch.from_numpy(trajectory.token_ids[: turn.start].astype(np.int64))[None]
            expected = model.generate(context, max_new_tokens=turn.end - turn.start, do_sample=False)
            assert expected[0, turn.start :].tolist() == trajectory.token_ids[turn.start : turn.end].tolist()


def test_a_group_reads_its_prompt_once(tiny_folder: str, minihop_env: ToolUseEnv) -> None:
    """That it samples as each would alone is in test_sampler_arrivals.py."""
    model, tokenizer = load_policy(tiny_folder), load_tokenizer(tiny_folder)
    group = [RolloutJob(f"g{i % 2}/{i}", f"g{i % 2}", example_index=i % 2, seed=1000 * i) for i in range(8)]
    read: list[int] = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    sampler = TransformersSampler(model, tokenizer, 8)
    with sampler.session():
        asyncio.run(collect(minihop_env, tokenizer, sampler, group, RolloutSettings(max_concurrency=8)))
    assert read[:2] == [2, 8]  # two prompts, then the second token of all eight


def test_what_prompts_begin_with_is_read_once(tiny_folder: str) -> None:
    """Three prompts with one instruction, then a fourth. What they sample is in test_sampler_arrivals.py."""
    model, tokenizer = load_policy(tiny_folder), load_tokenizer(tiny_folder)
    instruction = [5 + i % 20 for i in range(40)]
    prompts = [instruction + rest for rest in ([7, 8], [7, 9, 10], [11], [12, 13, 14])]
    read: list[tuple[int, ...]] = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )

    async def turns(sampler: TransformersSampler, *batches: Sequence[int]) -> None:
        for batch in batches:
            read.append((0, 0))
            asked = (sampler.generate(f"{i}", prompts[i], SamplingParams(6, seed=i)) for i in batch)
            await asyncio.gather(*asked)

    together = TransformersSampler(model, tokenizer, 4)
    with together.session():
        asyncio.run(turns(together, [0, 1, 2], [3]))
    second = read.index((0, 0), 1)
    assert read[1:3] == [(1, 40), (3, 3)]
    assert read[second + 1] == (1, 3)  # it has the instruction from one of the rows


def test_what_a_sampler_did_before_leaves_no_trace(tiny_folder: str, minihop_env: ToolUseEnv) -> None:
    """A resumed run starts with a small cache, the run it repeats had a grown one: not a bit may differ."""
    model, tokenizer = load_policy(tiny_folder), load_tokenizer(tiny_folder)
    sampler = TransformersSampler(model, tokenizer, 16)
    before, after = [], []
    for _ in range(2):
        with sampler.session():
            before.append(sampler._cache.capacity)
            after.append(asyncio.run(collect(minihop_env, tokenizer, sampler, jobs(16))))
    assert before[0] < before[1]
    for one, other in zip(*after, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.rollout_log_probs, other.rollout_log_probs)


def test_weights_cast_once_compute_the_same_bits(
    byte_level: tuple[Any, Any], minihop_env: ToolUseEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 the session decodes with a copy; the model keeps its float32 weights, and later changes count."""
    model, tokenizer = byte_level
    env = minihop_env.spawn()
    env.limits = type(env.limits)(max_turns=2, max_new_tokens=24, max_trajectory_tokens=600)

    def sampled() -> list[tuple[list[int], list[float]]]:
        sampler = TransformersSampler(model, tokenizer, 8, "bfloat16")
        with sampler.session():
            found = asyncio.run(collect(env, tokenizer, sampler, jobs(4), RolloutSettings(max_concurrency=8)))
        return [(t.token_ids.tolist(), t.rollout_log_probs.tolist()) for t in found]

    with_copy = sampled()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with monkeypatch.context() as patched:
        patched.setattr("sorl_train.rollout.sampler.decoding_model", lambda model, dtype: model)
        assert sampled() == with_copy
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
        try:
            assert sampled() != with_copy
        finally:
            model.lm_head.weight.div_(2.0)


class Uniform:
    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


def draw_one(probs: list[float], uniform: float, **params: Any) -> tuple[int, float]:
    row = ActiveRollout("s", 0, params=SamplingParams(1, **params), draws=Uniform(uniform))  # type: ignore[arg-type]
    tokens, log_probs = draw(torch.tensor([probs]).log(), [row])
    return tokens[0], log_probs[0]


def test_the_nucleus_of_a_row_leaves_the_others_alone() -> None:
    """To the last bit: a row draws the same whatever is beside it."""
    logits = torch.randn(2, 500, generator=torch.Generator().manual_seed(0))

    def row(uniform: float, top_p: float) -> ActiveRollout:
        return ActiveRollout("s", 0, params=SamplingParams(1, top_p=top_p), draws=Uniform(uniform))  # type: ignore[arg-type]

    for uniform in (0.0, 0.3, 1.0 - 2**-53):
        tokens, log_probs = draw(logits, [row(uniform, 1.0), row(uniform, 0.5)])
        alone = [draw(logits[[0]], [row(uniform, 1.0)]), draw(logits[[1]], [row(uniform, 0.5)])]
        assert [(*t, *p) for t, p in alone] == list(zip(tokens, log_probs, strict=True))


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.099, 0), (0.101, 1), (0.299, 1), (0.31, 2), (0.9999, 2)]
)
def test_draw_inverts_the_cumulative_distribution(uniform: float, token: int) -> None:
    drawn, log_prob = draw_one([0.1, 0.2, 0.7], uniform)
    assert drawn == token
    assert log_prob == pytest.approx(np.log([0.1, 0.2, 0.7][token]), abs=1e-6)


def test_draw_greedy_and_nucleus() -> None:
    assert draw_one([0.1, 0.2, 0.7], 0.0, temperature=0.0)[0] == 2
    # the nucleus of .8 holds .7 and .2: a low number draws the first of them, never token 0
    drawn, log_prob = draw_one([0.1, 0.2, 0.7], 0.01, top_p=0.8)
    assert drawn == 1 and log_prob == pytest.approx(math.log(0.2 / 0.9), abs=1e-6)
    greedy = draw_one([0.1, 0.2, 0.7], 0.0, temperature=0.0, top_p=0.8)  # nothing is cut, in vLLM neither
    assert greedy == (2, pytest.approx(math.log(0.7), abs=1e-6))
    assert draw_one([0.1, 0.2, 0.7], 0.01, top_p=0.5)[0] == 2
    # temperature 2 flattens: the log-probability is that of the scaled distribution
    root = np.sqrt([0.1, 0.2, 0.7])
    assert draw_one([0.1, 0.2, 0.7], 0.99, temperature=2.0)[1] == pytest.approx(
        np.log(root[2] / root.sum()), abs=1e-6
    )


def test_stop_string_across_tokens(byte_level: tuple[Any, Any]) -> None:
    _, tokenizer = byte_level
    stops = _StopTokens(tokenizer, len(tokenizer))
    ids = tokenizer.encode("<think> x </think> <search> Ilmar </search> more")
    stop = ("</search>", "</answer>")
    ends = [n for n in range(1, len(ids) + 1) if stops.completes(ids[:n], stop)]
    text = tokenizer.decode(ids[: ends[0]])
    assert text.rstrip().endswith("</search>")
    assert "</search>" not in tokenizer.decode(ids[: ends[0] - 1])
    assert not any(stops.completes(ids[:n], ()) for n in range(1, len(ids)))
