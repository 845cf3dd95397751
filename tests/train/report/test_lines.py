"""Lines of the report's plots in a real browser: medians, breaks, and many of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sorl_train.report.report import write_report

from .test_page import readout

pytestmark = pytest.mark.slow


def test_a_run_that_ended_early_does_not_lift_the_median(
    browser: Any, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    """Three seeds: one stopped after its collapse, one is still at step 2, one went to the end."""
    curves = {
        "stopped": [(0, 0.6, 1.0), (1, 0.1, 8.0)],
        "going": [(0, 0.6, 1.0), (1, 0.7, 0.0), (2, 0.8, 2.0)],
        "whole": [(0, 0.6, 1.0), (1, 0.8, 4.0), (2, 0.9, 6.0), (3, 1.0, 1.0)],
    }
    runs = []
    for seed, (name, rows) in enumerate(curves.items()):
        run = make_run(tmp_path / name, seed=seed, steps=4, batch=3, finished=name != "going")
        (run / "timings.jsonl").unlink()
        lines = [{"step": step, "eval/success": value, "loss/grad_norm": norm} for step, value, norm in rows]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        runs.append(run)
    browser.open(write_report(runs, tmp_path / "report.html"))

    def line(figure: str, metric: str) -> dict[str, list[float | None]]:
        found = f"sorl.data.figures.find((figure) => figure.id === '{figure}')"
        return browser.run(f"sorl.lines.values(sorl.lines.all()[0], {found}, '{metric}')")

    assert line("success", "eval/success") == {
        # step 3: .1 held, and 1; what is going on is not made up
        "middle": [0.6, 0.7, 0.8, pytest.approx(0.55)],
        "low": [0.6, 0.1, 0.1, 0.1],
        "high": [0.6, 0.8, 0.9, 1.0],
        "off": [False] * 4,
        "broken": [False] * 4,
    }
    # a norm is not held: the line ends where only one of three is left; the zero is off the log axis, but counted
    assert line("gradient-norm", "loss/grad_norm") == {
        "middle": [1.0, 4.0, 4.0, None], "low": [1.0, 4.0, 2.0, None], "high": [1.0, 8.0, 6.0, None],
        "off": [False] * 4, "broken": [False] * 4,
    }  # fmt: skip


def test_a_line_is_broken_where_it_has_no_value(
    browser: Any, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    """Norms of 8, 8, 0, 8, none, 8 and 0: a log axis has no zero, and step 5 has no norm. Evaluations of steps 1 and 7
    are joined: there is none in between. A value between two breaks is a point, also of a line that shows no others."""
    norms = [8.0, 8.0, 0.0, 8.0, None, 8.0, 0.0]
    expect_breaks(browser, make_run(tmp_path / "short", steps=7, batch=3), norms)
    expect_breaks(browser, make_run(tmp_path / "long", steps=47, batch=3), [*norms, *[8.0] * 39, 0.0])


def expect_breaks(browser: Any, run: Path, norms: list[float | None]) -> None:
    lines = [
        {"step": step, "loss/grad_norm": norm} | ({"eval/success": 0.5} if step in (1, 7) else {})
        for step, norm in enumerate(norms, start=1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "timings.jsonl").unlink()
    browser.open(write_report([run], run / "report.html"))
    blue = """((figure, step) => {
      const canvas = document.querySelector(`#figure-${figure} canvas`);
      const over = document.querySelector(`#figure-${figure} .u-over`);
      const x = Math.round(parseFloat(over.style.left) + over.clientWidth * (step - 1) / (sorl.lines.steps.length - 1));
      const strip = canvas.getContext('2d').getImageData(x - 1, 0, 3, canvas.height).data;
      for (let i = 0; i < strip.length; i += 4) {
        if (Math.abs(strip[i] - 47) + Math.abs(strip[i + 1] - 111) + Math.abs(strip[i + 2] - 219) < 40) return true;
      }
      return false;
    })"""
    painted = {step: browser.run(f"{blue}('gradient-norm', {step})") for step in (1.5, 3, 4, 5, 6, 7)}
    assert [step for step, is_blue in painted.items() if is_blue] == [1.5, 4, 6]
    assert all(browser.run(f"{blue}('success', {step})") for step in (1.5, 4, 6))
    assert readout(browser, "gradient-norm") == ["0"]


def test_many_lines_show_the_nearest(browser: Any, make_run: Callable[..., Path], tmp_path: Path) -> None:
    for algo, rate in itertools.product(("so_ppo", "ppo"), (1e-4, 2e-4, 3e-4, 4e-4, 5e-4)):
        make_run(tmp_path / "runs" / f"{algo}-{rate:g}", algo=algo, lr=rate, steps=10, batch=3)
    page = write_report([tmp_path], tmp_path / "report.html")
    browser.open(page)
    note = "document.querySelector('#figure-reward .nearest').textContent"
    counted = "document.getElementById('shown-lines').textContent"
    assert browser.run(note) == "point at a line to read it"
    assert browser.run(counted) == "10 of 10 lines shown"
    # more groups than colours: one colour for each algorithm, shown at its switch
    chips = "[...document.querySelectorAll('.results .chip')].map((chip) => chip.className)"
    assert browser.run(chips) == ["chip c0"] * 5 + ["chip c1"] * 5
    browser.run("document.querySelector('#figure-reward').scrollIntoView()")
    browser.move_to("#figure-reward .u-over", x=0.98, y=0.95)  # the collapsed ones end at the bottom
    browser.wait_for(f"/^[0-9.e-]+ ppo-0.000[1-5]$/.test({note})")
    for algo in ("ppo", "so_ppo"):  # one switched off, then the other, too
        browser.run(f"document.querySelector('.choice[data-name=algo] button[value={algo}]').click()")
    assert browser.run(counted) == "0 of 10 lines shown"
    browser.run("document.querySelector('.choice[data-name=algo] button[value=ppo]').click()")
    assert browser.run(counted) == "5 of 10 lines shown"
    assert len(readout(browser, "reward")) == 5
    assert len(set(browser.run(chips)[:5])) == 5  # few enough for a colour each
    assert browser.complaints() == []
    browser.open(page, width=390)
    assert browser.run("document.documentElement.scrollWidth") <= 390
