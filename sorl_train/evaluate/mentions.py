"""Finds where a text mentions the options of its question; `choices` reads from that which one it chooses.

``outline`` writes a text as lines of words, one line per sentence. Words are in lower case and options are upper-case
letters: "I think (A) is wrong; it is **B: zinc**." becomes ``i think A is wrong`` and ``it is B``. Other signs are:

    ?         an option that is not clear: a letter with another option's text, or a text that two options share
    #B        option B by a text that is only a number or a letter: it can be an answer, but not a mention in passing
    ~B        the text of option B as a part of something longer ("zinc finger"): not a mention, but a reason for doubt
    , : -     punctuation inside a sentence; brackets become commas

These are mentions:

1. An option's text, word for word (see `sorl_env.option_text`), the longest one first. A text of fewer than four words
   must stand between punctuation, or next to words such as "is", "give", "because" (`_BEFORE`, `_AFTER`). "Yes", "no"
   and similar words (`_PARTICLES`) are common in prose and count only after "is" and between punctuation.
2. A letter in brackets, quotation marks or emphasis: ``(B)``, ``b)``, ``"B"``, ``**B**``.
3. An upper-case letter by itself, next to the same words. In "vitamin B", "B cells", "38 C", "B-cell" and "E. coli" it
   is a part of a term; "A" is an article unless a verb or a conjunction follows; "I" is a letter only after "is",
   "answer" and similar words.
4. A lower-case letter after "answer", "is", "choose" and similar words, and before punctuation.
5. A letter followed by its own option's text is one mention.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from sorl_env.option_text import HYPHENS, Word, split_words, starts_with_article

_PARTICLES = frozenset("yes no maybe none true false all both neither".split())
_LONG = 4  # an option's text of this many words is not part of another term
_NOUNS = frozenset("answer answers ans option options choice choices letter letters".split())
LABELS = _NOUNS - {"answer", "answers", "ans"}
_IS = frozenset("is are was were be been being its thats = \u2192 \u21d2 boxed".split())
_CHOOSES = frozenset(
    "choose chose chosen choosing pick picked picking select selected selecting guess".split()
)
_CONCLUDES = frozenset("so therefore thus hence then finally".split())
_VERDICTS = frozenset("correct incorrect wrong right \u2705 \u2713 \u2714 \u274c \u2717 \u2718".split())
# words that a mention may follow (keys as in `Word`: no apostrophes)
_BEFORE = (
    _NOUNS
    | _IS
    | _CHOOSES
    | _CONCLUDES
    | _VERDICTS
    | frozenset(
        """
        and or nor either neither both but not no only just than except excluding unlike versus vs between among over
        also likely probably definitely clearly certainly maybe perhaps possibly actually rather instead wait hmm ok
        okay yes because since if while although though whereas as by for on to toward towards with that this these
        those think say believe go favor favour prefer mean means give start try use need needs lack lacks show shows
        suggest suggests indicate indicates support supports favors favours match matches fit fits leave leaves leaving
        has have get got consider considering rule out exclude excludes eliminate eliminates eliminated eliminating
        reject mark marked recommend cannot must isnt arent wasnt namely like
        """.split()
    )
)
# words that a mention may precede; behind a letter also a preposition
_AFTER = (
    _IS
    | _VERDICTS
    | frozenset(
        """
        isnt arent wasnt werent would wouldnt could should seems seem appears looks fits matches explains describes
        remains because since as but not rather than instead over which that who when whereas although though if so
        therefore thus hence too also here there might cannot cant wont doesnt dont does do has have alone while best
        given due must may can will makes only like
        """.split()
    )
)
_AFTER_LETTER = _AFTER | frozenset(
    "and or nor in for from on with by under per at to after before again".split()
)
_AFTER_A = _AFTER_LETTER - frozenset("given must can best may will due only while like right wrong".split())
_AFTER_LOWER = frozenset("because since and or".split())
_MARKS = frozenset(".,:-")
_ENDS = frozenset(".!?;\u2026\n")
_COMMAS = frozenset(",()[]\u2014")
_EMPHASIS = "*_`\"'\u2018\u2019\u201c\u201d"
_JOINTS = HYPHENS + "/+^_'\u2019"


class OptionText(NamedTuple):
    """The text of an option: its words in the form in which they are compared, and its text from first to last word."""

    letter: str
    words: tuple[str, ...]
    core: str


def option_texts(options: Mapping[str, str]) -> tuple[OptionText, ...]:
    """The options' texts, the longest first. A leading "A" is an article unless another option begins with a letter."""
    return _option_texts(tuple(options.items()))


@lru_cache(maxsize=256)  # the samples of a question share them
def _option_texts(options: tuple[tuple[str, str], ...]) -> tuple[OptionText, ...]:
    found = []
    for letter, text in options:
        if words := [word for word in split_words(text) if word.key]:
            found.append((letter, tuple(word.key for word in words), words, text))
    lettered = any(len(keys[0]) == 1 and keys[0].isalpha() and keys[0] != "a" for _, keys, _, _ in found)
    texts = []
    for letter, keys, words, text in found:
        skip = int(starts_with_article(keys) and not lettered)
        texts.append(OptionText(letter, keys[skip:], text[words[skip].start : words[-1].end]))
    return tuple(sorted(texts, key=lambda option: -len(option.words)))


