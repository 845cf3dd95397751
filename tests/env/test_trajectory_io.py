"""Trajectories survive files exactly, whatever they hold, and load with `datasets` under one schema."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_env.errors import UserError
from sorl_env.tool import ToolCall
from sorl_env.trajectory import StopReason, Trajectory, Turn, iter_jsonl, read_jsonl, write_jsonl

from ..trajectories import make_trajectory

CALL = ToolCall("search", "capital of Norway", "Doc 1: Oslo", ok=True, latency_s=0.0123, hits=3, attempts=2)
FAILED = ToolCall("search", "", "it is empty", ok=False, error="it is empty", cached=True, cut_from=5_000_000)


def searched(**changes: Any) -> Trajectory:
    """Two turns, the first with tool calls; every optional field is set."""
    turns = (
        Turn(0, "<search>capital of Norway</search>", "tool", "capital of Norway", None, "\n<info>", {},
             (CALL, FAILED), 3, 5, policy_version=7, generate_s=0.25, tool_s=0.0123),
        Turn(1, "<answer>Oslo", "invalid", "", "unclosed", "", {"format": -0.1, "answer": 1.0}, (), 6, 8),
    )  # fmt: skip
    names = {"id": "g1/0", "group_id": "g1", "task": "minihop", "source": "embedded", "example_id": "e1"}
    trajectory = make_trajectory(
        [-1, -1, -1, 0, 0, -1, 1, 1],
        **names,
        split="train",
        prompt="Question: Hauptstadt von Norwegen? \u2028 \U0001f600 \x00",
        token_ids=np.array([1, 2, 3, 70_000, 5, 6, 7, 8], np.int32),
        rollout_log_probs=np.array([0, 0, 0, -0.1, -1e-7, 0, -3.4e38, -np.inf], np.float32),
        turns=turns,
        reward=0.9,
        reward_items={"format": -0.1, "answer": 1.0},
        stop_reason=StopReason.INVALID,
        seed=2**63 - 1,
        error="search is out",
        metadata={"golden_answers": ["Oslo"], "hops": 2, "nested": {"a": None}},
    )
    return dataclasses.replace(trajectory, **changes)


def direct() -> Trajectory:
    """Everything that can be empty or None is: what Arrow cannot infer a type from."""
    turn = Turn(0, "<answer>Oslo</answer>", "answer", "Oslo", None, "", {}, (), 1, 2)
    return make_trajectory([-1, 0], rollout_log_probs=np.array([0, np.nan], np.float32), turns=(turn,))


def assert_same(left: Trajectory, right: Trajectory) -> None:
    for field in dataclasses.fields(Trajectory):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype and b.flags.writeable
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b and type(a) is type(b), field.name


def test_round_trip_is_exact(tmp_path: Path) -> None:
    written = [searched(), direct(), *(searched(stop_reason=reason, error=None) for reason in StopReason)]
    path = tmp_path / "t.jsonl"
    write_jsonl(path, iter(written))
    assert list(tmp_path.iterdir()) == [path]
    assert '"rollout_log_probs":[0.0,0.0,0.0,-0.1,-1e-07,' in path.read_text()  # with few digits
    for left, right in zip(written, read_jsonl(path), strict=True):
        assert_same(left, right)


def test_a_line_of_schema_2_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Written out by hand: whoever adds, drops or renames a field has to raise the version."""
    call = {"tool": "search", "argument": "q", "reply": "r", "ok": True, "error": None, "latency_s": 0.5}
    call |= {"hits": 3, "attempts": 1, "cached": False, "cut_from": 9}
    turn = {"index": 0, "text": "t", "kind": "tool", "content": "q", "format_error": "", "observation": "o"}
    turn |= {"reward_items": '{"x": 1.0}', "tool_calls": json.dumps([call]), "start": 1, "end": 2}
    turn |= {"policy_version": 3, "generate_s": 0.25, "tool_s": 0.5}
    record = {"id": "g/0", "group_id": "g", "task": "nq", "source": "s", "split": "train", "example_id": "e"}
    record |= {"prompt": "p", "token_ids": [1, 2], "action_mask": [False, True], "turn_ids": [-1, 0]}
    record |= {"rollout_log_probs": [0.0, -0.5], "turns": [turn], "reward": 1.0, "reward_items": '{"x": 1.0}'}
    record |= {"stop_reason": "max_turns", "seed": 7, "error": "", "metadata": "{}", "schema_version": 2}
    (tmp_path / "t.jsonl").write_text(json.dumps(record) + "\n")
    (found,) = read_jsonl(tmp_path / "t.jsonl")
    assert found.turns[0].tool_calls == (ToolCall("search", "q", "r", latency_s=0.5, hits=3, cut_from=9),)
    assert (found.turns[0].tool_s, found.stop_reason, found.error) == (0.5, StopReason.MAX_TURNS, None)
    write_jsonl(tmp_path / "again.jsonl", [found])
    assert json.loads((tmp_path / "again.jsonl").read_text()) == record


