"""Where text enters: it is valid behind the border, and no longer than the limit, whoever brought it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sorl_env import (
    Example,
    Limits,
    Task,
    Toolbox,
    ToolCall,
    ToolInputError,
    ToolReply,
    ToolUnavailableError,
    ToolUseEnv,
    UserError,
)
from sorl_env.task.data import load_examples
from sorl_env.text import MAX_DEPTH, read_json, valid_text

from .conftest import REQUEST, Call, Scripted

LONE = "a\ud800b \ude00\ud83d c\ud83d\ude00"
VALID = "a\ufffdb \ufffd\ufffd c\U0001f600"
BIG = 5_000_000


def saying(result: Any) -> Scripted:
    tool = Scripted(result)
    tool.inline = True
    return tool


@pytest.mark.parametrize("result", [LONE, ToolReply(LONE, hits=1), ToolInputError(LONE)], ids=repr)
def test_what_a_tool_says_is_valid_text(call: Call, result: Any) -> None:
    outcome = call(Toolbox([saying(result)]), REQUEST)
    assert isinstance(outcome, ToolCall)
    assert outcome.reply == VALID and outcome.error in (None, VALID) and outcome.cut_from is None


@pytest.mark.parametrize("error", [ConnectionError, KeyError, ToolUnavailableError])
def test_why_a_tool_is_out_is_valid_and_short(call: Call, error: type[Exception]) -> None:
    outcome = call(Toolbox([saying(error(LONE + "x" * BIG))], retries=0), REQUEST)
    assert isinstance(outcome, ToolUnavailableError) and outcome.call is not None
    for text in (str(outcome), outcome.call.error or ""):
        assert len(text) < 2000
        text.encode()


@pytest.mark.parametrize("make", [str, ToolReply, ToolInputError])
def test_a_long_reply_is_cut_and_its_record_says_so(call: Call, make: Any) -> None:
    outcome = call(Toolbox([saying(make("x" * BIG))], max_reply_chars=100), REQUEST)
    assert outcome.reply == "x" * 100 and outcome.cut_from == BIG
    assert outcome.error in (None, outcome.reply)
    whole = call(Toolbox([saying(make("x" * 100))], max_reply_chars=100), REQUEST)
    assert whole.reply == "x" * 100 and whole.cut_from is None


@pytest.mark.parametrize(
    ("result", "named"), [(ToolReply(None), "ToolReply with NoneType"), (7, "int"), (b"x", "bytes")]
)
def test_a_reply_that_is_no_text_is_the_tools_bug(call: Call, result: Any, named: str) -> None:
    outcome = call(Toolbox([saying(result)]), REQUEST)
    assert isinstance(outcome, ToolUnavailableError) and f"it returned {named}, expected" in str(outcome)


def test_the_hits_of_a_reply_are_a_number_that_json_can_write(call: Call) -> None:
    outcome = call(Toolbox([saying(ToolReply("found", hits=np.int64(2)))]), REQUEST)
    assert type(outcome.hits) is int and outcome.hits == 2
    half = call(Toolbox([saying(ToolReply("found", hits=0.5))]), REQUEST)
    assert isinstance(half, ToolUnavailableError) and "hits=0.5, which is not a whole number" in str(half)


# --- the environment ---


def halves(**changes: Any) -> Task:
    """A task whose every text has half a surrogate pair."""
    example = Example(LONE, LONE, (LONE,), options={"A": LONE}, metadata={"a": LONE})
    return Task(**{
        "name": "halves", "prompt": lambda example: LONE + example.question, "embedded": lambda split: [example],
        "reward": lambda example, turns: {"x": float(turns[-1].content in example.golden_answers)},
        "parse_row": lambda row: Example(row["id"], row["question"], tuple(row["golden_answers"]), row.get("options")),
        "tools": [saying(LONE)], **changes,
    })  # fmt: skip


@pytest.mark.parametrize("ascii_only", [True, False])
def test_rows_of_files_are_valid_text(tmp_path: Path, ascii_only: bool) -> None:
    row = {"id": LONE, "question": LONE, "golden_answers": [LONE], "options": {"A": LONE}}
    line = json.dumps(row, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    (tmp_path / "rows.jsonl").write_bytes(line + b"\n")
    (example,) = load_examples(halves(), str(tmp_path / "rows.jsonl")).examples
    assert example == Example(VALID, VALID, (VALID,), options={"A": VALID})


def test_a_parquet_file_with_what_is_no_text_is_named(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install -e '.[train]'")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install -e '.[train]'")
    text = pa.array([b"\xff\xfe"], pa.binary()).cast(pa.string(), safe=False)
    parquet.write_table(pa.table({"question": text}), tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=r"rows\.parquet: a text is not UTF-8"):
        load_examples(halves(), str(tmp_path / "rows.parquet"))


def test_an_episode_in_half_pairs() -> None:
    env = ToolUseEnv(halves())
    prompt, info = env.reset()
    assert prompt == VALID + VALID and info["question"] == info["example_id"] == VALID
    result = env.step(f"<think>{LONE}</think><search>{LONE}</search>")
    assert result.observation == f"\n\n<information>\n{VALID}\n</information>\n\n"
    (call,) = result.info["tool_calls"]
    assert (call.argument, call.reply) == (VALID, VALID)
    result = env.step(f"<think>{LONE}</think><answer>{LONE}</answer>")
    assert result.reward == 1.0 and result.info["parsed"].content == result.info["parsed"].think == VALID


def test_the_limit_on_replies_follows_the_tokens_or_is_set() -> None:
    assert Limits().reply_chars == 8000
    assert Limits(max_observation_tokens=10).reply_chars == 160
    assert Limits(max_reply_chars=7).reply_chars == 7
    env = ToolUseEnv(halves(tools=[saying("x" * BIG)]), limits=Limits(max_observation_tokens=10))
    env.reset()
    result = env.step("<think>a</think><search>b</search>")
    assert result.observation == f"\n\n<information>\n{'x' * 160}\n</information>\n\n"
    assert result.info["tool_calls"][0].cut_from == BIG


# --- the functions that all texts pass through ---
SURROGATES = st.text(st.characters(min_codepoint=0xD7F0, max_codepoint=0xE010) | st.characters())


@given(SURROGATES)
def test_valid_text_can_be_encoded_and_keeps_what_was_valid(text):
    assert valid_text(LONE) == VALID  # a split pair is joined, a lone half is replaced
    result = valid_text(text)
    result.encode("utf-8")
    assert valid_text(result) == result
    if not any(0xD800 <= ord(c) <= 0xDFFF for c in text):
        assert result == text


@given(
    st.recursive(
        st.none() | SURROGATES | st.integers(), lambda x: st.lists(x) | st.dictionaries(SURROGATES, x)
    )
)
def test_read_json_of_any_value_holds_valid_text_only(value):
    for ascii_only in (True, False):
        json.dumps(read_json(json.dumps(value, ensure_ascii=ascii_only)), ensure_ascii=False).encode("utf-8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 200_000, "nested too deeply"),
        ('{"a":' * 200_000, "nested too deeply"),
        ("1" * 5_000, "4300 digits"),
        ("{'a': 1}", "it is not JSON"),
        (b"\xff\xfe\xfd", "it is not"),
        (b'"\xff"', "it is not UTF-8"),
        ("", "it is not JSON"),
    ],
)
def test_read_json_reads_bytes_as_json_loads_does_and_raises_one_kind_of_error(text, message):
    wide = '{"ä": [1, null]}'
    assert read_json(wide.encode()) == read_json(wide.encode("utf-16")) == {"ä": [1, None]}
    with pytest.raises(ValueError, match=message):
        read_json(text)


@pytest.mark.parametrize("opening,closing", [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_the_limit_on_depth_is_a_number_and_not_the_stack(opening, closing):
    levels = MAX_DEPTH // (opening.count("[") + opening.count("{"))
    read_json(opening * levels + "1" + closing * levels)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(opening * (levels + 1) + "1" + closing * (levels + 1))
    wide = "[" + ",".join(['{"text": "[[[{{{"}'] * 500) + "]"
    assert len(read_json(wide)) == 500