def outline(text: str, options: Mapping[str, str]) -> list[str]:
    """The sentences of a text as lines of words, in which every mention of an option is an upper-case letter."""
    return _Reader(text, options).sentences()


class _Found(NamedTuple):
    """Something that was read: its sign in the outline, and the number of the word after it."""

    sign: str
    end: int


class _Reader:
    """One pass over the words of a text. It looks at no word more often than the options have words."""

    def __init__(self, text: str, options: Mapping[str, str]):
        self.text, self.options = text, options
        self.words = split_words(text)
        self.texts = option_texts(options)
        self.own = {option.letter: option.words for option in self.texts}
        spoken = [index for index, word in enumerate(self.words) if word.key]
        self.spoken = spoken
        self.keys = tuple(self.words[index].key for index in spoken)
        self.place = [0] * (len(self.words) + 1)  # for each word, how many words with a meaning precede it
        for index, word in enumerate(self.words):
            self.place[index + 1] = self.place[index] + bool(word.key)

    def sentences(self) -> list[str]:
        """See `outline`."""
        lines: list[list[str]] = [[]]
        at = 0
        while at < len(self.words):
            line = lines[-1]
            if found := self._mention(at):
                while line and (line[-1] in LABELS or (line[-1] == "," and self._raw(at - 1) in ("(", "["))):
                    line.pop()
                line.append(found.sign)
                at = found.end
                continue
            sign = self._sign(at)
            if sign != ".":
                line.extend([sign] if sign else [])
            elif line and not (self._raw(at) == "\n" and line[-1] in _IS | _NOUNS | {":", "-"}):
                lines.append([])  # but "Answer:" and "B" on the next line are one sentence
            at += 1
        return [" ".join(line) for line in lines if line]

    def _mention(self, at: int) -> _Found | None:
        if not self.words[at].key:
            return None
        named = self._named(at)
        if named and self.place[named.end] - self.place[at] > 1:
            return self._judged(at, named)
        return self._letter(at) or (self._judged(at, named) if named else None)

    # --- texts ------------------------------------------------------------------------------------------------
    def _named(self, at: int) -> _Found | None:
        """The option with the longest text that begins at this word; "?" if several options share it."""
        place = self.place[at]
        first = self.keys[place]
        same: list[OptionText] = []
        for option in self.texts:
            if same and len(option.words) < len(same[0].words):
                break
            if option.words[0] == first and self.keys[place : place + len(option.words)] == option.words:
                same.append(option)
        if not same:
            return None
        last = self.spoken[place + len(same[0].words) - 1]
        core = self.text[self.words[at].start : self.words[last].end]
        if set("?!;").intersection(core).difference(same[0].core):
            return None  # "A? B?" is not the option "A, B"
        if len(same) > 1:  # "BB" and "Bb" differ only in how they are written
            same = [option for option in same if option.core == core]
        return _Found(same[0].letter if len(same) == 1 else "?", last + 1)

    def _judged(self, at: int, named: _Found) -> _Found | None:
        """Whether an option's text is a mention, a part of something longer, or plain words (None)."""
        words = self.keys[self.place[at] : self.place[named.end]]
        before, after = self._beside(at, -1), self._beside(named.end - 1, 1)
        joined = self._is_joined(at, named.end - 1, _JOINTS)
        if words[0] in _PARTICLES and len(words) == 1:
            behind = _MARKS | _IS | _NOUNS | _CONCLUDES
            is_answer = before in behind and (after in _MARKS or after in _AFTER_LOWER - {"and", "or"})
            return named if is_answer and not joined else None
        if all(len(word) == 1 or not word.isalpha() for word in words):
            is_answer = before in _MARKS | _IS | _NOUNS | _CHOOSES and after in _MARKS | {"because", "since"}
            return _Found(f"#{named.sign}", named.end) if is_answer and not joined else None
        stands = _stands(before, _BEFORE | {"a", "an"}, len(words)) and _stands(after, _AFTER, len(words))
        return named if stands and not joined else _Found(f"~{named.sign}", named.end)

    # --- letters ----------------------------------------------------------------------------------------------
    def _letter(self, at: int) -> _Found | None:
        raw = self._raw(at)
        if len(raw) != 1 or not raw.isascii() or raw.upper() not in self.options:
            return None
        letter = raw.upper()
        end = self._enclosed(at)
        if found := self._with_text(at, letter, end or at + 1, bool(end)):
            return found
        if end:
            return _Found(letter, end)
        if not self._is_alone(at, raw):
            return None
        shared = any(option.core == raw and option.letter != letter for option in self.texts)
        return _Found("?" if shared else letter, at + 1)

    def _enclosed(self, at: int) -> int:
        """The number of the word after a letter in brackets or emphasis; 0 if the letter has none."""
        opening, closing = self._raw(at - 1), self._raw(at + 1)
        if closing and opening and opening in _EMPHASIS and closing in _EMPHASIS:
            return at + 1
        if not closing or closing not in ")]}":
            return 0
        if opening and opening in "([{":
            start = self.words[at - 1].start
            touched = self.text[start - 1 : start]
            name = self._raw(at - 2)
            is_free = not (touched.isalnum() or touched in ("_", "^")) or name[0] == "\\"
            return at + 2 if is_free or name.casefold() in _NOUNS else 0
        before = self._beside(at, -1)
        is_label = before in _MARKS or before in _BEFORE - {"by", "for", "to", "with"}
        return at + 2 if is_label and not self._is_joined(at, at, _JOINTS) else 0

    def _with_text(self, at: int, letter: str, end: int, enclosed: bool) -> _Found | None:
        """A letter followed by an option's text: its own, or another option's ("?")."""
        place = self.place[end]
        if place < len(self.keys) and self.keys[place] == "=":
            place += 1
        own = self.own.get(letter)
        for skip in (0, 1) if self.keys[place : place + 1] in (("a",), ("an",)) else (0,):
            stop = place + skip + len(own or ())
            if own and self.keys[place + skip : stop] == own and not self.text[self.words[at].end].isalnum():
                last = self.spoken[stop - 1]
                after = self._beside(last, 1)
                if _stands(after, _AFTER_LETTER, len(own)) or after.upper() in self.options:
                    return _Found(letter, last + 1)
        if place >= len(self.keys) or self._is_joined(at, at, _JOINTS):
            return None
        other = self._named(self.spoken[place])
        between = self.text[self.words[end - 1].end : self.words[self.spoken[place]].start].strip(" *_`")
        labelled = enclosed or (between and between[0] in ":.)]-=" and "\n" not in between)
        first = self.text[self.words[self.spoken[place]].start]
        if not labelled and not (not between and self._raw(at).isupper() and first.isupper()):
            return None
        if other and other.sign != letter and self._beside(other.end - 1, 1) in _MARKS:
            return _Found("?", other.end)
        return None

    def _is_alone(self, at: int, raw: str) -> bool:
        """Whether a letter without brackets is a label, and neither an article nor a part of a term."""
        if self._is_joined(at, at, _JOINTS + ".") or self._is_initial(at):
            return False
        before, after = self._beside(at, -1), self._beside(at, 1)
        asked = before in _IS | _NOUNS | _CHOOSES or before == ":"
        if raw.islower():
            return asked and (after in _MARKS or after in _AFTER_LOWER)
        if raw == "I":
            return asked and (after in _MARKS or after in _AFTER_LOWER)
        follows = before in _MARKS or before in _BEFORE
        return follows and (after in _MARKS or after in (_AFTER_A if raw == "A" else _AFTER_LETTER))

    def _is_initial(self, at: int) -> bool:
        """Whether a point and a word in lower case follow, as in "E. coli"."""
        if self._raw(at + 1) != ".":
            return False
        following = self._raw(at + 2)
        return following[:1].islower() and following not in _BEFORE | _AFTER | {"it", "the", "a", "an", "in"}

    # --- neighbours -------------------------------------------------------------------------------------------
    def _raw(self, at: int) -> str:
        return self.text[self.words[at].start : self.words[at].end] if 0 <= at < len(self.words) else ""

    def _sign(self, at: int) -> str:
        """A single word in the outline; empty for what is not in it."""
        word: Word = self.words[at]
        raw = self._raw(at)
        if word.key or raw == "\\boxed":
            return word.key or "boxed"
        if raw in _ENDS:
            return "."
        if raw in _COMMAS:
            return ","
        if raw in HYPHENS:
            return "" if self._is_joined(at, at, "") else "-"
        return ":" if raw == ":" else ""

    def _beside(self, at: int, step: int) -> str:
        """The sign before or after a word; a full stop at the ends of the text."""
        at += step
        while 0 <= at < len(self.words):
            if sign := self._sign(at):
                return sign
            at += step
        return "."

    def _is_joined(self, first: int, last: int, joints: str) -> bool:
        """Whether letters or digits touch these words, or are tied to them ("non-small", "B/C")."""
        start, end = self.words[first].start, self.words[last].end
        before, after = self.text[max(0, start - 2) : start], self.text[end : end + 2]
        left = before[-1:].isalnum() or (len(before) == 2 and before[1] in joints and before[0].isalnum())
        right = after[:1].isalnum() or (len(after) == 2 and after[0] in joints and after[1].isalnum())
        return left or right


def _stands(neighbour: str, allowed: frozenset[str], words: int) -> bool:
    """Whether a text of so many words stands by itself next to this one."""
    if neighbour in _MARKS or neighbour in allowed:
        return True
    return words >= _LONG and neighbour.isalpha() and len(neighbour) > 1 and neighbour != "non"
