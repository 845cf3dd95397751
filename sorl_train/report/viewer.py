"""``sorl-view RUN``: a self-contained page to read, search and filter the dialogues of a run.

It is a page of its own because a run's dialogues take megabytes, while a report is opened to compare runs and stays
small. Like the report it works offline, and text of the dialogues cannot run as a script.

The page reads a small list of all dialogues at once. The dialogues are compressed in chunks of 32 (JSON, gzip, base64),
and the page unpacks only the chunks that are looked at or searched. So 2,000 dialogues with their tokens are a few
megabytes, and the page opens at once.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sorl_env.commands.command import Parser, run_command, whole
from sorl_env.errors import UserError
from sorl_env.folders import new_folder
from sorl_env.trajectory import Trajectory, Turn
from sorl_train.report.dialogues import (
    Kind,
    evenly,
    extremes,
    message_segments,
    question_of,
    read_some,
    segments,
    step_files,
)
from sorl_train.report.groups import find_runs
from sorl_train.report.page import render_page
from sorl_train.report.run import ReportRun, read_run
from sorl_train.run.files import atomic_write
from sorl_train.run.folder import RunDir
from sorl_train.run.metrics_log import TokenRecord, iter_token_records, sidecar_of

MOST_DIALOGUES = 2000  # of the paper's length, they take about 40 MB
CHUNK = 32

NO_TOKENS_SAVED = "The run saved no figures per token for this step."
NO_LOSS = "Held-out dialogues have no figures per token, because they enter no loss."
NOT_IN_LOSS = "There are no figures per token: this dialogue is in no loss that was recorded."
MISMATCH = "The figures per token are left out, because they belong to other tokens than this dialogue's."

StepFile = tuple[Kind, int, Path]


@dataclass
class ViewerPage:
    """The dialogues of a page: what the list shows of each, and the dialogues themselves, compressed; row i is dialogue
    ``i % CHUNK`` of chunk ``i // CHUNK``. ``found`` is the number of dialogues that the run saved, shown or not."""

    rows: list[dict[str, Any]]
    chunks: list[str]
    found: int


