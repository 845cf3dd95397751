"""The rules that keep the rows of the sampler's cache apart, and what happens to a turn that breaks off."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import pytest

from sorl_env.rollout import SampledTurn, SamplingParams
from sorl_train.rollout.sampler import TransformersSampler

ONE = SamplingParams(1, temperature=0.0)
SOME = SamplingParams(8, temperature=0.0)
PROMPTS = [[3, 4, 9, 17, 5], [8, 8, 21, 4, 29, 11, 6]]


def opened(random_policy: tuple[Any, Any], rows: int) -> TransformersSampler:
    return TransformersSampler(*random_policy, max_rows=rows)


def alone(random_policy: tuple[Any, Any], ids: list[int], params: SamplingParams) -> SampledTurn:
    sampler = opened(random_policy, 1)
    with sampler.session():
        return asyncio.run(sampler.generate("alone", ids, params))


@pytest.mark.parametrize(
    ("slot", "tokens", "session", "message"),
    [
        (2, 5, "second", "slot 2 has no owner, but holds 5 tokens"),
        (0, 1, "first", r"hold \[1\] tokens, but their rows have read \[2\]"),
    ],
)
def test_a_slot_that_does_not_hold_what_its_owner_has_read_is_noticed(
    random_policy: tuple[Any, Any], slot: int, tokens: int, session: str, message: str
) -> None:
    sampler = opened(random_policy, 4)

    async def two_turns() -> None:
        await sampler.generate("first", [3, 4], ONE)
        sampler._cache.lengths[slot] = tokens
        await sampler.generate(session, [3, 4, 5], ONE)

    with sampler.session(), pytest.raises(AssertionError, match=message):
        asyncio.run(two_turns())


@pytest.mark.parametrize(
    ("ids", "rows", "said"),
    [
        ([3], 2, "session bad: more than max_concurrency=2"),
        ([3, 30], 3, "session bad: token 30 is none of the model's 30"),
        ([3, -1], 3, "session bad: token -1 is none of the model's 30"),
    ],
)
def test_a_request_that_is_refused_disturbs_nobody(
    random_policy: tuple[Any, Any], ids: list[int], rows: int, said: str
) -> None:
    """One trajectory more than there are rows, or a token that is none of the model's."""
    sampler = opened(random_policy, rows)

    async def crowd() -> list[Any]:
        requests = [sampler.generate(f"d{i}", ids, SOME) for i, ids in enumerate(PROMPTS)]
        return await asyncio.gather(*requests, sampler.generate("bad", ids, SOME), return_exceptions=True)

    with sampler.session():
        *turns, refused = asyncio.run(crowd())
    expected = [alone(random_policy, ids, SOME).token_ids for ids in PROMPTS]
    assert [turn.token_ids for turn in turns] == expected
    assert isinstance(refused, ValueError) and said in str(refused)


def test_who_waits_for_a_turn_is_told_when_it_is_given_up(random_policy: tuple[Any, Any]) -> None:
    """By a release or the end of the session; a new session on the same event loop starts empty."""
    sampler = opened(random_policy, 3)
    long = SamplingParams(300, temperature=1.0)

    async def twice() -> SampledTurn:
        with sampler.session():
            left = [asyncio.ensure_future(sampler.generate(f"d{i}", PROMPTS[0], long)) for i in range(3)]
            for _ in range(30):
                await asyncio.sleep(0)
            sampler.release("d1")
            await asyncio.wait([left[1]], timeout=300)
            assert [one.done() for one in left] == [False, True, False] and left[1].cancelled()
        with sampler.session():  # before the driver of the first has been told to stop
            turn = await sampler.generate("d0", PROMPTS[1], SOME)
        assert all(one.cancelled() for one in left)
        with pytest.raises(RuntimeError, match="only inside its session"):
            await sampler.generate("d1", PROMPTS[0], long)
        return turn

    turn, expected = asyncio.run(asyncio.wait_for(twice(), 600)), alone(random_policy, PROMPTS[1], SOME)
    assert turn.token_ids == expected.token_ids
    np.testing.assert_allclose(turn.log_probs, expected.log_probs, rtol=0, atol=1e-4)


def test_after_an_error_of_the_model_no_row_is_left_decoding(
    random_policy: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Even where nobody releases what failed. The error is the callers', and told once."""
    sampler = opened(random_policy, 2)

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    async def fail_then_go_on() -> list[Any]:
        hook = sampler.model.base_model.register_forward_pre_hook(fail)
        requests = [sampler.generate(f"failed{i}", ids, SOME) for i, ids in enumerate(PROMPTS)]
        errors = await asyncio.gather(*requests, return_exceptions=True)
        hook.remove()
        assert [str(error) for error in errors] == ["no room"] * 2
        requests = [sampler.generate(f"new{i}", ids, SOME) for i, ids in enumerate(PROMPTS)]
        return await asyncio.gather(*requests)

    with sampler.session():
        turns = asyncio.run(fail_then_go_on())
    gc.collect()
    assert [turn.token_ids for turn in turns] == [
        alone(random_policy, ids, SOME).token_ids for ids in PROMPTS
    ]
    assert not caplog.records


def test_a_session_within_a_session_is_refused(random_policy: tuple[Any, Any]) -> None:
    sampler = opened(random_policy, 2)
    with sampler.session():
        with pytest.raises(RuntimeError, match="open already"), sampler.session():
            pass
        assert asyncio.run(sampler.generate("first", [3, 4], ONE)).token_ids  # the outer one goes on
