"""docs/stability.md says what the committed results say: its tables are those of benchmarks/stability_tables.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_tables_of_the_page_are_made_from_the_results() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/stability_tables.py")]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (made.returncode, made.stderr) == (0, ""), made.stdout
