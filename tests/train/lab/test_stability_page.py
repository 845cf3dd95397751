"""docs/stability.md says what the committed results say: its tables are those of benchmarks/stability_tables.py."""

from __future__ import annotations

import math
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_the_tables_of_the_page_are_made_from_the_results() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/stability_tables.py")]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (made.returncode, made.stderr) == (0, ""), made.stdout


def test_averages_over_a_grid() -> None:
    """Shares of cells above a bar, means, and differences at the same points, with intervals."""
    runs = runpy.run_path(str(ROOT / "benchmarks/stability_tables.py"))
    average, share_above = runs["average"], runs["share_above"]
    three = {("a", 1.0): [1.0, 1.0, 1.0], ("b", 1.0): [0.2, 0.3, 0.1], ("c", 1.0): [1.0, 0.2, 1.0]}
    # Wilson: three cells say little
    assert share_above(0.95, three) == pytest.approx((2 / 3, 0.2077, 0.9385), abs=1e-4)
    all_above = {point: [1.0] for point in three}
    assert share_above(0.95, all_above)[1:] == pytest.approx((0.4385, 1.0), abs=1e-4)  # it was 100% to 100%
    assert average(three)[0] == pytest.approx((1.0 + 0.2 + 1.0) / 3)
    halves = {("x", float(i)): [float(i % 2)] for i in range(40)}
    mean, low, high = average(halves)
    spread = 1.96 * math.sqrt(0.25 / 40)
    assert mean == pytest.approx(0.5)
    assert (low, high) == pytest.approx((0.5 - spread, 0.5 + spread), abs=0.03)
