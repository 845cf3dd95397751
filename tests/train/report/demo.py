"""Makes demo pages of invented runs, to look at: ``python -m tests.train.report.demo FOLDER``."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from sorl_train.report.report import write_report
from sorl_train.report.viewer import write_viewer

from .conftest import make_run


def main(folder: Path) -> None:
    one = make_run(folder / "so_ppo-s0", is_sample=True, batch=40)
    running = make_run(folder / "running", seed=2, steps=25, finished=False)
    study = folder / "study"
    for algo, seed in itertools.product(("so_ppo", "ppo", "grpo"), range(3)):
        make_run(study / "runs" / f"{algo}-s{seed}-0123456789", algo=algo, seed=seed, hostile=seed == 1)
    pages = [write_viewer(run) for run in (one, *sorted((study / "runs").iterdir()))]
    for runs, name in (([one], "one.html"), ([study], "study.html"), ([running], "running.html")):
        pages.append(write_report(runs, folder / name))
    for page in pages:
        print(f"{page}: {page.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
