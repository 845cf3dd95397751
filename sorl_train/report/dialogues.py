"""Chooses the dialogues of a run to show, and splits their text into pieces to colour."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, TypeVar

from sorl_env.trajectory import Trajectory, Turn, iter_jsonl
from sorl_env.trajectory.token_classes import message_parts

Kind = Literal["step", "eval"]
_T = TypeVar("_T")

COUNT = 10
_READ_OF_A_FILE = 64  # trajectories, except of the last step; a file may have hundreds of long ones
_STEP_FILE = re.compile(r"(step|eval)_(\d+)\.jsonl")
_TAG = re.compile(r"<(?P<closing>/?)(?P<tag>[A-Za-z_][\w-]*)>")
_QUESTION = re.compile(r"^[^\S\n]*Question:\s{0,9}(\S.*)$", re.MULTILINE)
_NOT_TOOLS = {"think": "think", "answer": "answer", "information": "forged"}


@dataclass(frozen=True)
class Dialogue:
    """A trajectory to show. ``why`` says why it was chosen, if it is special."""

    step: int
    kind: Kind
    trajectory: Trajectory
    why: str = ""


def choose_dialogues(folder: Path, notes: list[str], count: int = COUNT) -> list[Dialogue]:
    """At most ``count`` dialogues: the lowest and the highest reward of the last saved step, and others from all steps.

    They are of training steps, or of evaluations if no training step was saved. A note is added for each damaged file,
    whose trajectories before the damage are used.
    """
    found = step_files(folder)
    files = [(step, path) for kind, step, path in found if kind == "step"] or [file[1:] for file in found]
    if not files:
        notes.append(f"there are no dialogues: the run has no {folder.name}/step_*.jsonl")
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
    steps[last] = [t for t in steps[last] if t is not lowest and t is not highest][:_READ_OF_A_FILE]
    others = [Dialogue(step, kind, trajectory) for step in sorted(steps) for trajectory in steps[step]]
    return sorted([*chosen, *evenly(others, count - len(chosen))], key=lambda dialogue: dialogue.step)


def segments(text: str) -> list[tuple[str, str]]:
    """A turn as pieces (kind, text); the kinds are ``think``, ``answer``, ``tool``, ``forged`` and ``plain``."""
    pieces, end = [], 0
    tags = list(_TAG.finditer(text))
    closings: dict[str, list[re.Match[str]]] = {}  # by name, the next one last
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


def message_segments(turn: Turn) -> list[tuple[str, str]]:
    """As ``segments``, for a turn in the format of tool calls."""
    return [(kind, turn.text[start:end]) for kind, start, end in message_parts(turn)]


def question_of(trajectory: Trajectory) -> str:
    """The question in one line: the text after the prompt's last ``Question:``, or else the prompt's last line."""
    marked = _QUESTION.findall(trajectory.prompt)
    lines = [line.strip() for line in trajectory.prompt.splitlines() if line.strip()]
    return marked[-1].strip() if marked else lines[-1] if lines else trajectory.example_id


def step_files(folder: Path) -> list[tuple[Kind, int, Path]]:
    """Files of trajectories with their kind and step, by step; an evaluation comes after the step that it judges."""
    names = ((path, _STEP_FILE.fullmatch(path.name)) for path in folder.glob("*.jsonl"))
    found: list[tuple[Kind, int, Path]] = [
        ("eval" if match[1] == "eval" else "step", int(match[2]), path) for path, match in names if match
    ]
    return sorted(found, key=lambda file: (file[1], file[0] == "eval"))


def read_some(path: Path, notes: list[str], limit: int | None = None) -> list[Trajectory]:
    """The first ``limit`` trajectories of a file. A damaged file gives those before the damage, and a note."""
    found: list[Trajectory] = []
    try:
        found.extend(islice(iter_jsonl(path), limit))  # extend keeps what it read before the error
    except (OSError, ValueError) as error:
        notes.append(f"{path.parent.name}/{path.name} is damaged, and used only up to there: {error}")
    return found


def extremes(ranked: Sequence[Trajectory]) -> tuple[Trajectory, Trajectory]:
    """The trajectories with the lowest and the highest reward; excluded ones count only if all are excluded."""
    counted = [trajectory for trajectory in ranked if not trajectory.excluded] or ranked
    return counted[0], counted[-1]


def evenly(items: Sequence[_T], number: int) -> list[_T]:
    """``number`` items, spread evenly: the middle item of each of ``number`` equal parts of the sequence."""
    number = min(number, len(items))
    return [items[(2 * i + 1) * len(items) // (2 * number)] for i in range(number)]
