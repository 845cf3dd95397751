"""Dialogues to show: which ones of a run, and their text in pieces that can be coloured."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, TypeVar

from sorl_env.trajectory import Trajectory
from sorl_env.trajectory_io import iter_jsonl

Kind = Literal["step", "eval"]
_T = TypeVar("_T")
_K = TypeVar("_K")

COUNT = 10
_READ_OF_A_FILE = 64  # of the steps that are not the last one; a file may hold hundreds of long trajectories
_STEP_FILE = re.compile(r"(step|eval)_(\d+)\.jsonl(\.gz)?")
_TAG = re.compile(r"<(?P<closing>/?)(?P<tag>[A-Za-z_][\w-]*)>")
_QUESTION = re.compile(r"^[^\S\n]*Question:\s{0,9}(\S.*)$", re.MULTILINE)
_NOT_TOOLS = {"think": "think", "answer": "answer", "information": "forged"}


@dataclass(frozen=True)
class Dialogue:
    """A trajectory to show. ``why`` says what is special about it, if anything is."""

    step: int
    kind: Kind
    trajectory: Trajectory
    why: str = ""


def choose_dialogues(folder: Path, notes: list[str], count: int = COUNT) -> list[Dialogue]:
    """At most ``count`` dialogues by step: the lowest and the highest reward of the last saved step, others spread.

    Training steps are shown, or evaluations if no training step was saved. Adds a note for each file that cannot be
    read to the end; what comes before the fault is used.
    """
    found = step_files(folder)
    files = [(step, path) for kind, step, path in found if kind == "step"] or [file[1:] for file in found]
    if not files:
        notes.append(f"no dialogues: there is no {folder.name}/step_*.jsonl")
        return []
    *earlier, (last, path) = files
    read = {step: read_some(file, notes, _READ_OF_A_FILE) for step, file in evenly(earlier, count - 2)}
    read[last] = read_some(path, notes)
    steps = {step: sorted(found, key=lambda t: t.reward) for step, found in read.items() if found}
    if not steps:
        return []
    kind: Kind = "eval" if path.name.startswith("eval") else "step"
    last = max(steps)
    lowest, highest = extremes(steps[last])
    chosen = [Dialogue(last, kind, lowest, "lowest reward of the last saved step")]
    if highest is not lowest:
        chosen.append(Dialogue(last, kind, highest, "highest reward of the last saved step"))
    steps[last] = [t for t in steps[last] if t is not lowest and t is not highest]
    available = {step: len(found) for step, found in steps.items()}
    for step, number in share_out(available, count - len(chosen)).items():
        chosen += [Dialogue(step, kind, trajectory) for trajectory in evenly(steps[step], number)]
    return sorted(chosen, key=lambda dialogue: dialogue.step)


def segments(text: str) -> list[tuple[str, str]]:
    """A turn in pieces: (``think``, ``answer``, ``tool``, ``forged`` or ``plain``, text), which join to the turn."""
    pieces, end = [], 0
    tags = list(_TAG.finditer(text))
    closings: dict[str, list[re.Match[str]]] = {}  # the next one of each name last
    for tag in reversed(tags):
        if tag["closing"]:
            closings.setdefault(tag["tag"], []).append(tag)
    for tag in tags:
        ahead = closings.get(tag["tag"], [])
        while ahead and ahead[-1].start() < tag.end():
            ahead.pop()
        if tag["closing"] or tag.start() < end or not ahead:
            continue
        close = ahead[-1].end()
        pieces += [
            ("plain", text[end : tag.start()]),
            (_NOT_TOOLS.get(tag["tag"], "tool"), text[tag.start() : close]),
        ]
        end = close
    pieces.append(("plain", text[end:]))
    return [(kind, piece) for kind, piece in pieces if piece]


def question_of(trajectory: Trajectory) -> str:
    """The question in one line: what follows the prompt's last ``Question:``, or else its last line."""
    marked = _QUESTION.findall(trajectory.prompt)
    lines = [line.strip() for line in trajectory.prompt.splitlines() if line.strip()]
    return marked[-1].strip() if marked else lines[-1] if lines else trajectory.example_id


def step_files(folder: Path) -> list[tuple[Kind, int, Path]]:
    """Files of trajectories with what they are of, by step; an evaluation comes after the step it judges."""
    names = ((path, _STEP_FILE.fullmatch(path.name)) for path in folder.glob("*.jsonl*"))
    found: list[tuple[Kind, int, Path]] = [
        ("eval" if match[1] == "eval" else "step", int(match[2]), path) for path, match in names if match
    ]
    return sorted(found, key=lambda file: (file[1], file[0] == "eval"))


def read_some(path: Path, notes: list[str], limit: int | None = None) -> list[Trajectory]:
    """The first ``limit`` trajectories of a file, or those before a fault in it, which becomes a note."""
    found: list[Trajectory] = []
    try:
        found.extend(islice(iter_jsonl(path), limit))  # extend keeps what came before a fault
    except (OSError, ValueError) as error:
        notes.append(f"{path.parent.name}/{path.name} is used up to its fault: {error}")
    return found


def extremes(ranked: Sequence[Trajectory]) -> tuple[Trajectory, Trajectory]:
    """Lowest and highest reward; an excluded trajectory has none to speak of, so it counts only among its like."""
    counted = [trajectory for trajectory in ranked if not trajectory.excluded] or ranked
    return counted[0], counted[-1]


def share_out(available: Mapping[_K, int], wanted: int) -> dict[_K, int]:
    """How many of each, as equal as what is available allows; ``wanted`` in all, or everything there is."""
    given, left = dict.fromkeys(available, 0), wanted
    for rank, (name, number) in enumerate(sorted(available.items(), key=lambda item: item[1])):
        given[name] = min(number, left // (len(available) - rank))
        left -= given[name]
    return given


def evenly(items: Sequence[_T], number: int) -> list[_T]:
    """``number`` of the items, evenly spread over the sequence: the middle of each of as many equal parts."""
    number = min(number, len(items))
    return [items[(2 * i + 1) * len(items) // (2 * number)] for i in range(number)]
