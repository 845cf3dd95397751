"""Shared fixtures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the real data next to the repository; ``SORL_SHARED_DATA`` names another one."""
    folder = Path(os.environ.get("SORL_SHARED_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; set SORL_SHARED_DATA to its folder")
    return folder
