"""``sorl-report RUN...``: one self-contained HTML page about a run, several runs overlaid, or a study.

The page works offline. It is small because its plots are drawn by uPlot (51 KB, vendored in ``assets``), which has log
axes, values on hover, and a cursor linked across all plots; plotly.js has 4.8 MB, Vega-Lite 0.8 MB.
"""

from __future__ import annotations

import os
import sys
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sorl_env.commands.command import Parser, run_command, say
from sorl_env.errors import UserError
from sorl_env.folders import new_folder
from sorl_train.report.dialogues import COUNT, question_of, segments, step_files
from sorl_train.report.groups import (
    COLUMNS,
    HEADLINE,
    STABILITY,
    find_runs,
    group_rows,
    group_runs,
    name_runs,
    run_cell,
    run_rows,
)
from sorl_train.report.page import SECTIONS, chart_data, render_page, stage_seconds
from sorl_train.report.run import ReportRun, read_run
from sorl_train.report.viewer import NAME as VIEWER
from sorl_train.report.viewer import write_viewer
from sorl_train.run.files import atomic_write
from sorl_train.run.folder import RunDir

DETAILED = 8  # with more runs the page leaves out dialogues, stage times, settings and manifests
_SCRIPTS = ("uPlot.iife.min.js", "page.js", "report_lines.js", "report_plots.js", "report.js")


def write_report(paths: Sequence[Path], out: Path) -> Path:
    """Write one HTML page about runs to ``out``, and return ``out``.

    ``paths`` are run folders, and folders of studies, which stand for all their runs. An unfinished run is shown as far
    as it got, and the page names what is missing. It links to those viewers (``write_viewer``) that exist. Raises
    ``UserError`` for a folder that does not exist or has nothing to show.
    """
    runs = _read_runs(paths)
    title = f"{paths[0].resolve().name}: {len(runs)} runs" if len(paths) == 1 else f"{len(runs)} runs"
    page = render(runs, title, [_viewer_address(run.path, out) for run in runs])
    with new_folder(out.parent):
        atomic_write(out, page)
    return out


def _read_runs(paths: Sequence[Path]) -> list[ReportRun]:
    folders = find_runs(paths)
    if not folders:
        raise UserError("a report needs at least one run folder")
    labels = _labels([folder.path for folder in folders])
    dialogues = COUNT if len(folders) <= DETAILED else 0
    return [
        read_run(folder.path, label, dialogues, folder.cell)
        for folder, label in zip(folders, labels, strict=True)
    ]


def render(runs: Sequence[ReportRun], title: str, viewers: Sequence[str | None]) -> str:
    """The page as text; ``viewers`` are the addresses of the runs' viewers, None where there is none."""
    groups = group_runs(runs)
    names = name_runs(runs, groups)
    grouped = any(len(group.members) > 1 for group in groups)
    detailed = len(runs) <= DETAILED
    return render_page(
        "report.html.j2",
        styles=("uPlot.min.css", "page.css", "dialogue.css", "report.css"),
        scripts=_SCRIPTS,
        title=f"{runs[0].title} · {runs[0].label}" if len(runs) == 1 else title,
        runs=runs,
        groups=groups,
        grouped=grouped,
        viewers=viewers,
        detailed=detailed,
        cards={"Headline figures": HEADLINE, "Stability": STABILITY},
        cell=run_cell,
        sections=SECTIONS,
        columns=COLUMNS,
        names=names,
        run_table=run_rows(runs, groups, names),
        group_table=group_rows(runs, groups),
        data=chart_data(runs, groups, names),
        events=[(i, _with_dialogues(event, run)) for i, run in enumerate(runs) for event in run.events],
        stages=[stage_seconds(run) for run in runs] if detailed else [],
        differing=list(groups[0].settings),
        samples=_samples(runs),
        segments=segments,
        question=question_of,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command ``sorl-report``; the exit status."""
    return run_command("sorl-report", _report, argv)


def _report(argv: Sequence[str]) -> int:
    parser = Parser(prog="sorl-report", description="Write one self-contained HTML page about runs.")
    add = parser.add_argument
    several = "run folders, drawn over each other, or a study's folder"
    add("runs", nargs="+", type=Path, metavar="RUN", help=several)
    add("--out", type=Path, help="default: RUN/report.html, or report.html here for several runs")
    arguments = parser.parse_args(argv)
    runs: list[Path] = arguments.runs
    out = arguments.out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    folders = find_runs(runs)
    if len(folders) == 1 and step_files(RunDir(run := folders[0].path).trajectories):
        try:
            write_viewer(run)
        except UserError as error:  # the report is still written, and says what is damaged
            say("sorl-report", f"there is no viewer of {run}: {error}")
    print(write_report(runs, out))
    return 0


def _labels(paths: Sequence[Path]) -> list[str]:
    """The ends of the runs' paths, as long as it takes to tell the runs apart."""
    parts = [path.resolve().parts for path in paths]
    depth = 1
    while len({part[-depth:] for part in parts}) < len(parts):
        depth += 1
    return ["/".join(part[-depth:]) for part in parts]


def _viewer_address(run: Path, out: Path) -> str | None:
    if not (run / VIEWER).is_file():
        return None
    return urllib.parse.quote(
        Path(os.path.relpath((run / VIEWER).resolve(), out.parent.resolve())).as_posix()
    )


def _with_dialogues(event: Mapping[str, Any], run: ReportRun) -> dict[str, Any]:
    """An event, and in ``saved`` the last step up to it with saved dialogues (None: no such step)."""
    files = step_files(RunDir(run.path).trajectories)
    saved = [step for _, step, _ in files if step <= event["step"]]
    return {**event, "saved": max(saved, default=None)}


def _samples(runs: Sequence[ReportRun]) -> dict[str, list[str]]:
    """Which data are only an embedded sample, and the labels of the runs on them."""
    found: dict[str, list[str]] = {}
    for run in runs:
        if run.data_samples:
            found.setdefault(", ".join(run.data_samples), []).append(run.label)
    return found


if __name__ == "__main__":
    sys.exit(main())
