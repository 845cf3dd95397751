r"""Reads which option a text chooses. Where that is not clear it reads none, because a wrong letter is worse.

The first of these rules that applies decides:

1. **The whole text** is a letter (``b``, ``(B)``, ``Option B.``) or the text of an option. It chooses nothing if it is
   the letter of one option and the text of another, or a text that two options share.
2. **An answer**: "the answer is B", "Answer: B", ``\boxed{B}``, "I choose B", "B is the best answer", "so it must be
   B", "no, B"; or a sentence that is only an option, if no other option has such a sentence. The last answer counts.
   An answer between several options ("A or B", "either A or B") chooses nothing, and "wait, that is wrong" takes an
   answer back.
3. **A verdict**: "B is correct", "B: right". If several options are correct, nothing is chosen.
4. **A mention**: the only option that the text names, unless the text says that it does not know, or that its answer is
   something else ("the answer is copper").

"Not A", "A is wrong", "rather than A" and "A can be ruled out" never count as a mention of A. What is a mention at all,
and what is an article or a part of a term ("vitamin B", "a beta blocker"), is decided in `mentions`. The patterns below
read its outline, in which prose is in lower case and an upper-case letter is an option. Each pattern looks at a bounded
number of words, so that reading takes time in proportion to the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from sorl_env.option_text import Word, split_words, starts_with_article
from sorl_train.evaluate.mentions import LABELS, option_texts, outline

_MENTION = r"#?[A-J?]"
_ONE = re.compile(r"(?<!\S)(?P<mark>[#~]?)(?P<letter>[A-J?])(?!\S)")
_GROUP = rf"{_MENTION}(?:(?: ,)?(?: (?:and|or|nor|also|vs|versus|/))? {_MENTION}){{0,9}}"
_WORD = r"[^\sA-J?~#,:-]\S*"
_BREAK = r"(?:because|since|as|but|so|therefore|hence|thus|if|when|while|although|though|however|whereas|who)(?!\S)"
_PROSE = rf" (?!{_BREAK}){_WORD}"  # a word of the same statement
_START, _STOP = r"(?<!\S)", r"(?!\S)"


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(_START + text + _STOP)


_NT = "isnt|arent|wasnt|werent|dont|doesnt|didnt|cant|cannot|wont|wouldnt|couldnt|shouldnt"
_NOT = (
    rf"(?:{_NT}|not|never|nor|neither|no(?= {_MENTION})|without|except|excluding|excludes?|unlike|than|instead of|over"
    r"|(?:all|anything|everything|nothing) but|eliminat(?:e|es|ed|ing)|rul(?:e|es|ed|ing) out|reject(?:s|ed|ing)?"
    r"|(?:wrong|incorrect|false)(?: (?:answers?|ones?|is|are)){1,3})"
)
_WRONG = (
    rf"(?:not(?! [~#]?[A-J?])|{_NT}|never|wrong|incorrect|false|untrue|unlikely|less|excluded|eliminated|inappropriate"
    r"|contraindicated|implausible|\u274c|\u2717|\u2718)"
)
# "not A", "I do not think it is A or B", "rather than A"
_DENIED = _pattern(rf"{_NOT}(?: (?!{_BREAK}|doubt|question|only){_WORD}){{0,4}}? (?P<object>{_GROUP})")
# "A is wrong", "A: unlikely", "A does not fit"
_FAILS = _pattern(rf"(?P<object>{_MENTION})(?: [:-])?(?:(?! correct| right| best){_PROSE}){{0,5}}? {_WRONG}")
_ALL_FAIL = _pattern(
    rf"(?P<object>{_GROUP})(?: (?:both|all|also|clearly|therefore|are|were|can|do|would|be|seem|less)){{1,5}}? {_WRONG}"
)

# "the answer is B", "my pick: B", "answer B", "the option that fits best is B", "\boxed{B}"
_ANSWER = _pattern(
    r"(?P<noun>answers?|ans|choice|option|solution|response|pick|guess|vote|boxed)"
    rf"(?P<gap>(?:{_PROSE}| [,:-]){{0,8}}?) (?P<object>{_GROUP})"
)
_VERBS = frozenset("is are was be being as = : - \u2192 \u21d2 seems looks remains fits".split())
_MAYBE = frozenset("could might may maybe perhaps possibly either between among".split())
_FULL = _pattern(_MENTION)
_ANSWERS_ELSE = _pattern(r"(?:answers?|ans)(?: \S+){0,3}? (?:is|are|:|=)")
# "I would go with B", "I think it is B"
_CHOICE = _pattern(
    r"(?:choose|chose|choosing|pick|picked|picking|select|selected|selecting|go|going|went|vote|opt|opting|settle|lean"
    r"|leaning|guess|say|think|believe|bet|prefer|favou?r)"
    r"(?: (?:with|for|on|towards?|to|that|it|its|is|be|must|would|should|answer|correct|most|likely|best|probably"
    rf"|definitely|as|my|final|an?|,|:|-)){{0,6}}? (?P<object>{_GROUP})"
    r"(?=$| (?:[,:-]|because|since|as|due|given|based|for|though|but|rather|instead|over|not)(?!\S)"
    r"| is (?:correct|right|best|most|answer|my))"
)
# "B is the best answer", "B as the answer"
_ANY = r"(?:an?|one|another|possible|plausible|reasonable|tempting|common|wrong|incorrect|not)(?!\S)"
_IS_ANSWER = _pattern(
    rf"(?P<object>{_GROUP})(?P<gap>(?:(?! {_ANY}){_PROSE}| as){{1,6}}?) (?:answer|option|choice)"
)
# "so it must be B", "no, B", "wait: it is B"
_SMALL = (
    r"(?: (?:it|its|is|be|must|should|would|has|to|that|this|then|so|answer|correct|right|i|im|think|mean|believe|best"
    r"|final|go|with|choose|am|sure|an?|actually|rather|wait|no|most|likely|in|on|second|thought|conclusion|summary"
    r"|[,:-]))"
)
_CONCLUDED = re.compile(
    r"(?:^|(?<= [,:-] ))(?:so(?! (?:is|are|does|do) )|therefore|thus|hence|its?|finally|overall|ultimately"
    r"|in conclusion|in summary|wait|actually|correction|sorry|rather|hmm|oops|scratch that|hold on|instead|i mean"
    r"|on second thought|no(?= (?:[,:-]|its|it|i) ))"
    rf"{_SMALL}{{0,7}} (?P<object>{_GROUP})(?=$| (?:[,-]|because|since|as|not|rather)(?!\S))"
)
_ALONE = re.compile(rf"(?:[-\d] |, )?(?P<object>{_GROUP})(?:$|(?= (?:, )?(?:because|since|as)(?!\S)))")
_BEGINS = re.compile(r"(?:[-\d] |, )?(?P<letter>[A-J?])(?!\S)")
_CORRECT = _pattern(
    rf"(?P<object>{_GROUP})(?P<gap>(?: [:-])?(?:{_PROSE}){{0,4}}?) (?:correct|right|true|best|\u2705|\u2713|\u2714)"
    r"(?=$| (?:[,:-]|because|since|as|and|but|here|for|in|answer|option|choice|one)(?!\S))"
)
_OR_ELSE = re.compile(
    rf" (?:, )?(?:but )?(?:or|also|possibly|maybe|perhaps|alternatively)(?!\S)| [:-] {_MENTION}"
)
_TAKES_BACK = _pattern(
    rf"(?:that|this|it|thats|its)(?: (?:is|was|seems|looks|be|cannot|cant|would|must|not|isnt|wasnt)){0, 4}?"
    r" (?:wrong|incorrect|mistaken|not (?:right|correct)|isnt (?:right|correct))|scratch that|i was wrong"
)
_HESITATES = re.compile(r"(?:wait|hold on|hmm|actually|no ,|correction|scratch|oops|sorry)(?!\S)")
_SO_IS = _pattern(rf"(?:so|as) (?:is|are|does|do) {_MENTION}")  # "B is correct, and so is C"
_UNSURE = _pattern(
    r"(?:not (?:sure|certain|clear|enough|possible|given|listed)|(?:do not|dont|cannot|cant) (?:know|tell|say|decide"
    r"|answer|determine|be (?:determined|answered|known))|no (?:idea|answer|clue)|unsure|uncertain|unclear|unable"
    r"|undecided|insufficient|depends|n(?:one|either) of|any of|all of|both of|either)"
)


class _Said(NamedTuple):
    """What a text says about its options at a place (line, character): the letters; none takes an answer back."""

    at: tuple[int, int]
    letters: frozenset[str]


def extract_choice(text: str, options: Mapping[str, str]) -> str | None:
    """The letter of the option that ``text`` chooses; None if it chooses none. The module's docstring has the rules.

    >>> options = {"A": "Iron", "B": "Zinc"}
    >>> [extract_choice(t, options) for t in ("b", "The answer is (A).", "It must be zinc.", "A or B", "Copper")]
    ['B', 'A', 'B', None, None]
    """
    whole = _read_whole(text, options)
    if whole is not None:
        return _only(whole)
    lines = outline(text, options)
    denied = [_denied(line) for line in lines]
    answers = _answers(lines, denied)
    if answers:
        return _last(answers, lines, denied)
    verdicts = frozenset[str]().union(*(said.letters for said in _find(_CORRECT, lines, denied)))
    if any(_SO_IS.search(line) for line in lines):
        return None
    if verdicts:
        return _only(verdicts)
    if any(_UNSURE.search(line) or (_ANSWERS_ELSE.search(line) and not _FULL.search(line)) for line in lines):
        return None
    named, partly = _mentioned(lines, denied)
    return _only(named) if partly <= named else None


def _only(letters: frozenset[str]) -> str | None:
    return next(iter(letters)) if len(letters) == 1 and "?" not in letters else None


def _read_whole(text: str, options: Mapping[str, str]) -> frozenset[str] | None:
    """The letters of a text that is only a letter or an option's text; None if it is more than that."""
    words = [word for word in split_words(text) if word.key]
    if not words:
        return frozenset()
    core = text[words[0].start : words[-1].end]
    keys = tuple(word.key for word in words)
    forms = (keys, keys[1:]) if starts_with_article(keys) and _is_article(text, *words[:2]) else (keys,)
    same = [option for option in option_texts(options) if option.words in forms]
    if len(same) > 1:  # "BB" and "Bb" differ as they are written
        same = [option for option in same if option.core == core] or same
    while words and words[0].key in LABELS:
        words.pop(0)
    raw = text[words[0].start : words[0].end] if len(words) == 1 else ""
    letter = raw.upper() if raw.isascii() and len(raw) == 1 and raw.upper() in options else ""
    if letter and not (text.strip(" .\n") == raw and any(option.core == raw for option in same)):
        return frozenset(letter)
    letters = frozenset(option.letter for option in same)
    return letters | frozenset(letter) if letters or letter else None


