"""What an output says: its answer, and for multiple choice the letter. Pure functions of text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from sorl_env.rewards import normalize_answer


class Answer(NamedTuple):
    """The answer of an output, and where it stood: in the tags, after "the answer is", or as the text itself."""

    text: str
    where: Literal["tag", "phrase", "text"]


_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_THINK = re.compile(r"<think>.*?</think>", re.DOTALL)
_PHRASE = re.compile(
    r"\banswer(?:\s+to\s+the\s+question)?(?:\s+is\s*:?|\s*:)\s*(?P<said>[^\n]+)", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"(?<!\b[A-Z])\.(?:\s|$)")  # "J. Smith" goes on


def read_answer(output: str, mode: str) -> Answer | None:
    """The answer to an open question in the output of one turn; None where it gives none.

    The last ``<answer>`` block counts. Without one: what follows the last "the answer is", up to the end of the
    sentence. Without that, ``direct`` was asked for nothing but the answer, and its first line is taken; the other
    modes were asked for the tags and have not answered.
    """
    tags = _TAG.findall(output)
    if tags:
        return Answer(tags[-1].strip(), "tag")
    plain = _THINK.sub(" ", output).strip()
    said = [match["said"] for match in _PHRASE.finditer(plain)]
    if said:
        end = _SENTENCE_END.search(said[-1])
        return Answer((said[-1][: end.start()] if end else said[-1]).strip(), "phrase")
    if mode == "direct" and plain:
        return Answer(plain.splitlines()[0].strip(), "text")
    return None


def read_choice(output: str, options: Mapping[str, str]) -> str | None:
    """The letter that the output of one turn chooses: in its last ``<answer>`` block if it has one, else anywhere
    outside its thoughts (see `extract_choice`)."""
    tags = _TAG.findall(output)
    return extract_choice(tags[-1] if tags else _THINK.sub(" ", output), options)


_SAYS = r"(?:is|are|would be|must be|should be|=|:)"
_LABEL = r"(?:option|choice|letter)?\s*[\(\[\*\"'`{]*(?P<letter>[A-Ja-j])(?![\w'\u2019])[\)\]\*\"'`}]*"
# "the answer is B", "Answer: (b)", "correct option would be C", "I choose D", "\boxed{A}"
_DECLARED = re.compile(
    rf"(?:\b(?:answer|option|choice)\b\s*{_SAYS}+\s*:?\s*(?:definitely|probably|therefore|clearly)?\s*"
    rf"|\b(?:choose|chose|pick|select|go with)\s+|\\boxed\s*|\\text\s*)+{_LABEL}",
    re.IGNORECASE,
)
# "B is correct", "(C) is the best answer"
_AFFIRMED = re.compile(
    r"(?<![\w'\u2019])(?P<letter>[A-J])(?![\w'\u2019])[\)\]\*]*\s+is\s+(?:the\s+)?(?:most\s+likely\s+)?(?:correct|right|best|answer)"
)
_WHOLE = re.compile(rf"\W*{_LABEL}\W*(?P<rest>.*)", re.IGNORECASE | re.DOTALL)
_PARTICLES = frozenset(("yes", "no", "maybe", "none", "true", "false", "all"))
_FEW_WORDS = 4
_BRACKETED = re.compile(r"[\(\[\*]+(?P<letter>[A-Ja-j])[\)\]\*]+")
# an upper-case letter on its own; "A man" and "I think" are words
_ALONE = re.compile(
    r"(?<![\w'\u2019.-])(?P<letter>[B-HJ]|[AI](?!\s+(?!(?:or|and)\s+[A-J]\b)[a-z]))(?![\w'\u2019-])"
)
_ALTERNATIVE = re.compile(
    r"\s*(?:,|/|&|or|and|\+)\s*[\(\[\*]*(?P<letter>[A-Ja-j])(?![\w'\u2019])", re.IGNORECASE
)


def extract_choice(text: str, options: Mapping[str, str]) -> str | None:
    """The letter of the option that ``text`` chooses; None where it chooses none, or hedges between several.

    In this order: the text is a letter (with brackets, or that option's text behind it) or an option's text; the last
    letter it declares ("the answer is B", "B is correct", ``\\boxed{B}``), or the option's text after such words; one
    letter in brackets; one option's text; one upper-case letter on its own. A step that finds two letters ends it.

    >>> options = {"A": "Iron", "B": "Zinc"}
    >>> [extract_choice(t, options) for t in ("b", "The answer is (A).", "It must be zinc.", "A or B", "Copper")]
    ['B', 'A', 'B', None, None]
    """
    text = text.strip()
    whole = _read_whole(text, options)
    if whole is not None:
        return whole or None
    declared = sorted([*_DECLARED.finditer(text), *_AFFIRMED.finditer(text)], key=lambda match: match.start())
    declared = [match for match in declared if match["letter"].upper() in options]
    if declared:
        last = declared[-1]
        other = _ALTERNATIVE.match(text, last.end())
        hedged = other is not None and other["letter"].upper() != last["letter"].upper()
        return None if hedged else last["letter"].upper()
    said = [match["said"] for match in _PHRASE.finditer(text)]
    if said and (named := _named_options(said[-1], options)):
        return named.pop() if len(named) == 1 else None
    for letters in (
        {match["letter"].upper() for match in _BRACKETED.finditer(text)} & options.keys(),
        _named_options(text, options),
        {match["letter"] for match in _ALONE.finditer(text)} & options.keys(),
    ):
        if letters:
            return letters.pop() if len(letters) == 1 else None
    return None


def _read_whole(text: str, options: Mapping[str, str]) -> str | None:
    """The choice of a text that is nothing but a choice; empty for a letter with another option's text."""
    match = _WHOLE.fullmatch(text)
    letter = match["letter"].upper() if match else ""
    if match and letter in options:
        rest = normalize_answer(match["rest"])
        if not rest or rest == normalize_answer(options[letter]):
            return letter
        labelled = re.search(r"[:.)\]]", text[match.end("letter") : match.start("rest")])
        if labelled and rest in map(normalize_answer, options.values()):
            return ""
    normal = normalize_answer(text)
    same = [letter for letter, option in options.items() if normal and normalize_answer(option) == normal]
    return same[0] if len(same) == 1 else None


def _named_options(text: str, options: Mapping[str, str]) -> set[str]:
    """Letters of the options whose text occurs, whole words; not one that occurs only inside a longer one.

    Yes, no and their like are words of any prose ("no doubt"): in more than a few words they count at its start alone.
    """
    padded = f" {normalize_answer(text)} "
    is_prose = padded.count(" ") > _FEW_WORDS
    found: set[str] = set()
    for letter, option in sorted(options.items(), key=lambda item: -len(item[1])):
        words = normalize_answer(option)
        if words in _PARTICLES and is_prose:
            if padded.startswith(f" {words} "):
                found.add(letter)
        elif words and f" {words} " in padded:
            found.add(letter)
            padded = padded.replace(f" {words} ", " | ")
    return found
