"""The policies that these tests serve are those of the evaluation's tests."""

from __future__ import annotations

from ..evaluate.conftest import cold_started_run, minihop, run_folder, tokenizer

__all__ = ["cold_started_run", "minihop", "run_folder", "tokenizer"]
