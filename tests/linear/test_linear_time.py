"""What reads a policy's text or retrieved text does so in linear time.

Lines of Python are counted. Python's own engine for patterns cannot be asked how often it tried, so the readers also
run on texts that are so long that quadratic time would be ten times the limit. A function with a new pattern that meets
such text belongs into `READERS`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from .readers import READERS, TEXTS, text_of

FILE = Path(__file__).with_name("readers.py")
SHORT, LONG = 200, 800  # characters; four times as many may take four times as many lines
FACTOR = 7.0  # quadratic time would be 16
LENGTH, SECONDS = 60_000, 2  # the slowest reader takes an eighth of a second


def lines_run(reader: str, text: str) -> int:
    """How many lines of Python a reader runs."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        READERS[reader](text)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_runs_lines_in_proportion_to_the_text(reader: str) -> None:
    for parts in TEXTS[::4]:
        short, long = (lines_run(reader, text_of(parts, length)) for length in (SHORT, LONG))
        assert long < FACTOR * short + 50, parts


def test_every_reader_reads_long_texts() -> None:
    command = [sys.executable, str(FILE), str(LENGTH), str(SECONDS)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert made.returncode == 0 and made.stdout.endswith("all read\n"), (
        made.stdout[-300:],
        made.stderr[-600:],
    )


@pytest.mark.parametrize("pattern", [r"(?s)<answer>(.*?)</answer>", r"\s+x", r"(?m)^\s*Question:\s*(\S.*)$"])
def test_a_pattern_that_is_not_linear_is_stopped(pattern: str) -> None:
    """Patterns that this project had, and textbook ones."""
    code = f"import re, runpy; read_all = runpy.run_path({str(FILE)!r})['read_all']"
    code += f"; read_all({{'bad': re.compile({pattern!r}).findall}}, {LENGTH}, 1)"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert made.returncode != 0 and "all read" not in made.stdout, made.stderr