def read_page(files: Sequence[StepFile], notes: list[str], most: int) -> ViewerPage:
    """Compress at most ``most`` dialogues, the same number of each file, but at least two; what a file lacks, later
    ones may have.

    The lowest and the highest reward of a file are always included; the others are spread over its rewards.
    """
    page = ViewerPage([], [], 0)
    dialogues: list[dict[str, Any]] = []
    for k, (kind, step, path) in enumerate(files):
        trajectories = read_some(path, notes)
        page.found += len(trajectories)
        chosen = _choose(trajectories, max(2, (most - len(page.rows)) // (len(files) - k)))
        tokens, why = _token_records(kind, path, {trajectory.id for trajectory, _ in chosen}, notes)
        for trajectory, mark in chosen:
            record = tokens.get(trajectory.id)
            dialogue = encode(trajectory, record, why)
            page.rows.append(row_of(kind, step, trajectory, mark, record if not dialogue["note"] else None))
            dialogues.append(dialogue)
        while len(dialogues) >= CHUNK:
            page.chunks.append(pack(dialogues[:CHUNK]))
            del dialogues[:CHUNK]
    if dialogues:
        page.chunks.append(pack(dialogues))
    _drop_common_start(page.rows)
    return page


def pack(value: Any) -> str:
    """JSON, gzip, base64: no text in it can end a script element or be read as HTML."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    # a tokenizer can make half a surrogate pair, which is not text
    data = text.encode("utf-8", errors="replace")
    return base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode()


def _choose(trajectories: Sequence[Trajectory], number: int) -> list[tuple[Trajectory, str]]:
    """At most ``number``, in the file's order; the lowest and the highest reward are marked."""
    if not trajectories:
        return []
    ranked = sorted(trajectories, key=lambda trajectory: trajectory.reward)
    lowest, highest = extremes(ranked)
    marks = {id(highest): "highest", id(lowest): "lowest"} if highest.reward > lowest.reward else {}
    kept = {id(lowest), id(highest)}
    others = [trajectory for trajectory in ranked if id(trajectory) not in kept]
    kept |= {id(trajectory) for trajectory in evenly(others, number - len(kept))}
    return [
        (trajectory, marks.get(id(trajectory), "")) for trajectory in trajectories if id(trajectory) in kept
    ]


def _drop_common_start(rows: Sequence[dict[str, Any]]) -> None:
    """Leave out sentences with which every question begins ("Search, then answer."): the list has little room."""
    questions = [row["question"] for row in rows] or [""]
    first, last = min(questions), max(questions)  # all strings between these two share their common start
    common = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    cut = first.rfind(". ", 0, common) + 2
    if len(set(questions)) > 1 and cut > 1:
        for row in rows:
            row["question"] = row["question"][cut:]


def _token_records(
    kind: Kind, path: Path, wanted: set[str], notes: list[str]
) -> tuple[dict[str, TokenRecord], str]:
    """The token records of the wanted trajectories by id, and the note for a trajectory without one."""
    sidecar = sidecar_of(path)
    if sidecar is None:
        return {}, NO_LOSS if kind == "eval" else NO_TOKENS_SAVED
    found: dict[str, TokenRecord] = {}
    try:
        found.update((record.id, record) for record in iter_token_records(sidecar) if record.id in wanted)
    except (OSError, ValueError) as error:
        notes.append(f"{path.parent.name}/{sidecar.name} is damaged, and used only up to there: {error}")
    return found, NOT_IN_LOSS


def row_of(kind: Kind, step: int, t: Trajectory, mark: str, record: TokenRecord | None) -> dict[str, Any]:
    """What the list shows of a dialogue. ``clipped`` is the share of clipped tokens, None where it is not known."""
    return {
        "key": f"{kind}-{step}/{t.id}",
        "kind": kind,
        "step": step,
        "reward": _plain(t.reward),
        "stop": t.stop_reason.value,
        "turns": len(t.turns),
        "tokens": t.num_action_tokens,
        "question": question_of(t),
        "errors": sorted({turn.format_error for turn in t.turns if turn.format_error}),
        "excluded": t.excluded,
        "mark": mark,
        "clipped": round(sum(record.clipped) / max(1, len(record.clipped)), 4) if record else None,
    }


def encode(t: Trajectory, record: TokenRecord | None, why: str) -> dict[str, Any]:
    """One dialogue as plain values; its ``note`` is ``why`` if there is no token record."""
    of_each_token = [turn.index for turn in t.turns for _ in range(turn.start, turn.end)]
    note = why if record is None else "" if list(record.turn) == of_each_token else MISMATCH
    by_turn = _split(record) if record is not None and not note else {}
    facts = [("trajectory", t.id), ("example", t.example_id), ("data", f"{t.task}, {t.split}, {t.source}")]
    facts += [("seed", str(t.seed)), ("tokens", f"{t.num_action_tokens} sampled of {len(t.token_ids)}")]
    facts += [(f"reward {name}", f"{value:.3g}") for name, value in t.reward_items.items()]
    facts += [
        (name, value if isinstance(value, str) else json.dumps(value)) for name, value in t.metadata.items()
    ]
    return {
        "facts": facts,
        "error": t.error or "",
        "prompt": t.prompt,
        "turns": [_encode_turn(turn, by_turn.get(turn.index), "format" in t.metadata) for turn in t.turns],
        "note": note,
    }


def _encode_turn(turn: Turn, tokens: Mapping[str, Any] | None, is_message: bool) -> dict[str, Any]:
    """One turn; ``is_message``: it is in the format of tool calls, not of tags."""
    text = turn.text if tokens is None else "".join(tokens["text"])
    shown = ("tool", "argument", "ok", "hits", "attempts", "cached", "cut_from")
    calls = [
        {
            **{name: getattr(call, name) for name in shown},
            "error": call.error or "",
            "latency_s": _plain(call.latency_s),
        }
        for call in turn.tool_calls
    ]
    return {
        "kind": turn.kind,
        "error": turn.format_error or "",
        "pieces": message_segments(replace(turn, text=text)) if is_message else segments(text),
        "tokens": tokens,
        "length": turn.end - turn.start,
        "generate_s": _plain(turn.generate_s),
        "version": turn.policy_version,
        "calls": calls,
        "observation": turn.observation.strip(),
    }


def _split(record: TokenRecord) -> dict[int, dict[str, Any]]:
    """The record's columns by turn, with None for NaN."""
    turns: dict[int, dict[str, Any]] = {}
    names = ["log_ratio", "ratio", "advantage", "entropy", "clipped", *(["weight"] if record.weight else [])]
    for i, turn in enumerate(record.turn):
        columns = turns.setdefault(turn, {"text": [], **{name: [] for name in names}})
        columns["text"].append(record.tokens[i])
        for name in names:
            columns[name].append(_plain(getattr(record, name)[i]))
    return turns


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


NAME = "viewer.html"
_SCRIPTS = ("page.js", *(f"viewer{part}.js" for part in ("_data", "_list", "_tokens", "_dialogue", "")))


def write_viewer(run_dir: Path, out: Path | None = None, *, most: int = MOST_DIALOGUES) -> Path:
    """Write the page of a run, by default to ``RUN/viewer.html``, and return its path.

    If there are more dialogues than ``most``, the page has the lowest and the highest reward of each step and the same
    number of others from each; it says so. Raises ``UserError`` for a folder that does not exist, the folder of a
    study, or a run without dialogues.
    """
    first = find_runs([run_dir])[0].path
    if first != run_dir:
        raise UserError(f"{run_dir} is a study: give one of its runs, as {first}")
    run = read_run(run_dir, run_dir.resolve().name, dialogues=0)
    folder = RunDir(run_dir).trajectories
    files = step_files(folder)
    if not files:
        raise UserError(
            f"there are no dialogues: no {folder}/step_*.jsonl; training saves some every rollout.save_every steps"
        )
    notes: list[str] = []
    content = read_page(files, notes, most)
    if not content.rows:
        raise UserError(f"no dialogue in {run_dir} can be read: {'; '.join(notes) or 'its files are empty'}")
    out = out or run_dir / NAME
    page = render(run, content, notes)
    with new_folder(out.parent):
        atomic_write(out, page)
    return out


def render(run: ReportRun, content: ViewerPage, notes: Sequence[str]) -> str:
    """The page as text."""
    clip_eps = run.config.get("loss.clip_eps")
    high = run.config.get("loss.clip_eps_high")
    return render_page(
        "viewer.html.j2",
        styles=("page.css", "dialogue.css", "viewer.css"),
        scripts=_SCRIPTS,
        title=f"{run.title} · {run.label}",
        run=run,
        shown=len(content.rows),
        found=content.found,
        notes=notes,
        data={
            "chunk": CHUNK,
            "clip_eps": clip_eps,
            "clip_eps_high": clip_eps if high is None else high,
            "rows": pack(content.rows),
            "chunks": content.chunks,
        },
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command ``sorl-view``; the exit status."""
    return run_command("sorl-view", _view, argv, interrupted="interrupted; nothing was written")


def _view(argv: Sequence[str]) -> int:
    parser = Parser(prog="sorl-view", description="Write a run's dialogues to one page.")
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="a run folder")
    add("--out", type=Path, help=f"default: RUN/{NAME}")
    most = "dialogues in the page, but at least two of each step (default: %(default)s)"
    add("--most", type=whole(1), default=MOST_DIALOGUES, help=most)
    arguments = parser.parse_args(argv)
    print(write_viewer(arguments.run, arguments.out, most=arguments.most))
    return 0


if __name__ == "__main__":
    sys.exit(main())