def _is_article(text: str, first: Word, second: Word) -> bool:
    """Whether the text is like "a zinc" or "A zinc", and not like "A: zinc" or "A Zinc", where A may be a letter."""
    is_label = text[first.start].isupper() and text[second.start].isupper()
    return text[first.end : second.start].isspace() and not is_label


def _find(
    pattern: re.Pattern[str], lines: list[str], denied: list[frozenset[int]], *, verb: bool = True
) -> Iterator[_Said]:
    """What a pattern finds: the letters of each match that the text does not deny.

    With ``verb``, the match's group ``gap`` must be empty, or have a verb and no word that makes it only a possibility.
    """
    for number, line in enumerate(lines):
        for match in pattern.finditer(line):
            gap = match["gap"].split() if verb else []
            if gap and (not _VERBS.intersection(gap) or _MAYBE.intersection(gap)):
                continue
            letters = frozenset(
                letter for at, letter in _letters(line, *match.span("object")) if at not in denied[number]
            )
            if letters:
                either = _OR_ELSE.match(line, match.end("object"))
                yield _Said((number, match.start("object")), frozenset("?") if either else letters)


def _letters(line: str, start: int, end: int) -> Iterator[tuple[int, str]]:
    """The position and letter of each mention in a part of a line."""
    for match in _ONE.finditer(line, start, end):
        if match["mark"] != "~":
            yield match.start("letter"), match["letter"]


