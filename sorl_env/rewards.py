"""Rewards: pure functions of an answer and of what is right."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache

_PUNCTUATION = re.compile(f"[{re.escape(string.punctuation)}]+")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize_answer(text: str) -> str:
    """SQuAD's normal form: lower case, no ASCII punctuation, no articles, single spaces. Unicode is not normalized.

    >>> normalize_answer("The  Beatles!")
    'beatles'
    """
    return " ".join(_ARTICLES.sub(" ", _PUNCTUATION.sub("", text.lower())).split())


def exact_match(prediction: str, golds: Iterable[str]) -> float:
    """1.0 if the prediction equals a gold answer after normalization, else 0.0; without gold answers 0.0."""
    normal = normalize_answer(prediction)
    return float(any(normal == _normalize_gold(gold) for gold in golds))


# cached, because the rollouts of a group share their gold answers
_normalize_gold = lru_cache(maxsize=4096)(normalize_answer)


def answer_match(prediction: str, golds: Iterable[str]) -> float:
    """``exact_match`` as a reward. Gold answers that normalize to nothing are compared as they are written.

    ``A+``, ``!!!`` and ``The The`` all become the empty text, so ``exact_match``, which agrees with published scorers,
    counts each of them, and ``...`` and ``the``, as right for any other.

    >>> [answer_match(p, ["A+"]) for p in ("a+", "...", "the")]
    [1.0, 0.0, 0.0]
    """
    normal, plain = normalize_answer(prediction), prediction.strip().lower()
    forms = ((_normalize_gold(gold), gold) for gold in golds)
    return float(any(normal == form if form else _is(plain, gold) for form, gold in forms))


def _is(plain: str, gold: str) -> bool:
    return bool(plain) and plain == gold.strip().lower()


def substring_match(prediction: str, golds: Iterable[str]) -> float:
    """1.0 if a gold answer occurs in the prediction after normalization, else 0.0."""
    normal = normalize_answer(prediction)
    return float(any(normalize_answer(gold) in normal for gold in golds))


def f1(prediction: str, golds: Iterable[str]) -> float:
    """The best word-level F1 over the gold answers, after normalization; without gold answers 0.0."""
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

    Accepted, in upper or lower case: ``A``, ``A.``, ``(A)``, and ``A: text`` where the text is that option's, but for
    case, blanks and a final period. Nothing else is accepted: a prediction that hedges or only mentions a letter scores
    0.

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
    return float(option is not None and _plain(text) == _plain(option))


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).removesuffix(".").rstrip()
