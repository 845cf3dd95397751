"""The committed pictures are those that the script draws, and each is shown on a page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "images" / "make.py"
DRAWN = ROOT / "docs" / "images"


def test_the_committed_pictures_are_what_the_script_draws() -> None:
    found = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stderr) == (0, ""), found.stdout + "python docs/images/make.py --write"


@pytest.mark.parametrize("picture", sorted(path.name for path in DRAWN.glob("*.[sp][vn]g")))
def test_each_picture_is_small_and_shown(picture: str) -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    assert any(f"images/{picture})" in page.read_text(encoding="utf-8") for page in pages)
    assert (DRAWN / picture).stat().st_size < 300_000
