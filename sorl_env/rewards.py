"""Rewards: pure functions of an answer, or of a whole rollout's text."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache

from sorl_env.option_text import option_words

_PUNCTUATION = re.compile(f"[{re.escape(string.punctuation)}]+")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize_answer(text: str) -> str:
    """SQuAD's normal form: lower case, no ASCII punctuation, no articles, single spaces. No Unicode normalization.

    >>> normalize_answer("The  Beatles!")
    'beatles'
    """
    return " ".join(_ARTICLES.sub(" ", _PUNCTUATION.sub("", text.lower())).split())


def exact_match(prediction: str, golds: Iterable[str]) -> float:
    """1.0 if the prediction equals a gold answer after normalization, else 0.0; no golds give 0.0."""
    normal = normalize_answer(prediction)
    return float(any(normal == _normalize_gold(gold) for gold in golds))


_normalize_gold = lru_cache(maxsize=4096)(
    normalize_answer
)  # the rollouts of a group share their gold answers


def substring_match(prediction: str, golds: Iterable[str]) -> float:
    """1.0 if a gold answer occurs in the prediction after normalization, else 0.0."""
    normal = normalize_answer(prediction)
    return float(any(normalize_answer(gold) in normal for gold in golds))


def f1(prediction: str, golds: Iterable[str]) -> float:
    """Best word-level F1 over the gold answers, after normalization; 0.0 for no golds."""
    words = Counter(normalize_answer(prediction).split())
    return max((_f1(words, Counter(normalize_answer(gold).split())) for gold in golds), default=0.0)


def _f1(prediction: Counter[str], gold: Counter[str]) -> float:
    if not prediction or not gold:
        return float(prediction == gold)
    return 2 * sum((prediction & gold).values()) / (sum(prediction.values()) + sum(gold.values()))


# ASCII: without it, the dotless i (U+0131) is read as the letter I
_CHOICE = re.compile(r"(?:([A-Z])\.?|\(([A-Z])\)|([A-Z]):(.+))", re.IGNORECASE | re.DOTALL | re.ASCII)


def multiple_choice(prediction: str, answer_letter: str, options: Mapping[str, str] | None = None) -> float:
    """1.0 if the prediction names the answer's letter, else 0.0.

    Accepted, in either case: ``A``, ``A.``, ``(A)``, and ``A: text`` where the text is that option's own, word for
    word: numbers, signs and single letters count (see `sorl_env.option_text`). Nothing else is accepted: a prediction
    that hedges or only mentions a letter scores 0.

    >>> [multiple_choice(p, "A", {"A": "Iron", "B": "Zinc"}) for p in ("(a)", "A: iron", "A: zinc", "A or B")]
    [1.0, 1.0, 0.0, 0.0]
    """
    match = _CHOICE.fullmatch(prediction.strip())
    if match is None:
        return 0.0
    plain, bracketed, labelled, text = match.groups()
    letter = (plain or bracketed or labelled).upper()
    if letter != answer_letter.strip().upper():
        return 0.0
    if text is None:
        return 1.0
    option = (options or {}).get(letter)
    return float(option is not None and option_words(text) == option_words(option))


_ASSISTANT = re.compile(r"<\|im_start\|>assistant\s*")
_BLOCKS = ("think", "search", "information", "answer")
_TAG = re.compile(rf"</?(?:{'|'.join(_BLOCKS)})>")
# state -> tag -> next state; text other than whitespace may stand inside blocks only
_MOVES: Mapping[str, Mapping[str, str]] = {
    "start": {"<think>": "in_think"},
    "in_think": {"</think>": "after_think"},
    "after_think": {"<search>": "in_search", "<answer>": "in_answer"},
    "in_search": {"</search>": "after_search"},
    "after_search": {"<information>": "in_information"},
    "in_information": {"</information>": "start"},
    "in_answer": {"</answer>": "end"},
    "end": {},
}


def search_r1_valid_format(rollout_text: str) -> bool:
    """Judge a whole rollout the way Search-R1's format reward does.

    Everything after the first ``<|im_start|>assistant`` must read: think, search, information, any number of times,
    then think, answer, and nothing more. Retrieved text counts too: a tag in it breaks the sequence.
    """
    marker = _ASSISTANT.search(rollout_text)
    if marker is None:
        return False
    state, position = "start", marker.end()
    for tag in _TAG.finditer(rollout_text, position):
        if not state.startswith("in_") and rollout_text[position : tag.start()].strip():
            return False
        next_state = _MOVES[state].get(tag[0])
        if next_state is None:
            return False
        state, position = next_state, tag.end()
    return state == "end" and not rollout_text[position:].strip()


def check_reward_items(items: Mapping[str, float], task: str) -> dict[str, float]:
    """The items as a dictionary of one's own.

    Raises:
        ValueError: one of them is NaN or infinite, which would poison a whole batch.
    """
    for name, value in items.items():
        if not math.isfinite(value):
            raise ValueError(f"task {task}: reward item {name!r} is {value}")
    return dict(items)
