"""Classes of characters and tokens, by hand and with real tokenizers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sorl_env.trajectory import Trajectory, Turn
from sorl_env.trajectory.token_classes import CLASSES, TokenClassifier, classify_text, token_spans

from ..trajectories import make_trajectory

LETTERS = "trqao"  # tag, reasoning, query, answer, other


def letters(text: str) -> str:
    return "".join(LETTERS[k] for k in classify_text(text))


def test_characters_by_hand() -> None:
    whole = "t" * 7 + "rr" + "t" * 8 + "o" + "t" * 8 + "q" + "t" * 10
    assert letters("<think>ab</think> <search>c</search>") == whole
    assert letters("<answer>x</answer>")[8] == "a"
    assert letters("hm <think>a") == "ooo" + "t" * 7 + "rr"  # the end of the text belongs to the open block
    assert letters("") == "o"
    assert letters("a < b") == "oooooo"  # no tag


def test_pieces_that_do_not_add_up_to_the_text() -> None:
    assert token_spans("<think> ab", ["<think>", "ab"]) == [(0, 7), (8, 10)]  # a word-level tokenizer
    bytes_of_one = token_spans("a\u00e9b", ["a", "\ufffd", "\ufffd", "b"])
    assert bytes_of_one == [(0, 1), (1, 1), (1, 1), (2, 3)]
    assert token_spans("ab>", ["ab", ">\n"]) == [(0, 2), (2, 3)]  # a token that runs over the end
    assert token_spans("ab", ["ab", "\n", "cd"]) == [(0, 2), (2, 2), (2, 2)]


def trajectory(text: str, ids: list[int], prompt: int) -> Trajectory:
    turn = Turn(0, text, "tool", "q", None, "", {}, (), start=prompt, end=prompt + len(ids))
    token_ids = np.array([0] * prompt + ids, dtype=np.int32)
    return make_trajectory([-1] * prompt + [0] * len(ids), token_ids=token_ids, turns=(turn,))


def classes_of(tokenizer: Any, text: str) -> list[tuple[str, str]]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    drawn, classifier = trajectory(text, ids, prompt=2), TokenClassifier(tokenizer)
    found, texts = classifier(drawn), classifier.texts(drawn)
    assert found[:2].tolist() == [-1, -1]
    assert len(texts) == len(ids)
    assert "".join(texts) == text or not text.isascii()  # a token may be a part of a character
    return [(tokenizer.decode([token]), CLASSES[kind]) for token, kind in zip(ids, found[2:], strict=True)]


@pytest.mark.slow
def test_byte_level_tokens(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    text = "<think>Where is caf\u00e9 \u7530?</think>\n<search>caf\u00e9 \u7530</search>"
    found = classes_of(tokenizer, text)
    by_class = {name: "".join(piece for piece, kind in found if kind == name) for name in CLASSES}
    assert "Where" in by_class["reasoning"] and "Where" not in by_class["query"]
    assert by_class["query"].strip().startswith("caf")
    assert "think" in by_class["tag"] and "search" in by_class["tag"]
    assert by_class["answer"] == ""


def test_excluded_and_empty_turns(tiny_tokenizer: Any) -> None:
    empty = trajectory("", [], prompt=3)
    assert TokenClassifier(tiny_tokenizer)(empty).tolist() == [-1, -1, -1]
    assert TokenClassifier(tiny_tokenizer)(dataclasses.replace(empty, turns=())).tolist() == [-1, -1, -1]


def test_word_level_tokens(tiny_tokenizer: Any) -> None:
    found = classes_of(tiny_tokenizer, "<think> I need a search . </think> <search> of </search>")
    assert [kind for piece, kind in found if piece.strip().startswith("<")] == ["tag"] * 4
    assert {kind for _, kind in found} == {"tag", "reasoning", "query"}


@pytest.fixture(scope="module")
def tiny_tokenizer() -> Any:
    pytest.importorskip("torch", reason="needs torch: pip install -e '.[train]'")
    from sorl_train.models.tiny import word_tokenizer

    tags = " ".join(f"<{name}> </{name}>" for name in ("think", "search", "answer"))
    return word_tokenizer([f"{tags} I need a search . of"], 100)
