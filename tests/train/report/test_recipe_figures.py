"""The curves of docs/recipes/ are drawn from the metrics that are committed beside the pages."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    pytest.importorskip("matplotlib", reason="the curves are drawn with matplotlib (pip install matplotlib)")
    spec = importlib.util.spec_from_file_location("recipe_figures", ROOT / "benchmarks" / "recipe_figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_run_becomes_a_picture(figures: ModuleType, tmp_path: Path) -> None:
    """Evaluations are rarer than steps, and a figure may be null."""
    lines = [
        {"step": 0, "eval/success": 0.6, "loss/entropy": 1.0},
        {"step": 1, "rollout/success": 0.5, "rollout/valid_turn_rate": 1.0, "loss/approx_kl": 0.002},
        {"step": 2, "rollout/success": 0.7, "rollout/valid_turn_rate": None, "loss/approx_kl": 0.001},
        {"step": 2, "eval/success": 0.8},
    ]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    rows = figures.kept(metrics)
    assert rows[0] == {"step": 0, "eval/success": 0.6} and "rollout/valid_turn_rate" not in rows[2]
    figures.draw(rows, tmp_path / "curve.png")
    picture = (tmp_path / "curve.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def test_every_committed_curve_can_be_drawn(figures: ModuleType, tmp_path: Path) -> None:
    for metrics in (ROOT / "docs" / "recipes").glob("*.jsonl"):
        figures.draw(figures.kept(metrics), tmp_path / f"{metrics.stem}.png")
        assert (ROOT / "docs" / "images" / f"recipe_{metrics.stem}.png").is_file()
