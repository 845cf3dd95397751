"""The sampler under random arrivals: every turn equals the same dialogue's, held alone in a fresh sampler.

Dialogues begin at any moment, wait for tools for any time, are cut short, cancelled and released, meet errors of the
model, and outnumber the rows of the cache. None of it may change a token of a turn that is completed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from sorl_env.rollout import SampledTurn, SamplingParams
from sorl_train.rollout.kv_cache import ActiveRollout
from sorl_train.rollout.sampler import TransformersSampler

VOCABULARY = 30
SEED = 1
MOST_YIELDS = 40  # of the event loop that a tool's reply takes
PROMPTS = 5  # dialogues share them, as those of a group do


@dataclass(frozen=True)
class Dialogue:
    """What one trajectory asks of a sampler: its prompt, and the parameters and the tool's reply of each turn."""

    name: str
    prompt: list[int]
    turns: list[tuple[SamplingParams, list[int]]]
    timing: int | None = None  # dialogues with the same number wait for the same times


def dialogues(count: int, seed: int) -> list[Dialogue]:
    rng = np.random.default_rng(seed)

    def tokens(most: int) -> list[int]:
        found: list[int] = rng.integers(2, VOCABULARY, int(rng.integers(1, most + 1))).tolist()
        return found

    def turn(greedy: bool) -> tuple[SamplingParams, list[int]]:
        params = SamplingParams(
            max_new_tokens=int(rng.integers(1, 10)),
            temperature=0.0 if greedy else float(rng.choice([0.7, 1.0])),
            top_p=float(rng.choice([0.8, 1.0])),
            stop=("<stop>",),
            seed=int(rng.integers(1 << 40)),
        )
        return params, tokens(20)

    prompts = [tokens(60) for _ in range(PROMPTS)]
    prompts += [prompts[0][:9] + tokens(20), prompts[0][:9], prompts[0] + tokens(4)]
    made = []
    for i in range(count):
        greedy, turns = bool(rng.integers(2)), int(rng.integers(2, 6))
        made.append(
            Dialogue(f"d{i}", prompts[rng.integers(len(prompts))], [turn(greedy) for _ in range(turns)])
        )
    return made


def families(count: int, seed: int) -> list[Dialogue]:
    """Dialogues in threes, whose first turns and replies are alike, as a group's often are."""
    made = []
    for number, (elder, *others) in enumerate(zip(*[iter(dialogues(3 * count, seed))] * 3, strict=True)):
        made.append(replace(elder, timing=number))
        for alike, other in enumerate(others, start=1):
            turns = elder.turns[:alike] + other.turns
            made.append(Dialogue(other.name, elder.prompt, turns, number))
    return made


def alone(random_policy: tuple[Any, Any], dialogue: Dialogue) -> list[SampledTurn]:
    """The dialogue's turns from a fresh sampler that holds nothing else."""
    sampler = TransformersSampler(*random_policy, max_rows=1)

    async def hold() -> list[SampledTurn]:
        ids, turns = list(dialogue.prompt), []
        for params, reply in dialogue.turns:
            turns.append(await sampler.generate(dialogue.name, ids, params))
            ids += turns[-1].token_ids + reply
        return turns

    with sampler.session():
        return asyncio.run(hold())


class ModelError(Exception):
    """Raised in a forward pass."""


