"""What the viewer's page holds: which dialogues, packed how, with which figures of their tokens."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sorl_env.errors import UserError
from sorl_env.trajectory import StopReason, Trajectory, write_jsonl
from sorl_train.report import viewer
from sorl_train.report.dialogues import step_files
from sorl_train.report.viewer import CHUNK, encode, main, read_page, write_viewer
from sorl_train.run.metrics_log import TokenRecord, write_token_records

MakeRun = Callable[..., Path]
MakeTrajectory = Callable[..., Trajectory]


def unpack(packed: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def contents(page: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and dialogues of a page."""
    text = page.read_text(encoding="utf-8").partition('id="data">')[2].partition("</script>")[0]
    data = json.loads(text)
    return unpack(data["rows"]), [dialogue for chunk in data["chunks"] for dialogue in unpack(chunk)]


# --- the page -------------------------------------------------------------------------------------
def test_every_saved_dialogue(make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", steps=20, batch=40)
    page = run / "viewer.html"
    assert main([str(run)]) == 0 and capsys.readouterr().out == f"{page}\n"
    rows, dialogues = contents(page)
    assert len(rows) == len(dialogues) == 3 * 40 > 3 * CHUNK
    assert [row["step"] for row in rows] == [1] * 40 + [10] * 40 + [20] * 40
    first = rows[0]
    assert (first["key"], first["stop"], first["errors"]) == ("step-1/s1-p0/0", "invalid", ["unclosed"])
    assert (first["reward"], first["mark"], first["turns"], first["clipped"]) == (0.0, "lowest", 3, None)
    assert first["question"].startswith("In which town"), "what all questions begin with is left out"
    assert dialogues[0]["prompt"].startswith("Search, then answer.")
    assert dialogues[0]["note"] == viewer.NO_TOKENS_SAVED and dialogues[0]["turns"][0]["tokens"] is None
    assert sorted(row["mark"] for row in rows)[-6:] == ["highest"] * 3 + ["lowest"] * 3
    late = dialogues[rows.index(next(row for row in rows if row["step"] == 20 and row["stop"] == "answer"))]
    assert late["note"] == "" and len(late["turns"][0]["tokens"]["ratio"]) == 14
    call = late["turns"][1]["calls"][0]
    assert (call["tool"], call["argument"], call["hits"], call["attempts"]) == (
        "search", "Vela Foundry town", 3, 2,
    )  # fmt: skip
    text = page.read_text()
    assert "default-src 'none'" in text and 'src="' not in text
    assert "saved dialogues are on this page" not in text


def test_a_reply_that_was_cut_is_marked(make_trajectory: MakeTrajectory) -> None:
    trajectory = make_trajectory("t/0", np.random.default_rng(0))
    (at,) = [i for i, turn in enumerate(trajectory.turns) if turn.tool_calls][:1]
    call = trajectory.turns[at].tool_calls[0]._replace(cut_from=5_000_000)
    turns = list(trajectory.turns)
    turns[at] = dataclasses.replace(turns[at], tool_calls=(call,))
    encoded = encode(dataclasses.replace(trajectory, turns=tuple(turns)), None, "")
    assert encoded["turns"][at]["calls"][0]["cut_from"] == 5_000_000
    assert encode(trajectory, None, "")["turns"][at]["calls"][0]["cut_from"] is None


def test_no_dialogue_can_end_a_script(make_run: MakeRun, tmp_path: Path) -> None:
    page = write_viewer(make_run(tmp_path / "run", steps=2, hostile=True))
    text = page.read_text()
    assert "onerror" not in text and len(re.findall(r"</script", text)) == 7
    _, dialogues = contents(page)
    assert "</script>\u2028<img src=x onerror=" in dialogues[1]["turns"][0]["observation"]


def test_it_samples_and_says_so(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=20, batch=40)
    page = write_viewer(run, tmp_path / "new" / "page.html", most=30)
    rows, _ = contents(page)
    assert [sum(row["step"] == step for row in rows) for step in (1, 10, 20)] == [10, 10, 10]
    assert "30 of 120 saved dialogues are on this page" in page.read_text()
    for step in (1, 10, 20):
        assert sorted(row["mark"] for row in rows if row["step"] == step)[-2:] == ["highest", "lowest"]


def test_a_file_that_was_cut_off(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=10)
    last = run / "trajectories" / "step_000010.jsonl"
    last.write_bytes(last.read_bytes()[:-30])
    sidecar = run / "trajectories" / "step_000010.tokens.jsonl.gz"
    sidecar.write_bytes(sidecar.read_bytes()[:-30])
    page = write_viewer(run)
    assert len(contents(page)[0]) == 12 + 11
    text = page.read_text()
    assert "trajectories/step_000010.jsonl is damaged, and used only up to there" in text
    assert "trajectories/step_000010.tokens.jsonl.gz is damaged, and used only up to there" in text
    last.write_bytes(b"")
    (run / "trajectories" / "step_000001.jsonl").write_bytes(b"{}\n")
    with pytest.raises(UserError, match=r"no dialogue in .* can be read: .*step_000001.jsonl:1"):
        write_viewer(run)


# --- which dialogues ------------------------------------------------------------------------------
def test_extremes_of_each_step_are_kept(batches: Callable[..., Path]) -> None:
    rng = np.random.default_rng(0)
    rewards = {f"step_{step:06d}": rng.random(50).tolist() for step in range(1, 9)}
    folder = batches(**rewards, eval_000008=[0.0, 1.0])
    for most in (2, 20, 60):
        packed = read_page(step_files(folder), [], most)
        assert packed.found == 8 * 50 + 2
        assert 18 <= len(packed.rows) <= max(most, 18)
        for step in range(1, 9):
            shown = [row for row in packed.rows if row["step"] == step and row["kind"] == "step"]
            values = rewards[f"step_{step:06d}"]
            marked = {row["mark"]: row["reward"] for row in shown if row["mark"]}
            assert marked == {"lowest": min(values), "highest": max(values)}


# --- figures of tokens ----------------------------------------------------------------------------
def record_of(trajectory: Trajectory, **changes: Any) -> TokenRecord:
    number = trajectory.num_action_tokens
    turns = [int(turn) for turn in trajectory.turn_ids if turn >= 0]
    values = [0.0] * number
    plain = TokenRecord(trajectory.id, ["x"] * number, turns, values, values, values, values, [0] * number)
    return dataclasses.replace(plain, **changes)


def test_a_record_of_other_tokens_is_not_shown(make_trajectory: MakeTrajectory) -> None:
    t = make_trajectory("s1-p0/0", np.random.default_rng(0))
    good = encode(t, record_of(t), "")
    assert good["note"] == "" and "".join(good["turns"][0]["tokens"]["text"]) == "x" * 14
    assert good["turns"][0]["pieces"] == [("plain", "x" * 14)]
    turns = list(record_of(t).turn)
    swapped = encode(t, record_of(t, turn=[turns[-1], *turns[1:-1], turns[0]]), "")
    assert swapped["note"] == viewer.MISMATCH and swapped["turns"][0]["tokens"] is None
    assert swapped["turns"][0]["pieces"][0][0] == "think"


def test_what_is_not_finite_stays_readable(make_trajectory: MakeTrajectory) -> None:
    t = make_trajectory("s1-p0/0", np.random.default_rng(0))
    record = record_of(t)
    ratio = [math.nan, math.inf, *record.ratio[2:]]
    tokens = encode(t, dataclasses.replace(record, ratio=ratio), "")["turns"][0]["tokens"]
    assert tokens["ratio"][:3] == [None, None, 0.0]


def test_why_there_are_no_figures(make_run: MakeRun, make_trajectory: MakeTrajectory, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=10)
    folder = run / "trajectories"
    held_out = [make_trajectory("e10-p0/0", np.random.default_rng(0), stop=StopReason.ANSWER)]
    write_jsonl(folder / "eval_000010.jsonl", held_out)
    write_token_records(folder / "step_000001.tokens.jsonl.gz", [])
    rows, dialogues = contents(write_viewer(run))
    notes = {
        (row["kind"], row["step"], row["stop"]): d["note"] for row, d in zip(rows, dialogues, strict=True)
    }
    assert notes["eval", 10, "answer"] == viewer.NO_LOSS
    assert notes["step", 1, "answer"] == viewer.NOT_IN_LOSS  # the file is there, the record is not
    assert notes["step", 10, "error"] == viewer.NOT_IN_LOSS
    assert notes["step", 10, "answer"] == ""
