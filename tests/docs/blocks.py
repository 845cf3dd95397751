"""The blocks of the Markdown pages, and what a page says about each in HTML comments right above it.

A block is fenced or indented. Without a language, or with a shell's, it is shell; of other languages only Python is
executed. Comments, each on a line of its own:

    <!-- not run: REASON -->            shown, not executed
    <!-- tested: tests/FILE.py -->      that test takes it from the page and runs it with what it needs around it
    <!-- file: NAME -->                 a Python block that the reader saves as NAME: written there, then executed
    <!-- given: NAME, NAME -->          what the reader is supposed to have by then: functions of given.py
    <!-- adds: COMMAND OPTIONS -->      the command gets these options, too, so that the test ends in seconds
    <!-- server: PORT -->               its last command serves there until the page ends; the test takes a free port
    <!-- next -->                       nothing: two indented blocks would be one without a line between them
    <!-- slow -->                       runs in make test-all alone, with all other blocks of the page
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TEXT = {"text", "toml", "yaml", "json", "math", "mermaid", "bibtex", "html", "diff"}
SHELL = {"", "bash", "sh", "shell"}
MARKS = {"not run", "tested", "file", "given", "adds", "server", "next", "slow"}
_MARK = re.compile(r"<!-- (" + "|".join(MARKS) + r")(?:: (.+?))? -->")


@dataclass(frozen=True)
class Block:
    """A block of a page: its first line's number, its language (``shell``, ``python`` or ``text``), and its marks."""

    page: Path
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"


def pages() -> list[Path]:
    """All pages for users, maintainers and agents."""
    found = [
        *REPOSITORY.glob("*.md"),
        *REPOSITORY.glob("docs/**/*.md"),
        *REPOSITORY.glob("skills/*/SKILL.md"),
    ]
    return sorted(page for page in found if page.name != "CHANGELOG.md")


def read_blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order; ValueError for a language or a mark that does not exist."""
    lines = page.read_text(encoding="utf-8").splitlines()
    blocks: list[Block] = []
    marks: dict[str, str] = {}
    at = 0
    while at < len(lines):
        line = lines[at]
        fence = re.match(r"( *)(```+|~~~+) *([\w-]*)", line)
        start = at + 1
        is_comment = line.lstrip().startswith("<!-- ")
        if fence:
            while (at := at + 1) < len(lines) and lines[at].strip() != fence[2]:
                pass
            language, body = fence[3], lines[start:at]
        elif line.startswith("    ") and not is_comment and _is_indented_block(lines, at):
            start = at
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at].strip()):
                if lines[at].lstrip().startswith("<!-- "):
                    break
                at += 1
            at -= 1
            language, body = "", lines[start : at + 1]
        else:
            if is_comment:
                mark = _MARK.fullmatch(line.strip())
                marks[mark[1] if mark else line.strip()] = (mark and mark[2]) or ""
            elif line.strip():
                marks = {}
            at += 1
            continue
        if unknown := marks.keys() - MARKS:
            raise ValueError(f"{page}:{start}: {unknown} say nothing that {__file__} knows")
        kind = "shell" if language in SHELL else language if language == "python" else "text"
        if kind == "text" and language not in TEXT:
            raise ValueError(
                f"{page}:{start}: language {language!r} is not known here: add it to TEXT or SHELL"
            )
        text = textwrap.dedent("\n".join(body)).strip("\n") + "\n"
        blocks.append(Block(page, start + 1, kind, text, marks))
        marks = {}
        at += 1
    return blocks


def python_blocks(page: str) -> list[str]:
    """The text of all Python blocks of a page, given by its path in the repository."""
    return [block.text for block in read_blocks(REPOSITORY / page) if block.language == "python"]


def _is_indented_block(lines: list[str], at: int) -> bool:
    """Whether an indented line begins a block: after an empty line or a mark; not the next paragraph of a list item."""
    before = next((line for line in reversed(lines[:at]) if line.strip()), "")
    follows = at == 0 or not lines[at - 1].strip() or _MARK.fullmatch(lines[at - 1].strip()) is not None
    item = re.match(r" *(?:[-*]|\d+\.) +", before)
    depth = len(item[0]) if item else len(before) - len(before.lstrip())
    return follows and len(lines[at]) - len(lines[at].lstrip()) >= depth + 4 if depth else follows


def counts() -> dict[str, int]:
    """How many shell and Python blocks the pages have, executed or marked."""
    blocks = [block for page in pages() for block in read_blocks(page) if block.language != "text"]
    marked = {mark: sum(mark in block.marks for block in blocks) for mark in ("not run", "tested")}
    return {"blocks": len(blocks), "executed": len(blocks) - sum(marked.values()), **marked}


if __name__ == "__main__":
    print(counts())
