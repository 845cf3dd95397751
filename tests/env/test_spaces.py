"""The space of strings."""

from __future__ import annotations

import copy
import pickle

from gymnasium.spaces import Text
from hypothesis import given
from hypothesis import strategies as st

from sorl_env import UnicodeText


@given(st.text())
def test_every_string_is_in_it_and_nothing_else(text: str) -> None:
    assert text in UnicodeText()
    assert not any(value in UnicodeText() for value in (text.encode("utf-8", "replace"), [text], None, 1))


def test_samples_are_seeded_and_copies_draw_the_same() -> None:
    space = UnicodeText(seed=5)
    twins = [copy.deepcopy(space), pickle.loads(pickle.dumps(space))]
    samples = [space.sample() for _ in range(200)]
    assert all([twin.sample() for _ in range(200)] == samples for twin in twins)
    assert len(set(samples)) > 190 and {"<", "/", "漢"} <= set("".join(samples))
    assert isinstance(space, Text) and space == UnicodeText() != Text(64) and repr(space) == "UnicodeText()"
