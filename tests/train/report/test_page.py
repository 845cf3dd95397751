"""The report in a real browser: headless Chromium, driven over its debugging pipe."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sorl_train.report import write_report

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium here: apt-get install chromium"),
    pytest.mark.slow,
]

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --remote-debugging-pipe"
).split()
COMPLAINTS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")


class Browser:
    """One tab. Commands and events are JSON, ended by a zero byte, on the browser's descriptors 3 and 4."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None
        commands, self._commands = os.pipe()
        self._events, events = os.pipe()
        launch = ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{events}', "bash", PROGRAM, *FLAGS]
        self.process = subprocess.Popen(
            [*launch, f"--user-data-dir={profile}"],
            pass_fds=(commands, events),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(events)
        self._ids = itertools.count(1)
        self._buffer = b""
        self._session: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = {
            "sessionId": self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        }
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        command = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while (message := self._receive()).get("id") != number:
            self.events.append(message)
        assert "error" not in message, message["error"]
        return message["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._events], [], [], 60)
            chunk = os.read(self._events, 1 << 16) if ready else b""
            assert chunk, "the browser is silent or gone"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path, *, scheme: str = "light", width: int = 1280) -> None:
        self.events.clear()
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.send("Page.navigate", url=page.as_uri())
        self.wait_for(f"location.href === {json.dumps(page.as_uri())} && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        deadline = time.monotonic() + 20
        while not self.run(condition):
            assert time.monotonic() < deadline, f"never true: {condition}"
            time.sleep(0.02)

    def seen(self, *methods: str) -> list[dict[str, Any]]:
        """Parameters of the events so far."""
        self.run("0")  # events before this answer have arrived
        return [event["params"] for event in self.events if event["method"] in methods]

    def screenshot(self) -> bytes:
        return base64.b64decode(self.send("Page.captureScreenshot")["data"])


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.process.terminate()
    started.process.wait(timeout=30)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, make_run: Callable[..., Path]) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    one, other = make_run(folder / "so_ppo", hostile=True), make_run(folder / "ppo", algo="ppo", seed=1)
    pages = {
        "one": write_report([one], folder / "one.html"),
        "two": write_report([one, other], folder / "two.html"),
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


@pytest.mark.parametrize("name", ["one", "two", "broken"])
@pytest.mark.parametrize("scheme, width", [("light", 1280), ("dark", 390)])
def test_the_page_draws_itself_alone(
    browser: Browser, pages: dict[str, Path], name: str, scheme: str, width: int
) -> None:
    browser.open(pages[name], scheme=scheme, width=width)
    painted = dict(browser.run(COUNT_PAINTED))
    expected = json.loads(browser.run("document.getElementById('data').textContent"))["figures"]
    assert list(painted) == [f"figure-{figure['id']}" for figure in expected]
    assert len(painted) == (9 if name == "broken" else 11)
    assert all(colours > 10 for colours in painted.values()), painted  # axes, grid and antialiased curves
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.seen(*COMPLAINTS) == []
    requests = browser.seen("Network.requestWillBeSent")
    assert [event["request"]["url"] for event in requests] == [pages[name].as_uri()]


def test_a_hostile_passage_stays_text(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"])
    shown = browser.run("[...document.querySelectorAll('.observation pre')].map((pre) => pre.textContent)")
    assert any("<script>document.title='owned'</script><img src=x onerror=" in text for text in shown)
    assert "owned" not in browser.run("document.title")
    assert browser.run("[document.images.length, document.scripts.length]") == [0, 3]


def test_a_script_that_slipped_in_would_not_run(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"])
    browser.run(
        "document.body.insertAdjacentHTML('beforeend', '<img src=\"https://example.com/x.png\" onerror=\"title=1\">');"
        "const script = document.createElement('script'); script.textContent = \"document.title = 'owned'\";"
        "document.body.append(script)"
    )
    assert "owned" not in browser.run("document.title")
    browser.wait_for("document.images[0].complete")
    assert [event["blockedReason"] for event in browser.seen("Network.loadingFailed")] == ["csp"]


def background(browser: Browser) -> int:
    """Sum of red, green and blue of the page's background."""
    value = browser.run("getComputedStyle(document.body).backgroundColor")
    return sum(int(part) for part in value.removeprefix("rgb(").removesuffix(")").split(","))


def test_light_and_dark(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"], scheme="dark")
    assert background(browser) < 150
    dark = browser.screenshot()
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
    assert browser.screenshot() != dark


def readout(browser: Browser, figure: str) -> list[str]:
    return browser.run(
        f"[...document.querySelectorAll('#figure-{figure} .readout b')].map((b) => b.textContent)"
    )


def test_hover_reads_all_plots(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"])
    run = json.loads(browser.run("document.getElementById('data').textContent"))["runs"][0]
    assert float(readout(browser, "grad-norm")[0]) == pytest.approx(
        run["values"]["loss/grad_norm"][-1], rel=1e-2
    )
    browser.run("document.querySelector('#figure-success').scrollIntoView()")
    left, top, width = browser.run(
        "(() => { const r = document.querySelector('#figure-success .u-over').getBoundingClientRect();"
        " return [r.left, r.top, r.width]; })()"
    )
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=left + width * 25 / 40, y=top + 50)
    browser.wait_for("document.querySelector('#figure-grad-norm .at').textContent === 'step 25'")
    index = run["steps"].index(25)
    assert float(readout(browser, "grad-norm")[0]) == pytest.approx(
        run["values"]["loss/grad_norm"][index], rel=1e-2
    )
    # the evaluation before step 25 is that of step 20, and greyed
    last_known = run["values"]["eval/success"][run["steps"].index(20)]
    assert float(readout(browser, "success")[0]) == pytest.approx(last_known, rel=1e-2)
    greyed = "[...document.querySelectorAll('#figure-success .earlier')].length"
    assert browser.run(greyed) == 1


def test_curves_and_runs_can_be_hidden(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["two"])
    off = "[...document.querySelectorAll('#figure-success .off')].length"
    browser.run("document.querySelector('#figure-success .readout button').click()")
    assert browser.run(off) == 1
    browser.run("document.querySelectorAll('.run-toggle')[1].click()")
    assert browser.run(off) == 3
    assert browser.seen(*COMPLAINTS) == []


def test_other_metrics_are_drawn_when_asked_for(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["one"])
    browser.run("document.getElementById('more').open = true")
    browser.wait_for("document.querySelectorAll('#more-figures figure canvas').length > 5")
    assert all(colours > 10 for _, colours in browser.run(COUNT_PAINTED))
    assert browser.seen(*COMPLAINTS) == []
