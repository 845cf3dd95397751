"""``sorl-view RUN``: a self-contained page to read, search and filter the dialogues of a run.

It is a page of its own because a run's dialogues take megabytes, while a report is opened to compare runs and stays
small. The report links to it. Like the report it works offline, and text of the dialogues cannot run as a script.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sorl_env.command import Parser, run_command, whole
from sorl_env.errors import UserError
from sorl_env.folders import new_folder
from sorl_train.report.dialogues import step_files
from sorl_train.report.groups import find_runs
from sorl_train.report.page import render_page
from sorl_train.report.run import ReportRun, read_run
from sorl_train.report.viewer_data import CHUNK, MOST_DIALOGUES, ViewerPage, pack, read_page
from sorl_train.run.files import atomic_write
from sorl_train.run.folder import RunDir

NAME = "viewer.html"
_SCRIPTS = (
    "page.js",
    "viewer_data.js",
    "viewer_list.js",
    "viewer_tokens.js",
    "viewer_dialogue.js",
    "viewer.js",
)


def write_viewer(run_dir: Path, out: Path | None = None, *, most: int = MOST_DIALOGUES) -> Path:
    """Write the page of a run, by default to ``RUN/viewer.html``, and return its path.

    If there are more dialogues than ``most``, the page has the lowest and the highest reward of each step and the same
    number of others from each; it says so.

    Raises:
        UserError: no such folder, the folder of a study, or a run without dialogues.
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
