"""Trajectories of which a test states only what matters to it, and a sampler that plays a script."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sorl_env.rollout import SampledTurn, SamplingParams
from sorl_env.trajectory import StopReason, Trajectory


def make_trajectory(turn_ids: Sequence[int], **fields: Any) -> Trajectory:
    """The tokens 1, 2, .., sampled by the policy where ``turn_ids`` is not -1, with other fields as given."""
    turns = np.asarray(turn_ids, dtype=np.int16)
    usual = dict.fromkeys(("id", "group_id", "task", "source", "split", "example_id", "prompt"), "")
    usual |= {"turns": (), "reward": 0.0, "reward_items": {}, "stop_reason": StopReason.ANSWER}
    usual |= {"token_ids": np.arange(1, len(turns) + 1, dtype=np.int32), "turn_ids": turns}
    usual |= {"action_mask": turns >= 0, "rollout_log_probs": np.zeros(len(turns), np.float32)}
    return Trajectory(**(usual | fields))


class Scripted:
    """A sampler that writes the turns of a script, texts or token ids: the same in all sessions, or a script for each.
    With an empty script it waits until it is cancelled. ``before`` is called ahead of each turn."""

    def __init__(
        self,
        tokenizer: Any,
        turns: Sequence[Any] | Mapping[str, Sequence[Any]],
        before: Callable[[str, int], None] = lambda session, number: None,
    ) -> None:
        self.tokenizer, self.turns, self.before = tokenizer, turns, before
        self.drawn: dict[str, int] = {}
        self.released: list[str] = []
        self.waiting = threading.Event()

    async def generate(self, session: str, token_ids: Sequence[int], params: SamplingParams) -> SampledTurn:
        number = self.drawn[session] = self.drawn.get(session, -1) + 1
        await asyncio.sleep(0)
        self.before(session, number)
        if not self.turns:
            self.waiting.set()
            await asyncio.sleep(60)
        turn = (self.turns[session] if isinstance(self.turns, Mapping) else self.turns)[number]
        ids = self.tokenizer.encode(turn, add_special_tokens=False) if isinstance(turn, str) else turn
        return SampledTurn(ids, [-0.5] * len(ids), "stop" if isinstance(turn, str) else "eos")

    def release(self, session: str) -> None:
        self.released.append(session)
