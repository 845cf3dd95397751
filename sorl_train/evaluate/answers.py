"""What an output says: its answer, and for multiple choice the letter. Pure functions of text.

Each takes time in proportion to the text, whatever it holds: a policy may write anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from sorl_train.evaluate.choices import extract_choice as extract_choice


class Answer(NamedTuple):
    """The answer of an output, and where it stood: in the tags, after "the answer is", or as the text itself."""

    text: str
    where: Literal["tag", "phrase", "text"]


_PHRASE = re.compile(
    r"\banswer(?:\s{1,9}to\s{1,9}the\s{1,9}question)?(?:\s{1,9}is\b|\s{0,9}:)", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"(?<!\b[A-Z])\.(?:\s|$)")  # "J. Smith" goes on


def read_answer(output: str, mode: str) -> Answer | None:
    """The answer to an open question in the output of one turn; None where it gives none.

    The last ``<answer>`` block counts. Without one: what follows the last "the answer is" that something follows, up to
    the end of the sentence. Without that, ``direct`` was asked for nothing but the answer, and its first line is taken;
    the other modes were asked for the tags and have not answered.
    """
    block = _last_block(output)
    if block is not None:
        return Answer(block.strip(), "tag")
    plain = _without_thoughts(output).strip()
    end = len(plain)
    for phrase in reversed(list(_PHRASE.finditer(plain))):
        said = plain[phrase.end() : end].lstrip().removeprefix(":").lstrip()
        if said:
            said = said.split("\n", 1)[0]
            stop = _SENTENCE_END.search(said)
            return Answer((said[: stop.start()] if stop else said).strip(), "phrase")
        end = phrase.start()
    if mode == "direct" and plain:
        return Answer(plain.splitlines()[0].strip(), "text")
    return None


def read_choice(output: str, options: Mapping[str, str]) -> str | None:
    """The letter that the output of one turn chooses: in its last ``<answer>`` block if it has one, else anywhere
    outside its thoughts (see `extract_choice`)."""
    block = _last_block(output)
    return extract_choice(_without_thoughts(output) if block is None else block, options)


def _last_block(output: str) -> str | None:
    """What stands in the last ``<answer>`` block that is closed."""
    block, at = None, 0
    while (start := output.find("<answer>", at)) >= 0 and (end := output.find("</answer>", start)) >= 0:
        block = output[start + len("<answer>") : end]
        at = end + len("</answer>")
    return block


def _without_thoughts(output: str) -> str:
    """The output with a space in place of each ``<think>`` block; one that is not closed stays."""
    kept: list[str] = []
    at = 0
    while (start := output.find("<think>", at)) >= 0 and (end := output.find("</think>", start)) >= 0:
        kept += (output[at:start], " ")
        at = end + len("</think>")
    return "".join((*kept, output[at:]))
