"""The report in a real browser: its looks, what hovering and switches do, and its lines: medians, breaks, many."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sorl_train.report.page import SECTIONS
from sorl_train.report.report import write_report
from sorl_train.report.viewer import write_viewer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, make_run: Callable[..., Path]) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    one, other = make_run(folder / "so_ppo", hostile=True), make_run(folder / "ppo", algo="ppo", seed=1)
    write_viewer(other)
    study = folder / "study"
    for algo, seed in itertools.product(("so_ppo", "ppo"), range(3)):
        make_run(study / "runs" / f"{algo}-s{seed}", algo=algo, seed=seed, batch=3)
    pages = {
        "one": write_report([one], folder / "one.html"),
        "two": write_report([one, other], folder / "two.html"),
        "study": write_report([study], folder / "study.html"),
    }
    (one / "timings.jsonl").unlink()
    (one / "summary.json").unlink()
    return pages | {"broken": write_report([one], folder / "broken.html")}


COUNT_PAINTED = """
[...document.querySelectorAll('figure')].map((figure) => {
  const canvas = figure.querySelector('canvas');
  const pixels = new Uint32Array(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  return [figure.id, new Set(pixels).size];
})
"""


@pytest.mark.parametrize(
    ("name", "scheme", "width"),
    [("one", "light", 1280), ("two", "dark", 390), ("study", "light", 390), ("broken", "dark", 1280)],
)
def test_the_page_draws_itself_alone(
    browser: Any, pages: dict[str, Path], name: str, scheme: str, width: int
) -> None:
    browser.open(pages[name], scheme=scheme, width=width)
    data = json.loads(browser.run("document.getElementById('data').textContent"))
    all_of_them = sum(len(section.figures) for section in SECTIONS)
    assert len(data["figures"]) == all_of_them - (2 if name == "broken" else 0)
    expected = data["figures"]
    if name == "one":  # the metrics that no figure has are drawn when they are asked for
        browser.run("document.getElementById('more').open = true")
        browser.wait_for("document.querySelectorAll('#more-figures figure canvas').length > 5")
        expected += data["more"]
    painted = dict(browser.run(COUNT_PAINTED))
    assert list(painted) == [f"figure-{figure['id']}" for figure in expected]
    assert all(colours > 10 for colours in painted.values()), painted  # axes, grid and antialiased curves
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.complaints() == []
    assert browser.requests() == [pages[name].as_uri()]


def test_a_hostile_passage_stays_text(browser: Any, pages: dict[str, Path]) -> None:
    browser.open(pages["one"])
    browser.opens_hostile_text(scripts=6)
    # and a script that slipped in would not run
    browser.run(
        "document.body.insertAdjacentHTML('beforeend', '<img src=\"https://example.com/x.png\" onerror=\"title=1\">');"
        "const script = document.createElement('script'); script.textContent = \"document.title = 'owned'\";"
        "document.body.append(script)"
    )
    assert "owned" not in browser.run("document.title")
    browser.wait_for("document.images[0].complete")
    assert [event["blockedReason"] for event in browser.seen("Network.loadingFailed")] == ["csp"]


def background(browser: Any) -> int:
    """Sum of red, green and blue of the page's background."""
    value = browser.run("getComputedStyle(document.body).backgroundColor")
    return sum(int(part) for part in value.removeprefix("rgb(").removesuffix(")").split(","))


def test_light_and_dark(browser: Any, pages: dict[str, Path]) -> None:
    browser.open(pages["one"], scheme="dark")
    assert background(browser) < 150
    seen = []
    for _ in range(3):
        browser.run("document.getElementById('theme').click()")
        seen.append((browser.run("document.getElementById('theme').textContent"), background(browser) < 150))
    assert seen == [("Theme: light", False), ("Theme: dark", True), ("Theme: system", True)]
    ink = "getComputedStyle(document.querySelector('#figure-success .readout i')).borderTopColor"
    assert browser.run(ink) == "rgb(110, 168, 255)"
    browser.open(pages["one"], scheme="light")
    assert background(browser) > 700
    assert browser.run(ink) == "rgb(47, 111, 219)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_readable(browser: Any, pages: dict[str, Path], scheme: str) -> None:
    for name, selectors in (
        ("study", "h1, th, .results td, .results small, .events td, .switch button, .shown label"),
        (
            "one",
            ".card span, .card b, .settings dt, .where, .reward, .turn-head .muted, .call b, .observation pre",
        ),
        ("two", "figcaption p, .at, .readout b, .readout button:not(.off), summary, .muted, a"),
    ):
        browser.open(pages[name], scheme=scheme)
        for selector in selectors.split(", "):
            assert 4.5 <= browser.contrast(selector) < 22, (name, selector)


def readout(browser: Any, figure: str) -> list[str]:
    return browser.texts(f"#figure-{figure} .readout b")


def test_hover_reads_all_plots(browser: Any, pages: dict[str, Path]) -> None:
    browser.open(pages["one"])
    run = json.loads(browser.run("document.getElementById('data').textContent"))["runs"][0]
    assert float(readout(browser, "gradient-norm")[0]) == pytest.approx(
        run["values"]["loss/grad_norm"][-1], rel=1e-2
    )
    browser.run("document.querySelector('#figure-success').scrollIntoView()")
    browser.move_to("#figure-success .u-over", x=25 / 40)
    browser.wait_for("document.querySelector('#figure-gradient-norm .at').textContent === 'step 25'")
    index = run["steps"].index(25)
    assert float(readout(browser, "gradient-norm")[0]) == pytest.approx(
        run["values"]["loss/grad_norm"][index], rel=1e-2
    )
    # the evaluation before step 25 is that of step 20, and greyed
    last_known = run["values"]["eval/success"][run["steps"].index(20)]
    assert float(readout(browser, "success")[0]) == pytest.approx(last_known, rel=1e-2)
    greyed = "[...document.querySelectorAll('#figure-success .earlier')].length"
    assert browser.run(greyed) == 1


def test_curves_and_runs_can_be_hidden(browser: Any, pages: dict[str, Path]) -> None:
    browser.open(pages["two"])
    pressed = "[...document.querySelectorAll('#figure-success .readout button')].map((b) => b.ariaPressed === 'true')"
    # of several runs one metric at a time, until another is asked for
    assert browser.run(pressed) == [True, False] and len(readout(browser, "success")) == 2
    browser.run("document.querySelectorAll('#figure-success .readout button')[1].click()")
    assert browser.run(pressed) == [True, True] and len(readout(browser, "success")) == 4
    browser.run("document.querySelectorAll('.run-toggle')[1].click()")
    assert len(readout(browser, "success")) == 2
    assert browser.run("document.querySelector('.results [data-key=r1]').checked") is False
    assert browser.complaints() == []


# Painted pixels of a figure: bands fill what lines leave empty.
PAINTED = """(() => {
  const canvas = document.querySelector('#figure-reward canvas');
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  return pixels.filter((value, i) => i % 4 === 3 && value > 0).length;
})()"""


def test_bands_and_single_runs(browser: Any, pages: dict[str, Path]) -> None:
    browser.open(pages["study"])
    shown = (
        "[...document.querySelectorAll('[data-table]')].map((table) => [table.dataset.table, !table.hidden])"
    )
    assert browser.run(shown) == [["bands", True], ["runs", False]]
    assert browser.run("document.querySelectorAll('[data-table=bands] tbody tr').length") == 2
    assert browser.run("document.querySelectorAll('[data-table=runs] tbody tr').length") == 6
    assert len(readout(browser, "reward")) == 2
    # the value is the median of the three runs, and its title their range
    last = [sorted(run["values"]["rollout/reward_mean"][-1] for run in runs) for runs in groups_of(browser)]
    assert [float(text) for text in readout(browser, "reward")] == pytest.approx(
        [v[1] for v in last], rel=1e-2
    )
    titles = browser.run("[...document.querySelectorAll('#figure-reward .readout b')].map((b) => b.title)")
    assert [[float(x) for x in title.split(" to ")] for title in titles] == [
        pytest.approx([v[0], v[2]], rel=1e-2) for v in last
    ]
    banded = browser.run(PAINTED)
    browser.run("document.querySelector('[data-mode=runs]').click()")
    assert browser.run(shown) == [["bands", False], ["runs", True]]
    assert len(readout(browser, "reward")) == 6
    assert browser.run(PAINTED) < banded
    browser.run("document.querySelectorAll('.run-toggle')[0].click()")
    assert len(readout(browser, "reward")) == 5
    assert browser.complaints() == []


def groups_of(browser: Any) -> list[list[dict[str, Any]]]:
    data = json.loads(browser.run("document.getElementById('data').textContent"))
    return [[data["runs"][i] for i in group["members"]] for group in data["groups"]]


def test_the_table_sorts(browser: Any, pages: dict[str, Path]) -> None:
    browser.open(pages["two"])
    names = "[...document.querySelectorAll('[data-table=runs] .name')].map((cell) => cell.dataset.value)"
    heads = "[...document.querySelectorAll('[data-table=runs] thead button')]"

    def sort(column: str) -> tuple[list[str], str]:
        browser.run(f"{heads}.find((button) => button.textContent === '{column}').click()")
        return browser.run(names), browser.run("document.querySelector('th[aria-sort]').ariaSort")

    assert sort("Final success") == (["so_ppo", "ppo"], "descending")
    assert sort("Final success") == (["ppo", "so_ppo"], "ascending")
    assert sort("Max gradient norm") == (["ppo", "so_ppo"], "descending")
    # so_ppo did not collapse: what has no value is last in either order
    assert sort("Collapsed at")[0] == sort("Collapsed at")[0] == ["ppo", "so_ppo"]
    assert sort("Run") == (["ppo", "so_ppo"], "ascending")


def test_alarms_are_marked_and_listed(browser: Any, pages: dict[str, Path]) -> None:
    browser.open(pages["two"])
    expected = ["ppo", "25", "collapse alarm", "gradient norm 9 times its median", "dialogues of step 20"]
    assert browser.texts(".events tbody td") == expected
    link = browser.run("document.querySelector('.events a').href")
    assert link == (pages["two"].parent / "ppo" / "viewer.html").as_uri() + "#step=20"
    browser.run("document.querySelector('#figure-success').scrollIntoView()")
    browser.move_to("#figure-success .u-over", x=25 / 40)
    browser.wait_for("document.querySelector('#figure-success .at').textContent === 'step 25 · alarm'")
    # the line is there and goes with its run: at its place nothing else is drawn below the curves
    column = """(() => {
      const canvas = document.querySelector('#figure-success canvas');
      const over = document.querySelector('#figure-success .u-over');
      const x = Math.round(parseFloat(over.style.left) + over.clientWidth * 25 / 40);
      const strip = canvas.getContext('2d').getImageData(x - 1, 0, 3, canvas.height).data;
      const [r, g, b] = [217, 115, 13];
      let found = 0;
      for (let i = 0; i < strip.length; i += 4) {
        const off = Math.abs(strip[i] - r) + Math.abs(strip[i + 1] - g) + Math.abs(strip[i + 2] - b);
        if (off < 30 && strip[i + 3] > 100) found += 1;
      }
      return found;
    })()"""
    assert browser.run(column) > 40
    browser.run("document.querySelectorAll('.run-toggle')[1].click()")
    assert browser.run(column) == 0


# --- lines ---------------------------------------------------------------------------------------
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


def test_a_figure_of_zeros_alone_says_so(browser: Any, make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3, batch=3)
    lines = [{"step": step, "loss/grad_norm": 0.0, "rollout/reward_mean": 0.5} for step in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "timings.jsonl").unlink()
    browser.open(write_report([run], run / "report.html"))
    text = "document.querySelector('#figure-{} figcaption').innerText"
    assert "All 0 so far" in browser.run(text.format("gradient-norm"))
    assert "All 0" not in browser.run(text.format("reward"))


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
