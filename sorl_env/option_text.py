r"""Compare the texts of multiple-choice options: two texts mean the same if their words are equal.

SQuAD's normal form (`sorl_env.rewards.normalize_answer`) is made for names and removes too much here. This module keeps
what distinguishes the options of an examination: numbers (``9.3`` is not ``93``), signs (``Rh+ve``, ``-5``, ``< 5 %``)
and single letters (``vitamin A``). Case, "the", quotation marks, brackets, emphasis and punctuation are ignored.
"""

from __future__ import annotations

import re

_WORD = re.compile(
    r"(?:(?<![^\W_])\.)?\d+(?:[.,:]\d+)*"  # 5, 9.3, .5, 1,000, 1:4
    r"|[^\W\d_]+(?:['\u2019][^\W\d_]+)*"  # zinc, Crohn's
    r"|\\[A-Za-z]+"  # a command of LaTeX
    r"|\S|\n"
)
_HYPHENS = "-\u2010\u2011\u2012\u2013\u2212"
_SILENT = frozenset(
    ".,;:!?'\"`\u00b4\u2018\u2019\u201c\u201d\u00ab\u00bb()[]{}*_#$\\|\u2022\u00b7\u2026\u2014\n"
    "\u200b\u200e\u200f\u2060\ufeff\ufe0f"  # invisible
)
# LaTeX commands that only change how a text looks. Others carry meaning: an \alpha blocker is not a \beta blocker.
_FORMATTING = frozenset(
    "\\boxed \\fbox \\text \\textbf \\textit \\textrm \\emph \\underline \\mathrm \\mathbf \\mathit \\mathsf "
    "\\operatorname \\left \\right \\displaystyle \\quad \\qquad \\bf \\it \\rm".split()
)
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def option_words(text: str) -> tuple[str, ...]:
    """The words of a text that count, without an article at the beginning.

    >>> option_words("The beta-blocker (9.30 mg)."), option_words("vitamin A"), option_words("Rh-ve")
    (('beta', 'blocker', '9.30', 'mg'), ('vitamin', 'a'), ('rh', '-', 've'))
    """
    found = [match.span() for match in _WORD.finditer(text)]
    words = tuple(filter(None, (_key(text, found, index) for index in range(len(found)))))
    return words[1:] if _starts_with_article(words) else words


def _starts_with_article(words: tuple[str, ...]) -> bool:
    """Whether the first word is an article. In "A and B", "A 1", "A antigen" and "A" alone it is a letter."""
    if len(words) < 2 or words[0] not in ("a", "an") or len(words[1]) < 3 or words[1] in _NO_NOUNS:
        return False
    sounds_like_a_vowel = words[1][0] in "aeio" and not words[1].startswith(("eu", "one", "once"))
    return words[0] == "an" or not sounds_like_a_vowel


_NO_NOUNS = frozenset(("and", "nor", "only", "alone", "but", "not", "plus", "are"))


def _key(text: str, found: list[tuple[int, int]], index: int) -> str:
    """What is compared of a word, a number or a sign; empty for punctuation, brackets and "the"."""
    start, end = found[index]
    word = text[start:end]
    if word in _HYPHENS:
        return "-" if _is_sign(text, found, index) else ""
    if word in _SILENT or word in _FORMATTING:
        return ""
    if word[0].isdigit() or word[0] == ".":
        number = word.replace(",", "") if _THOUSANDS.fullmatch(word) else word
        return f"0{number}" if number[0] == "." else number
    key = word.casefold().replace("'", "").replace("\u2019", "")
    return {"the": "", "&": "and"}.get(key, key)


def _is_sign(text: str, found: list[tuple[int, int]], index: int) -> bool:
    """Whether a hyphen is a minus (``-5``, ``Rh-``, ``-ve``) or stands between two numbers, as in ``5-10``."""
    start, end = found[index]
    before = text[slice(*found[index - 1])] if index else ""
    after = text[slice(*found[index + 1])] if index + 1 < len(found) else ""
    touches_before = bool(before) and found[index - 1][1] == start and before[-1].isalnum()
    touches_after = bool(after) and found[index + 1][0] == end and after[0].isalnum()
    if before[-1:].isdigit() and after[:1].isdigit():
        return True
    if touches_after and (after.casefold() == "ve" or (after[0].isdigit() and not touches_before)):
        return True
    return touches_before and not touches_after
