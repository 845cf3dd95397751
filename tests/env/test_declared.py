"""What a task's own functions give that they may not: one message that says where, and what to write."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import numpy as np
import pytest

from sorl_env import UserError
from sorl_env.outside import ask_for_items, ask_for_prompt

HERE = re.escape(__file__)


def give(value: Any) -> Any:
    return value


def test_items_are_a_copy_with_plain_numbers() -> None:
    items = {"a": 1.0, "b": -0.5, "c": True, "d": np.float32(0.5), "e": np.int64(2)}
    checked = ask_for_items("toy", give, items)
    assert checked == items and checked is not items
    assert all(isinstance(value, (int, float)) for value in checked.values())


@pytest.mark.parametrize(
    ("items", "said"),
    [
        (None, "returned None; "),
        (1.0, r"returned 1.0 \(float\); "),
        ([("a", 1.0)], r"returned \[\('a', 1.0\)\] \(list\); "),
        ({"a": None}, r"returned 'a' \(str\): None among its items; "),
        ({"a": "1"}, r"returned 'a' \(str\): '1' \(str\) among its items; "),
        ({1: 1.0}, r"returned 1 \(int\): 1.0 \(float\) among its items; "),
    ],
)
def test_what_is_no_reward(items: Any, said: str) -> None:
    with pytest.raises(
        UserError, match=rf"^task toy: its reward \({HERE}:\d+\) {said}return {{name: number}}, "
    ):
        ask_for_items("toy", functools.partial(give), items)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_items_are_finite(value: float) -> None:
    with pytest.raises(
        UserError, match=r"^task toy: its reward .*:\d+\) gave item 'b' as (nan|inf|-inf); it must be finite"
    ):
        ask_for_items("toy", give, {"a": 1.0, "b": value})


@pytest.mark.parametrize("text", [None, 3, b"bytes"])
def test_what_is_no_prompt(text: Any) -> None:
    with pytest.raises(UserError, match=rf"^task toy: its prompt \({HERE}:\d+\) returned .*; return a text"):
        ask_for_prompt("toy", give, text)
