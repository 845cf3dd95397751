"""``sorl-data``: prepare, check and show."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sorl_env import load_task
from sorl_train.prepare.cli import main

from .files import SHARED, jsonl, rows_of

pytestmark = pytest.mark.usefixtures("offline")


def test_prepare_check_and_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shared_data: Path
) -> None:
    sources = [f"--source={s}={shared_data / f}.jsonl.gz" for s, f in SHARED["hotpotqa"].items()]
    out = tmp_path / "hotpotqa"
    assert main(["prepare", "hotpotqa", *sources, "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert (
        f"{out}/train.jsonl: 298 questions" in said.out
        and "test.jsonl: 51 of its questions are in train word for word" in said.err
    )
    assert (
        main(
            [
                "check",
                str(out / "train.jsonl"),
                str(out / "test.jsonl"),
                "--out",
                str(tmp_path / "pairs.jsonl"),
            ]
        )
        == 1
    )
    assert "exact: 51 pairs, 51 questions of the first file, 51 of the second" in capsys.readouterr().out
    beside = [{"with": "test.jsonl", **pair} for pair in rows_of(tmp_path / "pairs.jsonl")]
    assert rows_of(out / "overlap.jsonl") == beside
    assert main(["show", str(out), "--rows", "1"]) == 0
    shown = capsys.readouterr().out
    assert (
        "298 questions" in shown
        and "as prepared, from train_distractor.jsonl.gz; hotpotqa, licence cc-by-sa-4.0" in shown
    )
    assert re.search(r"  type: bridge \d+, comparison \d+\n", shown) and '{"id": "meve_0"' in shown
    with (out / "train.jsonl").open("a") as file:
        file.write(json.dumps({"question": "q?", "golden_answers": ["a"]}) + "\n")
    main(["show", str(out / "train.jsonl")])
    assert "CHANGED since it was prepared" in capsys.readouterr().out


def test_check_of_clean_files(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(prepared / "train.jsonl"), str(prepared / "test.jsonl")]) == 0
    assert "exact: 0 pairs" in capsys.readouterr().out


@pytest.mark.slow  # imports transformers
def test_show_counts_prompt_tokens(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    from sorl_train.models.tiny import build_tiny_policy

    build_tiny_policy(load_task("minihop"), tmp_path / "tiny", hidden_size=32, num_layers=1, num_heads=2)
    assert main(["show", str(prepared / "train.jsonl"), "--tokenizer", str(tmp_path / "tiny")]) == 0
    assert re.search(r"tokens of a prompt: median \d+, .* 0 over the limit of 2,048", capsys.readouterr().out)


def test_command_line_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path / "x.jsonl")]) == 2
    assert "no such file or folder" in capsys.readouterr().err
    assert main(["show", str(tmp_path)]) == 2
    assert "no train or test file" in capsys.readouterr().err
    row = jsonl(tmp_path / "mcq.jsonl", [{"question": "q?", "opa": "x"}])
    assert main(["check", str(row), str(row)]) == 2
    assert (
        "no column 'golden_answers'. --task NAME reads the columns of that task." in capsys.readouterr().err
    )
    assert main(["prepare", "pubmedqa", "--test_ids", str(tmp_path / "none.json"), "--out", "x"]) == 2
    assert "--test_ids" in capsys.readouterr().err
    assert main(["prepare"]) == 2
