"""``sorl-report RUN...``: one self-contained HTML page about a run, about several overlaid, or about a study.

The page works offline and is small because its plots are uPlot's (51 KB, vendored in ``report_assets``), which has
log axes, hover values and cursors linked over all plots. The alternatives: plotly.js is 4.8 MB in its Python package
(1.2 MB its basic build, not in it), Vega-Lite 0.8 MB with what it needs, and matplotlib's SVG has no hover values.
"""

from __future__ import annotations

import argparse
import os
import sys
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sorl_env.command import Parser, run_command
from sorl_env.errors import UserError
from sorl_env.folders import new_folder
from sorl_train.report.curves import chart_data, missing_figures, stage_seconds
from sorl_train.report.dialogues import COUNT, question_of, segments, step_files
from sorl_train.report.figures import SECTIONS
from sorl_train.report.groups import find_runs, group_runs, name_runs
from sorl_train.report.page import check_place_for, render_page
from sorl_train.report.run import HEADLINE, STABILITY, ReportRun, read_run
from sorl_train.report.table import COLUMNS, group_rows, run_rows
from sorl_train.report.viewer import NAME as VIEWER
from sorl_train.report.viewer import write_viewer
from sorl_train.run.files import atomic_write
from sorl_train.run.folder import RunDir

DETAILED = 8  # of more runs, the page shows no dialogues, stage times, settings and manifests
_SCRIPTS = ("uPlot.iife.min.js", "page.js", "report_lines.js", "report_plots.js", "report.js")


def write_report(paths: Sequence[Path], out: Path) -> Path:
    """Write one HTML page about runs to ``out``, and return ``out``.

    A run that is still going on or that broke off is shown as far as it got; the page names what is missing. The page
    links to the viewers (``write_viewer``) that are there.

    Args:
        paths: run folders, and folders of studies, which stand for all their runs.

    Raises:
        UserError: no such folder, or nothing in it to show.
    """
    folders = find_runs(paths)
    if not folders:
        raise UserError("a report needs at least one run folder")
    labels = _labels([folder.path for folder in folders])
    dialogues = COUNT if len(folders) <= DETAILED else 0
    runs = [
        read_run(folder.path, label, dialogues, folder.cell)
        for folder, label in zip(folders, labels, strict=True)
    ]
    check_place_for(out)
    title = f"{paths[0].resolve().name}: {len(runs)} runs" if len(paths) == 1 else f"{len(runs)} runs"
    page = render(runs, title, [_viewer_address(run.path, out) for run in runs])
    with new_folder(out.parent):
        atomic_write(out, page)
    return out


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
        headline=HEADLINE,
        stability=STABILITY,
        sections=SECTIONS,
        columns=COLUMNS,
        names=names,
        run_table=run_rows(runs, groups, names),
        group_table=group_rows(runs, groups),
        data=chart_data(runs, groups, names),
        missing=missing_figures(runs),
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
    parser = Parser(prog="sorl-report", description="One self-contained HTML page about runs.")
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folders, overlaid; or a study's folder"
    )
    parser.add_argument(
        "--out", type=Path, help="default: RUN/report.html, or report.html here for several runs"
    )
    parser.add_argument(
        "--viewers",
        action=argparse.BooleanOptionalAction,
        help="write each run's viewer, too, to link to (default: of a single run)",
    )
    arguments = parser.parse_args(argv)
    runs: list[Path] = arguments.runs
    out = arguments.out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    folders = find_runs(runs)
    wanted = len(folders) == 1 if arguments.viewers is None else arguments.viewers
    for folder in folders if wanted else ():
        if step_files(RunDir(folder.path).trajectories):
            _write_viewer(folder.path)
    print(write_report(runs, out))
    return 0


def _write_viewer(run: Path) -> None:
    """Write a run's viewer. Where it cannot be written there still is a report, which says what is damaged."""
    try:
        write_viewer(run)
    except UserError as error:
        print(f"sorl-report: no viewer of {run}: {error}", file=sys.stderr)


def _labels(paths: Sequence[Path]) -> list[str]:
    """Folder names, as many of the last ones as tell the runs apart."""
    parts = [path.resolve().parts for path in paths]
    if len(paths) == 1:
        return [parts[0][-1]]
    for depth in range(1, max(map(len, parts))):
        labels = ["/".join(part[-depth:]) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    raise UserError(f"the same run is given twice: {', '.join(map(str, paths))}")


def _viewer_address(run: Path, out: Path) -> str | None:
    """Of a run's viewer, as seen from the page."""
    if not (run / VIEWER).is_file():
        return None
    return urllib.parse.quote(
        Path(os.path.relpath((run / VIEWER).resolve(), out.parent.resolve())).as_posix()
    )


def _with_dialogues(event: Mapping[str, Any], run: ReportRun) -> dict[str, Any]:
    """An event with the last step up to it of which dialogues were saved, sampled or held out (None: there is none)."""
    files = step_files(RunDir(run.path).trajectories)
    saved = [step for _, step, _ in files if step <= event["step"]]
    return {**event, "saved": max(saved, default=None)}


def _samples(runs: Sequence[ReportRun]) -> dict[str, list[str]]:
    """What data are only an embedded sample, and the labels of the runs on them."""
    found: dict[str, list[str]] = {}
    for run in runs:
        if run.data_samples:
            found.setdefault(", ".join(run.data_samples), []).append(run.label)
    return found


if __name__ == "__main__":
    sys.exit(main())
