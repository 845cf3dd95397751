"""The typed record of one rollout: its tokens, and what each turn of the policy did.

Layout of a two-turn trajectory (P prompt, A sampled by the policy, O observation)::

    token_ids         = [P  P  P  A0 A0 A0 O  O  A1 A1]
    action_mask       = [0  0  0  1  1  1  0  0  1  1 ]
    turn_ids          = [-1 -1 -1 0  0  0  -1 -1 1  1 ]
    rollout_log_probs = [0  0  0  l  l  l  0  0  l  l ]

The ids are those that the sampler saw and drew: a turn is never decoded and encoded again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sorl_env.tool import ToolCall

SCHEMA_VERSION = 2  # 2: tool calls have ``cut_from``


class StopReason(str, Enum):
    """Why a trajectory ended. Only ``ANSWER`` is a termination, the others are truncations."""

    ANSWER = "answer"  # the policy answered
    MAX_TURNS = "max_turns"  # the turn budget ran out
    MAX_TOKENS = "max_tokens"  # the token budget ran out
    MAX_SECONDS = "max_seconds"  # the time budget ran out
    INVALID = "invalid"  # the turn budget ran out on a malformed turn
    ERROR = "error"  # a tool was unavailable, or the task raised
    ABORTED = "aborted"  # stopped from outside

    @property
    def excluded(self) -> bool:
        """Whether the trajectory says nothing about the policy; it is left out of the loss and of group baselines."""
        return self in (StopReason.ERROR, StopReason.ABORTED)


@dataclass(frozen=True)
class Turn:
    """One policy message and the environment's reply.

    Attributes:
        index: number of the turn from 0, equal to the value in ``Trajectory.turn_ids``.
        text: the policy's message as decoded from its tokens.
        kind: ``tool``, ``answer`` or ``invalid``.
        content: the query or the answer, empty for an invalid turn.
        format_error: the parser's error code, None for a valid turn.
        observation: the environment's reply, empty after the last turn.
        reward_items: rewards of this turn by name.
        tool_calls: records of the turn's tool calls.
        start, end: the turn's tokens are ``token_ids[start:end]``.
        policy_version: number of training steps behind the weights that sampled the turn.
        generate_s, tool_s: seconds.
    """

    index: int
    text: str
    kind: str
    content: str
    format_error: str | None
    observation: str
    reward_items: Mapping[str, float]
    tool_calls: tuple[ToolCall, ...]
    start: int
    end: int
    policy_version: int = 0
    generate_s: float = 0.0
    tool_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One rollout. Arrays have shape (L,) for L tokens, see the docstring of this module.

    Attributes:
        id: unique within a run: ``{group_id}/{index in group}``.
        group_id: shared by the rollouts of the same prompt in the same batch.
        seed: seed of the sampler's draws for this trajectory.
        reward: sum of ``reward_items``.
        error: what went wrong, for ``StopReason.ERROR``.
        metadata: ``format``, unless it is ``tags``.
    """

    id: str
    group_id: str
    task: str
    source: str
    split: str
    example_id: str
    prompt: str
    token_ids: NDArray[np.int32]
    action_mask: NDArray[np.bool_]
    turn_ids: NDArray[np.int16]
    rollout_log_probs: NDArray[np.float32]
    turns: tuple[Turn, ...]
    reward: float
    reward_items: Mapping[str, float]
    stop_reason: StopReason
    seed: int = 0
    error: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name in ("action_mask", "turn_ids", "rollout_log_probs"):
            entries = len(getattr(self, name))
            if entries != length:
                raise ValueError(f"trajectory {self.id}: {name} has {entries} entries, token_ids {length}")

    @property
    def excluded(self) -> bool:
        """Whether it is left out of the loss and of group baselines (see ``StopReason.excluded``)."""
        return self.stop_reason.excluded

    @property
    def num_action_tokens(self) -> int:
        """Number of tokens that the policy sampled; |y| in the paper."""
        return int(self.action_mask.sum())
