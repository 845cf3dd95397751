"""The viewer in a real browser: filters, search, keyboard, shaded tokens, hostile text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sorl_env.trajectory import Trajectory, write_jsonl
from sorl_train.report.viewer import write_viewer
from sorl_train.run.metrics_log import write_token_records

from .test_viewer import record_of

pytestmark = pytest.mark.slow

COUNT = "document.getElementById('count').textContent"
OPEN = "document.getElementById('dialogue').dataset.key"
TEXT = "document.getElementById('dialogue').textContent"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, make_run: Callable[..., Path]) -> Path:
    """120 dialogues of three steps, hostile; the first step has no figures of tokens."""
    return write_viewer(make_run(tmp_path_factory.mktemp("viewer") / "run", steps=20, batch=40, hostile=True))


@pytest.fixture
def viewer(browser: Any, page: Path) -> Any:
    browser.open(page)
    browser.wait_for(f"{COUNT} === '120 of 120 dialogues'")
    browser.wait_for(f"{OPEN} !== undefined")
    return browser


def choose(browser: Any, name: str, value: str, count: int) -> None:
    """Set a filter and wait for the list."""
    browser.run(
        f"(() => {{ const field = document.getElementById('filter-{name}'); field.value = {value!r};"
        " field.dispatchEvent(new Event('input')); })()"
    )
    browser.wait_for(f"{COUNT} === '{count} of 120 dialogues'")


def opened(browser: Any, key: str) -> None:
    browser.wait_for(f"{OPEN} === {key!r}")


def test_it_opens_alone(viewer: Any, page: Path) -> None:
    opened(viewer, "step-1/s1-p0/0")
    assert viewer.run("document.querySelectorAll('.row').length") < 40, "only as many rows as are seen"
    assert viewer.run("document.querySelector('.row[aria-selected=true]').ariaPosInSet") == "1"
    assert "The run saved no figures per token for this step." in viewer.run(TEXT)
    viewer.opens_hostile_text(scripts=7)
    assert viewer.complaints() == [] and viewer.requests() == [page.as_uri()]


def test_filters(viewer: Any) -> None:
    choose(viewer, "step", "10", 40)
    opened(viewer, "step-10/s10-p0/0")
    choose(viewer, "stop", "error", 1)
    opened(viewer, "step-10/s10-p2/0")
    assert "excluded from the loss" in viewer.run(TEXT)
    choose(viewer, "stop", "", 40)
    choose(viewer, "error", "unclosed", 1)
    choose(viewer, "error", "none", 39)
    right = sum(i % 3 != 0 for i in range(40)) - 1  # the third one is an outage
    choose(viewer, "min", "0.5", right)
    choose(viewer, "max", "0.9", 0)
    assert "No dialogue matches these filters." in viewer.run(TEXT)
    viewer.run("document.getElementById('clear').click()")
    viewer.wait_for(f"{COUNT} === '120 of 120 dialogues'")
    choose(viewer, "sort", "-clipped", 120)
    share = "document.querySelector('.row .row-facts').textContent"
    assert "% clipped" in viewer.run(share)
    assert viewer.complaints() == []


def test_search_reads_all_text(viewer: Any) -> None:
    choose(viewer, "text", "Timed Out After", 3)  # in the errors of calls, and in another case
    choose(viewer, "text", "s20-p7/0", 1)
    opened(viewer, "step-20/s20-p7/0")
    choose(viewer, "text", "onerror=", 120)
    choose(viewer, "text", "no such words", 0)


def test_keyboard(viewer: Any) -> None:
    opened(viewer, "step-1/s1-p0/0")
    for key, expected in (
        ("j", "step-1/s1-p1/0"), ("ArrowDown", "step-1/s1-p2/0"), ("k", "step-1/s1-p1/0"),
        ("ArrowUp", "step-1/s1-p0/0"), ("ArrowUp", "step-1/s1-p0/0"), ("G", "step-20/s20-p39/0"),
        ("j", "step-20/s20-p39/0"), ("g", "step-1/s1-p0/0"),
    ):  # fmt: skip
        viewer.key(key)
        opened(viewer, expected)
    viewer.key("/")
    assert viewer.run("document.activeElement.id") == "filter-text"
    for letter in "town?":  # the question mark is text here
        viewer.key(letter)
    assert viewer.run("document.getElementById('filter-text').value") == "town?"
    viewer.key("Escape")
    assert viewer.run("document.activeElement === document.body")
    viewer.key("?")
    assert viewer.run("document.getElementById('help').open")
    viewer.key("j")
    opened(viewer, "step-1/s1-p0/0")
    viewer.run("document.getElementById('help').close()")
    for _ in range(25):
        viewer.key("j")
    opened(viewer, "step-1/s1-p25/0")
    inside = """(() => {
      const row = document.querySelector('.row[aria-selected=true]').getBoundingClientRect();
      const list = document.getElementById('list').getBoundingClientRect();
      return row.top >= list.top - 1 && row.bottom <= list.bottom + 1;
    })()"""
    assert viewer.run(inside), "the selected row is in view"
    assert viewer.complaints() == []


def test_the_address_brings_back_what_is_shown(browser: Any, page: Path) -> None:
    browser.open(page, hash="#step=20&stop=answer&open=step-20/s20-p7/0")
    browser.wait_for(f"{COUNT} === '38 of 120 dialogues'")
    opened(browser, "step-20/s20-p7/0")
    browser.key("j")
    browser.wait_for("decodeURIComponent(location.hash).includes('open=step-20/s20-p8/0')")
    assert browser.run("document.getElementById('filter-step').value") == "20"


# --- tokens ---------------------------------------------------------------------------------------
def test_tokens_are_shaded_and_clipped_ones_marked(browser: Any, page: Path) -> None:
    browser.open(page, hash="#open=step-20/s20-p1/0")
    opened(browser, "step-20/s20-p1/0")
    assert browser.texts(".turn pre")[0].startswith("<think>I need the employer.</think>\n<search>")
    classes = browser.run(
        "[...document.querySelectorAll('.turn .token')].map((t) => [Number(t.closest('.turn').dataset.turn),"
        " Number(t.dataset.token), t.classList.contains('clip-low'), t.classList.contains('clip-high')])"
    )
    marked = {(turn, token) for turn, token, low, high in classes if low or high}
    # every ninth of 14, 14 and 11 tokens, from the fifth on
    assert marked == {(0, 4), (0, 13), (1, 8), (2, 3)}
    assert not any(low and high for _, _, low, high in classes)
    # green below, red above
    style = "getComputedStyle(document.querySelector('.shading-legend .clip-{}')).boxShadow"
    assert browser.run(style.format("low")).startswith("rgb(47, 158, 68)")
    assert browser.run(style.format("high")).startswith("rgb(224, 49, 49)")
    assert browser.run("document.querySelector('.shading-legend .high').textContent") == "1 + 0.2"
    shaded = "[...document.querySelectorAll('.turn .token')].filter((t) => /(lo|hi|seq)[1-4]/.test(t.className)).length"
    by_ratio = browser.run(shaded)
    browser.key("s")
    browser.key("s")
    assert browser.run("document.getElementById('shading').value") == "advantage"
    browser.key("s")
    assert browser.run("document.querySelectorAll('.turn .seq4').length") >= 1 and by_ratio > 5
    browser.key("s")
    assert browser.run(shaded) == 0
    assert browser.run("document.querySelectorAll('.turn .clip-low, .turn .clip-high').length") >= 4


def test_figures_of_a_token_on_hover(
    browser: Any, make_trajectory: Callable[..., Trajectory], tmp_path: Path
) -> None:
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "config.yaml").write_text(
        "algo: ppo\ntask: minihop\nloss: {clip_eps: 0.2, clip_eps_high: 0.28}\n"
    )
    t = make_trajectory("s1-p0/0", np.random.default_rng(0))
    begin = {"tokens": ["</script>", "<b>"], "log_ratio": [-0.5, 0.4], "ratio": [0.6065, 1.4918]}
    begin |= {"advantage": [-0.25, 1.5], "entropy": [0.125, 2.0], "clipped": [1, 1]}
    plain = record_of(t)
    record = record_of(t, **{name: [*two, *getattr(plain, name)[2:]] for name, two in begin.items()})
    write_jsonl(tmp_path / "trajectories" / "step_000001.jsonl", [t])
    write_token_records(tmp_path / "trajectories" / "step_000001.tokens.jsonl.gz", [record])
    browser.open(write_viewer(tmp_path))
    opened(browser, "step-1/s1-p0/0")
    box = "[...document.querySelectorAll('.token-box:not([hidden]) > code, .token-box dd')].map((e) => e.textContent)"
    browser.move_to(".turn .token[data-token='0']")
    browser.wait_for("!document.querySelector('.token-box').hidden")
    expected = ['"</script>"', "0.6065", "-0.5000", "-0.2500", "0.1250 nats", "below 1 − 0.2"]  # noqa: RUF001
    assert browser.run(box) == expected
    browser.move_to(".turn .token[data-token='1']")
    browser.wait_for(f"{box}[0] === '\"<b>\"'")
    assert browser.run(box)[1:] == ["1.4918", "0.4000", "1.5000", "2.0000 nats", "above 1 + 0.28"]
    assert browser.complaints() == []


# --- looks, size and speed ------------------------------------------------------------------------
@pytest.mark.parametrize("scheme, width", [("light", 1280), ("dark", 390)])
def test_it_is_readable(browser: Any, page: Path, scheme: str, width: int) -> None:
    browser.open(page, scheme=scheme, width=width, hash="#open=step-20/s20-p1/0")
    opened(browser, "step-20/s20-p1/0")
    assert browser.run("document.documentElement.scrollWidth") <= width
    for selector in (
        ".bar h1", ".bar .muted", ".row .question", ".row-facts", ".row .reward", ".turn-head .muted", ".call b",
        ".observation pre", ".facts dt", "#count",
    ):  # fmt: skip
        assert 4.5 <= browser.contrast(selector) < 22, selector
    for key in ("step-20/s20-p1/0", "step-20/s20-p0/0"):  # the second one ends in an invalid turn
        browser.open(page, scheme=scheme, width=width, hash=f"#open={key}")
        opened(browser, key)
        for _ in range(4):  # shades of each figure
            assert 4.5 <= browser.contrast(".turn .token") < 22
            browser.key("s")
