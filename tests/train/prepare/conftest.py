"""Preparing stays off the network, and a folder that was prepared."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def prepared(offline: None, tmp_path: Path) -> Path:
    from .files import jsonl, made  # skips where pyarrow is missing, which a conftest must not

    train = jsonl(tmp_path / "a.jsonl", [{"question": f"q{i}?", "golden_answers": ["a"]} for i in range(4)])
    test = jsonl(tmp_path / "b.jsonl", [{"question": f"t{i}?", "golden_answers": ["a"]} for i in range(2)])
    made("nq", tmp_path / "nq", f"train={train}", f"test={test}")
    return tmp_path / "nq"
