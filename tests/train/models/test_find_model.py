"""A model that is not there is told at once: by the folders beside its path, or by one request to the hub."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sorl_env.errors import UserError
from sorl_train.models.find_model import require_model

# the hub's address is read when its client is imported, so in a process of its own; nothing listens there
ASK = "from sorl_train.models.find_model import require_model; require_model('owner/name')"


def test_a_mistyped_folder_names_those_beside_it(tmp_path: Path) -> None:
    (tmp_path / "SmolLM2").mkdir()
    (tmp_path / ".hidden").mkdir()
    require_model(str(tmp_path / "SmolLM2"))
    for wrong in ("SmolLM", "a/b/c"):
        with pytest.raises(
            UserError, match=r"there is no model at .*A name on the hub is written owner/name"
        ):
            require_model(str(tmp_path / wrong))
    with pytest.raises(UserError, match=r"Did you mean 'SmolLM2'\?"):
        require_model(str(tmp_path / "SmolLM"))
    with pytest.raises(UserError, match=r"Known: SmolLM2\."):
        require_model(str(tmp_path / "x"))


def test_a_hub_that_is_out_is_asked_once(tmp_path: Path) -> None:
    out = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, env=os.environ | out, check=False
    )
    assert "UserError: there is no folder owner/name, and as a hub name it cannot be fetched: " in done.stderr
    assert "make model" in done.stderr
    assert "Retrying" not in done.stderr