floats = st.floats(allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"])),
    items=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), floats, max_size=3),
    log_probs=st.lists(st.floats(width=32), max_size=6),
    hits=st.none() | st.integers(0, 9),
)
def test_any_text_and_any_float_survive(
    tmp_path_factory: pytest.TempPathFactory,
    text: str,
    items: dict[str, float],
    log_probs: list[float],
    hits: int | None,
) -> None:
    length = len(log_probs)
    call = CALL._replace(argument=text, reply=text, hits=hits, error=text)
    turn = dataclasses.replace(
        searched().turns[0], text=text, observation=text, reward_items=items, tool_calls=(call,)
    )
    trajectory = searched(
        prompt=text, reward_items=items, turns=(turn,), metadata={text: text},
        token_ids=np.arange(length, dtype=np.int32), action_mask=np.ones(length, np.bool_),
        turn_ids=np.zeros(length, np.int16), rollout_log_probs=np.array(log_probs, np.float32),
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("any")
    write_jsonl(folder / "t.jsonl", [trajectory])
    assert_same(trajectory, read_jsonl(folder / "t.jsonl")[0])


# --- datasets -------------------------------------------------------------------------------------
def test_loads_with_datasets_under_one_schema(tmp_path: Path) -> None:
    """In either order: the file that comes first fixes the schema, and an emptier one must not spoil it."""
    datasets = pytest.importorskip("datasets", reason="needs datasets: pip install -e '.[train]'")
    write_jsonl(tmp_path / "empty.jsonl", [direct()])
    write_jsonl(tmp_path / "full.jsonl", [searched()])

    def load(*names: str) -> Any:
        files = [str(tmp_path / f"{name}.jsonl") for name in names]
        cache = tmp_path / f"cache-{'-'.join(names)}"
        return datasets.load_dataset("json", data_files=files, split="train", cache_dir=str(cache))

    alone = [load("empty"), load("full")]
    assert alone[0].features == alone[1].features
    for together in (load("empty", "full"), load("full", "empty")):
        assert together.features == alone[0].features
        assert together.num_rows == 2
    row = load("full")[0]
    assert row["token_ids"] == [1, 2, 3, 70_000, 5, 6, 7, 8]
    assert json.loads(row["reward_items"]) == {"format": -0.1, "answer": 1.0}
    assert json.loads(row["turns"][0]["tool_calls"])[0]["hits"] == 3
    assert row["turns"][1]["format_error"] == "unclosed"


@pytest.mark.parametrize("name", ["prompt", "example_id", "error", "metadata", "turns"])
def test_half_surrogate_pairs_in_a_file_are_replaced(tmp_path: Path, name: str) -> None:
    half = "\ud800 x \ude00\ud83d"
    call = CALL._replace(argument=half, reply=half, error=half)
    turn = dataclasses.replace(searched().turns[0], text=half, observation=half, tool_calls=(call,))
    value: Any = {"metadata": {half: [half]}, "turns": (turn,)}.get(name, half)
    write_jsonl(tmp_path / "t.jsonl", [searched(**{name: value})])
    (found,) = read_jsonl(tmp_path / "t.jsonl")
    assert "\ufffd x \ufffd\ufffd" in repr(getattr(found, name))


# --- errors ---------------------------------------------------------------------------------------
def edit_line(path: Path, **changes: Any) -> None:
    write_jsonl(path, [searched(), searched()])
    first, second = path.read_text().splitlines()
    record = json.loads(second) | changes
    path.write_text(first + "\n" + json.dumps({k: v for k, v in record.items() if v is not ...}) + "\n")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"schema_version": 99}, r"t\.jsonl:2: schema_version is 99, but this version of sorl reads 2"),
        ({"schema_version": ...}, r"t\.jsonl:2: schema_version is None"),
        ({"turns": ...}, r"t\.jsonl:2: the field 'turns' is missing"),
        ({"id": ...}, r"t\.jsonl:2: .*missing 1 required positional argument: 'id'"),
        ({"rewards": 1.0}, r"t\.jsonl:2: .*unexpected keyword argument 'rewards'"),
        ({"stop_reason": "answered"}, r"t\.jsonl:2: 'answered' is not a valid StopReason"),
        ({"token_ids": [1]}, r"t\.jsonl:2: trajectory g1/0: action_mask has 8 entries, token_ids 1"),
        ({"token_ids": "x"}, r"t\.jsonl:2: .*invalid literal"),
        ({"reward_items": "{"}, r"t\.jsonl:2: "),
        ({"turns": [{"index": 0}]}, r"t\.jsonl:2: the field 'format_error' is missing"),
        ({"turns": [1]}, r"t\.jsonl:2: "),
        ({"reward_items": "[" * 100_000}, r"t\.jsonl:2: it is nested too deeply"),
        ({"metadata": "[" * 100_000}, r"t\.jsonl:2: it is nested too deeply"),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    edit_line(tmp_path / "t.jsonl", **changes)
    with pytest.raises(UserError, match=message):
        read_jsonl(tmp_path / "t.jsonl")


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("[" * 100_000 + "\n")
    with pytest.raises(UserError, match=r"t\.jsonl:1: not valid JSON \(it is nested too deeply\)"):
        read_jsonl(path)
    write_jsonl(path, [searched(), searched()])
    path.write_bytes(path.read_bytes()[:-40])
    rows = iter_jsonl(path)
    assert next(rows).id == "g1/0"
    with pytest.raises(UserError, match=r"t\.jsonl:2: not valid JSON .* so delete this last line"):
        next(rows)


def test_metadata_that_json_cannot_hold_is_refused_and_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("old")
    with pytest.raises(UserError, match=r"trajectory g1/0: metadata must hold JSON values.*set"):
        write_jsonl(path, [searched(), searched(metadata={"x": {1}})])
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
