"""The typed record of one rollout: its tokens, and what each turn of the policy did.

Layout of a two-turn trajectory (P prompt, A sampled by the policy, O observation)::

    token_ids         = [P  P  P  A0 A0 A0 O  O  A1 A1]
    action_mask       = [0  0  0  1  1  1  0  0  1  1 ]
    turn_ids          = [-1 -1 -1 0  0  0  -1 -1 1  1 ]
    rollout_log_probs = [0  0  0  l  l  l  0  0  l  l ]

The ids are those that the sampler saw and drew: a turn is never decoded and encoded again.

Files are JSONL, without loss in either direction. A line holds the fields of ``Trajectory`` under their own names, and
the files load with ``datasets.load_dataset("json", data_files="run/trajectories/step_*.jsonl")``. ``datasets`` infers
types from values, so a field that is empty, None or of different types in some rows would change the schema from one
file to the next. Hence mappings and tool calls are stored as strings of JSON (``json.loads(row["reward_items"])``), and
None as the empty string.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sorl_env.errors import UserError
from sorl_env.folders import replacing
from sorl_env.text import read_json
from sorl_env.tool.tool import ToolCall

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
        """Whether the loss and group baselines leave the trajectory out, because it says nothing about the policy."""
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


_DTYPES = {
    "token_ids": np.int32,
    "action_mask": np.bool_,
    "turn_ids": np.int16,
    "rollout_log_probs": np.float32,
}


def write_jsonl(path: str | Path, trajectories: Iterable[Trajectory]) -> None:
    """Write one trajectory per line. The file appears complete or not at all.

    Raises:
        UserError: ``metadata`` holds something that JSON cannot.
    """
    with replacing(Path(path)) as unfinished, unfinished.open("w", encoding="utf-8", newline="\n") as stream:
        for trajectory in trajectories:
            stream.write(json.dumps(_encode(trajectory), separators=(",", ":")) + "\n")


def read_jsonl(path: str | Path) -> list[Trajectory]:
    """All trajectories of a file; see ``iter_jsonl``."""
    return list(iter_jsonl(path))


def iter_jsonl(path: str | Path) -> Iterator[Trajectory]:
    """The trajectories of a file, one at a time, with every dtype as it was written.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: a line is not a trajectory of this schema version; the message names file and line.
    """
    with Path(path).open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                where = f"{path}:{number}"
                yield _decode(_parse_line(line, where), where)


def _encode(trajectory: Trajectory) -> dict[str, Any]:
    record = dict(vars(trajectory))
    record |= {name: getattr(trajectory, name).tolist() for name in _DTYPES}
    record["rollout_log_probs"] = _shortest(trajectory.rollout_log_probs)
    record["turns"] = [_encode_turn(turn) for turn in trajectory.turns]
    record["reward"] = float(trajectory.reward)
    record["reward_items"] = _items_to_json(trajectory.reward_items)
    record["stop_reason"] = trajectory.stop_reason.value
    record["error"] = trajectory.error or ""
    try:
        record["metadata"] = json.dumps(dict(trajectory.metadata))
    except TypeError as error:
        raise UserError(f"trajectory {trajectory.id}: metadata must hold JSON values: {error}") from error
    return record


def _encode_turn(turn: Turn) -> dict[str, Any]:
    record = dict(vars(turn))
    record["format_error"] = turn.format_error or ""
    record["reward_items"] = _items_to_json(turn.reward_items)
    record["tool_calls"] = json.dumps([call._asdict() for call in turn.tool_calls])
    return record | {"generate_s": float(turn.generate_s), "tool_s": float(turn.tool_s)}


def _items_to_json(items: Mapping[str, float]) -> str:
    return json.dumps({name: float(value) for name, value in items.items()})


def _shortest(values: NDArray[np.float32]) -> list[float]:
    """Each float32 value as the shortest decimal number that reads back as the same value: half the file's size."""
    shortest: list[float] = values.astype(np.float32).astype(str).astype(np.float64).tolist()
    return shortest


def _parse_line(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        record = read_json(line)
    except ValueError as error:
        cut_off = "; its end is missing, so delete this last line or write the file again"
        hint = "" if line.endswith(b"\n") else cut_off
        raise UserError(f"{where}: not valid JSON ({error}){hint}") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(record).__name__}")
    return record


def _decode(record: Mapping[str, Any], where: str) -> Trajectory:
    version = record.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{where}: schema_version is {version!r}, but this version of sorl reads {SCHEMA_VERSION}: read the file "
            "with the version of sorl that wrote it"
        )
    try:
        arrays: dict[str, Any] = {
            name: np.array(record[name], dtype=dtype) for name, dtype in _DTYPES.items()
        }
        converted: dict[str, Any] = {
            "turns": tuple(map(_decode_turn, record["turns"])),
            "reward": float(record["reward"]),
            "reward_items": read_json(record["reward_items"]),
            "stop_reason": StopReason(record["stop_reason"]),
            "error": record["error"] or None,
            "metadata": read_json(record["metadata"]),
        }
        return Trajectory(**(dict(record) | arrays | converted))
    except KeyError as error:
        raise UserError(f"{where}: the field {error} is missing") from error
    except (AttributeError, TypeError, ValueError, OverflowError) as error:  # such as an unknown field
        raise UserError(f"{where}: {error}") from error


def _decode_turn(record: Mapping[str, Any]) -> Turn:
    converted: dict[str, Any] = {
        "format_error": record["format_error"] or None,
        "reward_items": read_json(record["reward_items"]),
        "tool_calls": tuple(ToolCall(**call) for call in read_json(record["tool_calls"])),
    }
    return Turn(**(dict(record) | converted))
