"""Scores of an answer, and what several samples of a question add up to. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from sorl_env.errors import UserError, did_you_mean
from sorl_env.rewards import exact_match, f1, normalize_answer, substring_match
from sorl_train.evaluate.answers import extract_choice

REWARDS = ("em", "f1", "subem", "choice")


def score(reward: str, answer: str | None, golds: Sequence[str], options: Mapping[str, str] | None) -> float:
    """One score in [0, 1] of an answer; an absent answer scores 0.

    ``em``, ``f1`` and ``subem`` are SQuAD's over the gold answers, ``choice`` asks for the right option (see
    `extract_choice`), whose letter is the only gold answer.

    Raises:
        UserError: an unknown reward, or ``choice`` without options.
    """
    if reward not in REWARDS:
        raise UserError(f"there is no reward {reward!r}. {did_you_mean(reward, REWARDS)}")
    if reward == "choice":
        if not options:
            raise UserError("reward 'choice' needs questions with options; use em, f1 or subem")
        return float(answer is not None and extract_choice(answer, options) == golds[0].strip().upper())
    if answer is None:
        return 0.0
    return {"em": exact_match, "f1": f1, "subem": substring_match}[reward](answer, golds)


def scores(answer: str | None, golds: Sequence[str], options: Mapping[str, str] | None) -> dict[str, float]:
    """All scores that apply; the first one is the question's main score."""
    names = ("choice",) if options else ("em", "f1", "subem")
    return {name: score(name, answer, golds, options) for name in names}


def answer_in_text(text: str, golds: Iterable[str], options: Mapping[str, str] | None) -> bool:
    """Whether retrieved text holds a gold answer (for multiple choice the right option's text) as whole words."""
    sought = [options.get(gold, "") for gold in golds] if options else list(golds)
    padded = f" {normalize_answer(text)} "
    return any(words and f" {words} " in padded for words in map(normalize_answer, sought))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that at least one of ``k`` samples, drawn without replacement from those taken, is right.

    The unbiased estimator of Chen et al. (2021, arXiv 2107.03374): 1 - C(n - c, k) / C(n, k).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass_at_k({num_samples}, {num_correct}, {k}): need 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def ks(num_samples: int) -> list[int]:
    """The k that are reported: powers of two up to the number of samples, and that number."""
    powers = [2**i for i in range(num_samples.bit_length()) if 2**i < num_samples]
    return [*powers, num_samples]