@dataclass
class Traffic:
    """Holds dialogues in one sampler, with what else happens to a request in service.

    Args:
        chance: of each kind of event, at each turn; ``fail`` at each forward pass.
    """

    sampler: TransformersSampler
    chance: dict[str, float]
    happened: dict[str, int] = field(default_factory=dict)
    completed: dict[tuple[str, int], SampledTurn] = field(default_factory=dict)

    def run(self, all_dialogues: Sequence[Dialogue], most_at_once: int) -> None:
        """Hold them all; ``completed`` has each turn by dialogue and number."""
        rng = np.random.default_rng([0, 1])

        def fail(*_: Any) -> None:
            if rng.random() < self.chance.get("fail", 0.0):
                self._count("fail")
                raise ModelError

        hook = self.sampler.model.base_model.register_forward_pre_hook(fail)
        try:
            with self.sampler.session():
                asyncio.run(self._run_all(all_dialogues, most_at_once))
        finally:
            hook.remove()

    async def _run_all(self, all_dialogues: Sequence[Dialogue], most_at_once: int) -> None:
        places = asyncio.Semaphore(most_at_once)

        async def run(number: int, dialogue: Dialogue) -> None:
            timing = number if dialogue.timing is None else dialogue.timing
            rng = np.random.default_rng([0, 2, timing])
            await self._wait(rng, len(all_dialogues) * MOST_YIELDS)
            async with places:
                try:
                    await self._hold(dialogue, rng)
                finally:
                    self.sampler.release(dialogue.name)

        await asyncio.wait_for(asyncio.gather(*(run(*pair) for pair in enumerate(all_dialogues))), 600)

    def _count(self, event: str) -> None:
        self.happened[event] = self.happened.get(event, 0) + 1

    async def _wait(self, rng: np.random.Generator, most_yields: int) -> int:
        """Let the event loop turn a random number of times, which is returned."""
        yields = int(rng.integers(most_yields + 1))
        for _ in range(yields):
            await asyncio.sleep(0)
        return yields

    async def _hold(self, dialogue: Dialogue, rng: np.random.Generator) -> None:
        ids = list(dialogue.prompt)
        for number, (params, reply) in enumerate(dialogue.turns):
            turn = None
            while turn is None:
                if self._now("release", rng):  # what was cached is gone, and read anew
                    self.sampler.release(dialogue.name)
                if self.sampler._slots.get(dialogue.name) and self._now("rewrite", rng):
                    await self._refused(dialogue.name, [ids[0] + 1, *ids[1:]], params)
                try:
                    turn = await self._turn(dialogue.name, ids, params, rng)
                except ModelError:
                    continue
                if turn is None and self._now("leave", rng):
                    return
            self.completed[dialogue.name, number] = turn
            ids += turn.token_ids + reply
            await self._wait(rng, MOST_YIELDS)

    def _now(self, event: str, rng: np.random.Generator) -> bool:
        if rng.random() >= self.chance.get(event, 0.0):
            return False
        self._count(event)
        return True

    async def _turn(
        self, name: str, ids: list[int], params: SamplingParams, rng: np.random.Generator
    ) -> SampledTurn | None:
        """One turn; None where it was given up before it ended."""
        asked = asyncio.ensure_future(self.sampler.generate(name, ids, params))
        if self._now("twice", rng):
            await asyncio.sleep(0)
            await self._refused(name, ids, params)
        begun = 1
        if self._now("cancel", rng):
            begun = await self._wait(rng, 12)
            asked.cancel()
        elif self._now("release in flight", rng):
            await self._wait(rng, 12)
            self.sampler.release(name)
        try:
            return await asked
        except asyncio.CancelledError:
            self._count("given up")
            assert self.sampler._slots.get(name) is None or not begun  # it does not go on decoding for nobody
            return None

    async def _refused(self, name: str, ids: list[int], params: SamplingParams) -> None:
        with pytest.raises(ValueError, match=f"session {name}"):
            await self.sampler.generate(name, ids, params)


ALL = {"cancel": 0.12, "leave": 0.15, "release": 0.1, "release in flight": 0.05}
ALL |= {"fail": 0.01, "twice": 0.05, "rewrite": 0.05}


def assert_equal(policy: tuple[Any, Any], all_dialogues: Sequence[Dialogue], traffic: Traffic) -> int:
    """Every completed turn is the one of the dialogue alone; returns how many there are."""
    wrong, compared = [], 0
    for dialogue in all_dialogues:
        for number, expected in enumerate(alone(policy, dialogue)):
            turn = traffic.completed.get((dialogue.name, number))
            if turn is None:
                continue
            compared += 1
            same = (turn.token_ids, turn.finish) == (expected.token_ids, expected.finish)
            if not same or not np.allclose(turn.log_probs, expected.log_probs, rtol=0, atol=1e-4):
                wrong.append((dialogue.name, number, turn, expected))
    assert not wrong, f"{len(wrong)} of {compared} turns differ, the first: {wrong[0]}"
    return compared


@pytest.fixture(autouse=True)
def short_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts here are short; what they have in common is read once all the same."""
    monkeypatch.setattr("sorl_train.rollout.sampler.LONG_BEGINNING", 3)


def test_every_turn_is_that_of_the_dialogue_alone(random_policy: tuple[Any, Any]) -> None:
    chosen = dialogues(30, SEED)
    traffic = Traffic(TransformersSampler(*random_policy, max_rows=6), chance=ALL)
    traffic.run(chosen, most_at_once=6)
    assert set(traffic.happened) == {*ALL, "given up"}
    assert assert_equal(random_policy, chosen, traffic) > 80


def test_turns_that_are_alike_are_read_once_and_sampled_alone(
    random_policy: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dialogues that go on alike after a reply are read by one of them, and are those of each alone all the same."""
    chosen = families(16, SEED)
    sampler = TransformersSampler(*random_policy, max_rows=9)
    read, shared = sampler._read, 0

    def count(groups: Sequence[list[ActiveRollout]]) -> None:
        nonlocal shared
        shared += sum(len(group) - 1 for group in groups if group[0].cached)
        read(groups)

    monkeypatch.setattr(sampler, "_read", count)
    few = {event: chance / 4 for event, chance in ALL.items()}
    traffic = Traffic(sampler, chance=few)
    traffic.run(chosen, most_at_once=9)
    assert shared > 10
    assert assert_equal(random_policy, chosen, traffic) > 100
