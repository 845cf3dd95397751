"""Makes demo pages of invented runs, to look at: ``python tests/train/report/demo.py FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

from conftest import make_run

from sorl_train.report import write_report


def main(folder: Path) -> None:
    one = make_run(folder / "so_ppo-s0", is_sample=True)
    others = [make_run(folder / f"{algo}-s1", algo=algo, seed=1) for algo in ("ppo", "grpo")]
    running = make_run(folder / "running", seed=2, steps=25, finished=False)
    for runs, name in (([one], "one.html"), ([one, *others], "three.html"), ([running], "running.html")):
        page = write_report(runs, folder / name)
        print(f"{page}: {page.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
