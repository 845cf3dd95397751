"""A short run is that of the evaluation's tests."""

from __future__ import annotations

from ..evaluate.conftest import run_folder

__all__ = ["run_folder"]
