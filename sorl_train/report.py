"""``sorl-report RUN...``: one self-contained HTML page about a run, or about several overlaid.

The page works offline and is small because its plots are uPlot's (51 KB, vendored in ``report_assets``), which has
log axes, hover values and cursors linked over all plots. The alternatives: plotly.js is 4.8 MB in its Python package
(1.2 MB its basic build, not in it), Vega-Lite 0.8 MB with what it needs, and matplotlib's SVG has no hover values.
Everything that comes from a run is escaped by Jinja, and a content security policy lets nothing load and no script
run but the page's own two.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from sorl_env.errors import UserError
from sorl_train.report_dialogue import question_of, segments
from sorl_train.report_figures import chart_data, missing_figures, stage_seconds
from sorl_train.report_run import HEADLINE, ReportRun, differing_settings, read_run
from sorl_train.run_dir import atomic_write

_ASSETS = Path(__file__).resolve().parent / "report_assets"


def write_report(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write one HTML page about the runs to ``out``, and return ``out``.

    A run that is still going on or that broke off is shown as far as it got; the page names what is missing.

    Raises:
        UserError: no such folder, or nothing in it to show.
    """
    if not run_dirs:
        raise UserError("a report needs at least one run folder")
    runs = [read_run(path, label) for path, label in zip(run_dirs, _labels(run_dirs), strict=True)]
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, render(runs))
    return out


def render(runs: Sequence[ReportRun]) -> str:
    """The page as text."""
    scripts = [_asset("uPlot.LICENSE", comment=True) + _asset("uPlot.iife.min.js"), _asset("report.js")]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}  # curves keep their order
    environment.filters |= {
        "figure": _figure,
        "seconds": _seconds,
        "segments": segments,
        "question": question_of,
        "pretty": _pretty,
    }
    title = f"{runs[0].title} · {runs[0].label}" if len(runs) == 1 else f"{len(runs)} runs"
    return environment.get_template("report.html.j2").render(
        title=title,
        runs=runs,
        headline=HEADLINE,
        data=chart_data(runs),
        missing=missing_figures(runs),
        stages=[stage_seconds(run) for run in runs],
        differing=differing_settings(runs),
        styles=[_asset("uPlot.min.css"), _asset("report.css")],
        scripts=scripts,
        script_hashes=" ".join(f"'sha256-{_sha256(script)}'" for script in scripts),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command ``sorl-report``; the exit status."""
    parser = argparse.ArgumentParser(
        prog="sorl-report", description="One self-contained HTML page about runs."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders; several are overlaid")
    parser.add_argument(
        "--out", type=Path, help="default: RUN/report.html, or report.html here for several runs"
    )
    arguments = parser.parse_args(argv)
    runs: list[Path] = arguments.runs
    out = arguments.out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    try:
        print(write_report(runs, out))
    except (UserError, OSError) as error:
        print(f"sorl-report: {error}", file=sys.stderr)
        return 2
    return 0


def _labels(paths: Sequence[Path]) -> list[str]:
    """Folder names, as many of the last ones as tell the runs apart."""
    parts = [path.resolve().parts for path in paths]
    for depth in range(1, max(map(len, parts))):
        labels = ["/".join(part[-depth:]) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    raise UserError(f"the same run is given twice: {', '.join(map(str, paths))}")


def _asset(name: str, *, comment: bool = False) -> str:
    text = (_ASSETS / name).read_text(encoding="utf-8").strip()
    return f"/* {text} */\n" if comment else text


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _figure(value: Any, kind: str = "") -> str:
    """A headline figure as a person reads it; an en dash for one that is not there."""
    if not isinstance(value, (int, float)):
        return "–"  # noqa: RUF001
    if kind == "seconds":
        return _seconds(value)
    if kind == "megabytes":
        return f"{value / 1000:.2f} GB" if value >= 1000 else f"{value:.0f} MB"
    return f"{value:.3f}" if kind == "share" else f"{value:.4g}"


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _seconds(value: float) -> str:
    if value < 1:
        return f"{value * 1000:.3g} ms"
    if value < 60:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


if __name__ == "__main__":
    sys.exit(main())