def _denied(line: str) -> frozenset[int]:
    """The positions of the mentions that a line says are not the answer."""
    spans = [
        match.span("object") for pattern in (_DENIED, _FAILS, _ALL_FAIL) for match in pattern.finditer(line)
    ]
    return frozenset(at for span in spans for at, _ in _letters(line, *span))


def _answers(lines: list[str], denied: list[frozenset[int]]) -> list[_Said]:
    """Everything that the text says to be the answer, in order; without letters where it takes an answer back."""
    found = [
        *_find(_ANSWER, lines, denied),
        *_find(_IS_ANSWER, lines, denied),
        *_find(_CHOICE, lines, denied, verb=False),
        *_find(_CONCLUDED, lines, denied, verb=False),
        *_alone(lines, denied),
    ]
    for number, line in enumerate(lines):
        back = _TAKES_BACK.search(line)
        if back and not any(_letters(line, 0, back.start())):
            found.append(_Said((number, back.start()), frozenset()))
    return sorted(found, key=lambda said: said.at)


def _alone(lines: list[str], denied: list[frozenset[int]]) -> list[_Said]:
    """Sentences that are only an option; none if sentences begin with different options, because that is a list."""
    found: list[_Said] = []
    first: set[str] = set()
    for number, line in enumerate(lines):
        match = _ALONE.match(line)
        begins = _BEGINS.match(line)
        if begins and begins.start("letter") not in denied[number]:
            first.add(begins["letter"])
        if match and match.start("object") not in denied[number]:
            letters = frozenset(letter for _, letter in _letters(line, *match.span("object")))
            found.append(_Said((number, match.start("object")), letters))
            first.update(letters)
    return found if len(first) == 1 else []


def _last(answers: list[_Said], lines: list[str], denied: list[frozenset[int]]) -> str | None:
    """The last answer; None if a second thought or a verdict after it speaks for another option."""
    last = answers[-1]
    number = last.at[0]
    verdicts = {
        letter
        for said in _find(_CORRECT, lines[number + 1 :], denied[number + 1 :])
        for letter in said.letters
    }
    if len(verdicts) == 1 and verdicts != last.letters:
        return None
    for later in range(number + 1, len(lines)):
        if _HESITATES.match(lines[later]):
            named, _ = _mentioned(lines[later:], denied[later:])
            return _only(last.letters) if named <= last.letters else None
    return _only(last.letters)


def _mentioned(lines: list[str], denied: list[frozenset[int]]) -> tuple[frozenset[str], frozenset[str]]:
    """The options that are mentioned and not denied, and those whose text is only a part of something longer."""
    named, partly = set(), set()
    for line, not_these in zip(lines, denied, strict=True):
        for match in _ONE.finditer(line):
            if match["mark"] == "~":
                partly.add(match["letter"])
            elif not match["mark"] and match.start("letter") not in not_these:
                named.add(match["letter"])
    return frozenset(named), frozenset(partly)
