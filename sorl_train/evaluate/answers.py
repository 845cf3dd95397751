"""The answer that a text gives, and its scores. Pure functions.

A policy may write anything, so reading a text takes time in proportion to its length, whatever it contains.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from sorl_env.rewards import exact_match, f1, multiple_choice, substring_match


class Answer(NamedTuple):
    """An answer, and where it was found: in the tags, after "the answer is", or the text itself is the answer."""

    text: str
    where: Literal["tag", "phrase", "text"]


_PHRASE = re.compile(
    r"\banswer(?:\s{1,9}to\s{1,9}the\s{1,9}question)?(?:\s{1,9}is\b|\s{0,9}:)", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"(?<!\b[A-Z])\.(?:\s|$)")  # "J. Smith" goes on
_REASON = re.compile(r"[,.]? (?:because|since|as)\b.*", re.DOTALL)  # behind a letter: "(A), because .."


def read_answer(output: str, mode: str, options: Mapping[str, str] | None = None) -> Answer | None:
    """The answer that one turn gives; None if it gives none. The last ``<answer>`` block counts. Without a block, it is
    the rest of the sentence after the last "the answer is". Without that, mode ``direct`` takes the first line, because
    its prompt asks for nothing but the answer. The other prompts ask for the tags, so a turn without them has not
    answered, unless it is nothing but an option's letter. Outside of a block only what names one of the ``options``, as
    `multiple_choice` reads it, is an answer to a question that has options. Nothing is guessed."""
    block = _last_block(output)
    if block is not None:
        return Answer(block.strip(), "tag")
    plain = _without_thoughts(output).strip()
    found = _after_the_phrase(plain)
    if found is None and plain and (mode == "direct" or options):
        found = Answer(plain.split("\n", 1)[0].strip() if mode == "direct" else plain, "text")
    if found is None or not options:
        return found
    for text in (found.text, _REASON.sub("", found.text)):
        if any(multiple_choice(text, letter, options) for letter in options):
            return Answer(text, found.where)
    return None


def _after_the_phrase(plain: str) -> Answer | None:
    """The rest of the sentence after the last "the answer is" that has one."""
    end = len(plain)
    for phrase in reversed(list(_PHRASE.finditer(plain))):
        said = plain[phrase.end() : end].lstrip(":* \t\r\n")
        if said:
            said = said.split("\n", 1)[0]
            stop = _SENTENCE_END.search(said)
            return Answer((said[: stop.start()] if stop else said).strip(" *"), "phrase")
        end = phrase.start()
    return None


def _last_block(output: str) -> str | None:
    spans = list(_blocks(output, "answer"))
    return output[spans[-1][0] + len("<answer>") : spans[-1][1] - len("</answer>")] if spans else None


def _without_thoughts(output: str) -> str:
    kept, at = [], 0
    for start, end in _blocks(output, "think"):
        kept.append(output[at:start])
        at = end
    return " ".join([*kept, output[at:]])


def _blocks(text: str, tag: str) -> Iterator[tuple[int, int]]:
    """Where the closed blocks of a tag begin and end, tags included."""
    end = 0
    while (start := text.find(f"<{tag}>", end)) >= 0 and (close := text.find(f"</{tag}>", start)) >= 0:
        end = close + len(f"</{tag}>")
        yield start, end


def scores(answer: str | None, golds: Sequence[str], options: Mapping[str, str] | None) -> dict[str, float]:
    """All scores in [0, 1] that apply to a question; the first one is its main score. No answer scores 0. ``em``,
    ``f1`` and ``subem`` are SQuAD's scores, the best over the gold answers. A question with options has ``choice``, the
    reward of training: 1 for the right option (`multiple_choice`), whose letter is the gold answer."""
    if options:
        return {"choice": multiple_choice(answer, golds[0], options) if golds and answer is not None else 0.0}
    rules = {"em": exact_match, "f1": f1, "subem": substring_match}
    return {name: 0.0 if answer is None else rule(answer, golds) for name, rule in rules.items()}


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The chance that at least one of ``k`` samples is right, if they are drawn from those taken without replacement.

    The unbiased estimator of Chen et al. (2021, arXiv 2107.03374): 1 - C(n - c, k) / C(n, k).

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass_at_k({num_samples}, {num_correct}, {k}): need 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def ks(num_samples: int) -> list[int]:
    """The values of k to report: powers of two below the number of samples, and that number."""
    powers = [2**i for i in range(num_samples.bit_length()) if 2**i < num_samples]
    return [*powers, num_samples]
