"""What a person sees of a run."""

from __future__ import annotations

import io
import os
import sys

import pytest
from rich.console import Console

from sorl_train.run.display import LEGEND, Display, LiveDisplay, make_display, summary_block

STEP = {
    "rollout/success": 0.75,
    "rollout/valid_turn_rate": 0.9875,
    "loss/clip_frac": 0.01234,
    "loss/clip_bias_norm": 1.5,
    "loss/normalizer": 0.62,
    "loss/grad_norm": 12345.6,
    "loss/approx_kl": 0.00123,
    "time/tokens_per_s": 1834.4,
}


@pytest.mark.parametrize("buffering", [0, -1])  # PYTHONUNBUFFERED, or not
def test_a_run_goes_on_when_nobody_reads_its_lines(
    buffering: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with io.TextIOWrapper(os.fdopen(writer, "wb", buffering), write_through=not buffering) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        for display in (make_display(), make_display()):
            display.message("a line")
    said = "sorl-train: nobody reads the output any more; the run goes on, and Ctrl-C ends it\n"
    assert capsys.readouterr().err == said  # once


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines_are_aligned_and_count_down() -> None:
    stream, clock = io.StringIO(), Clock()
    display = Display(stream, clock)
    display.start("so_ppo on minihop", steps=10, done=0)
    display.step(0, {"eval/success": 0.69, "eval/valid_turn_rate": 0.98, "time/step_s": 1.0})
    for step in (1, 2):
        clock.now += 3.0
        with display.stage("rollout", 4) as advance:
            advance(4)
        display.step(step, STEP | ({"eval/success": 0.8} if step == 2 else {}))
    words = "Over 24 optimizer steps, 3% of tokens were clipped."
    display.close({"cold_start_success": 0.69, "final_success": 0.8, "off_policy": words})
    assert stream.getvalue().splitlines() == [
        "so_ppo on minihop",
        "evaluation before training: greedy success 0.690, valid turns 0.980",
        LEGEND,
        "   step  sampled    valid     clip     bias   factor     grad   KL old    tok/s         ETA",
        "   1/10    0.750    0.988   0.0123      1.5    0.620 1.23e+04   0.0012     1834        27 s",
        "   2/10    0.750    0.988   0.0123      1.5    0.620 1.23e+04   0.0012     1834        24 s",
        "evaluation after step 2: greedy success 0.800",
        "",
        "success before training  0.69",
        "final success            0.8",
        "",
        "Over 24 optimizer steps, 3% of tokens were clipped.",
    ]


def test_what_a_step_has_not_is_a_dash_and_lost_trajectories_are_said() -> None:
    stream = io.StringIO()
    display = Display(stream, Clock())
    display.start("t", steps=3)
    figures = {"rollout/success": 0.0, "loss/ref_kl": 0.5, "loss/approx_kl": 0.1, "loss/trust_scale": 0.4}
    display.step(1, figures)
    display.step(2, {"rollout/excluded_rate": 1.0, "eval/excluded_rate": 1.0})
    header, before, row, evaluation = stream.getvalue().splitlines()[-4:]
    assert header.split()[5:] == ["factor", "scale", "grad", "KL", "old", "KL", "ref", "tok/s", "ETA"]
    assert before.split() == ["1/3", "0.000", *["-"] * 4, "0.4", "-", "0.1", "0.5", "-", "0", "ms"]
    assert row.split() == ["2/3", *["-"] * 10, "0", "ms", "100.0%", "excluded"]
    assert evaluation == "evaluation after step 2: no result: all trajectories were excluded (tool outages)"


def test_a_long_stage_without_a_terminal_tells_how_far_it_is() -> None:
    stream, clock = io.StringIO(), Clock()
    display = Display(stream, clock)
    with display.stage("rollout", 30) as advance:
        for _ in range(3):
            clock.now += 6.0
            advance(10)
    assert stream.getvalue() == "rollout: 20 of 30\n"  # after 12 seconds; at 18 s the last line is 6 s old


def test_supervised_steps_have_columns_of_their_own() -> None:
    stream = io.StringIO()
    display = Display(stream)
    display.start("sft", steps=2)
    display.step(1, {"sft/loss": 2.5, "sft/confident": 0.25, "sft/grad_norm": 1.0})
    header, row = stream.getvalue().splitlines()[1:]
    assert header.split() == ["step", "loss", "conf", "grad", "ETA"]
    assert row.split()[:4] == ["1/2", "2.5000", "0.250", "1"]


def test_a_terminal_has_the_same_lines_and_progress_bars() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None, highlight=False)
    display = LiveDisplay(console)
    with display.stage("cold start", 2) as advance:
        advance(2)
    display.start("so_ppo [x] on minihop", steps=2)
    for step in (1, 2):
        with display.stage("rollout", 4) as advance:
            advance(4)
        display.step(step, STEP | {"rollout/success": step / 2, "loss/grad_norm": float("nan")})
    display.message("a [note]")
    display.close({"best_success": 1.0})
    display.close()
    text = stream.getvalue()
    parts = ("cold start", "so_ppo [x] on minihop", "2/2", "a [note]", "best success  1", "valid", "0.988")
    assert [part for part in parts if part not in text] == []


def test_pipes_ci_and_dumb_terminals_get_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for stream, term, ci, kind in (
        (Terminal(), "xterm", "", LiveDisplay),
        (io.StringIO(), "xterm", "", Display),
        (Terminal(), "dumb", "", Display),
        (Terminal(), "xterm", "true", Display),
    ):
        monkeypatch.setenv("TERM", term)
        monkeypatch.setenv("CI", ci)
        assert type(make_display(stream)) is kind


def test_the_summary_has_units_and_leaves_out_what_is_missing() -> None:
    block = summary_block({"wall_s": 61.2, "peak_rss_mb": 1834.2, "best_step": None, "parameters": 487584})
    assert block.splitlines() == ["wall        1 min 01 s", "peak rss    1.9 GB", "parameters  487,584"]
