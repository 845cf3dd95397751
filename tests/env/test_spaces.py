"""The space of strings."""

from __future__ import annotations

import copy
import pickle

from gymnasium.spaces import Text
from hypothesis import given
from hypothesis import strategies as st

from sorl_env import UnicodeText


@given(st.text())
def test_every_string_is_in_it(text: str) -> None:
    assert text in UnicodeText()
    assert text.encode() not in UnicodeText()


def test_nothing_else_is() -> None:
    assert not any(value in UnicodeText() for value in (None, 1, b"x", ["x"]))


def test_samples_are_seeded() -> None:
    space, other = UnicodeText(seed=5), UnicodeText()
    other.seed(5)
    samples = [space.sample() for _ in range(200)]
    assert samples == [other.sample() for _ in range(200)]
    assert len(set(samples)) > 190 and all(1 <= len(sample) <= 64 for sample in samples)
    assert {"<", "/", "漢"} <= set("".join(samples))


def test_it_is_a_text_space_that_can_be_copied() -> None:
    space = UnicodeText(seed=1)
    assert isinstance(space, Text) and not space.is_np_flattenable
    assert space == UnicodeText() != Text(64)
    assert repr(space) == "UnicodeText()"
    for twin in (copy.deepcopy(space), pickle.loads(pickle.dumps(space))):
        assert twin.sample() == copy.deepcopy(space).sample()
