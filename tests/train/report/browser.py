"""Headless Chromium, driven over its debugging pipe."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from typing import Any

from ...waiting import wait_until

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --remote-debugging-pipe"
).split()
COMPLAINTS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")


class Browser:
    """One tab. Commands and events are JSON, ended by a zero byte, on the browser's descriptors 3 and 4."""

    def __init__(self, profile: Path, *flags: str) -> None:
        assert PROGRAM is not None
        commands, self._commands = os.pipe()
        self._events, events = os.pipe()
        launch = ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{events}', "bash", PROGRAM, *FLAGS, *flags]
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

    def open(self, page: Path | str, *, scheme: str = "light", width: int = 1280, hash: str = "") -> None:
        """Load a file or an address anew; the events so far are forgotten."""
        self.send("Page.navigate", url="about:blank")
        self.wait_for("location.href === 'about:blank'")
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.seen()
        self.events.clear()
        address = page.as_uri() if isinstance(page, Path) else page
        self.send("Page.navigate", url=address + hash)
        self.wait_for(
            f"location.href.startsWith({json.dumps(address)}) && document.readyState === 'complete'"
        )

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """The texts of the elements that match."""
        found: list[str] = self.run(f"[...document.querySelectorAll({selector!r})].map((e) => e.textContent)")
        return found

    def opens_hostile_text(self, scripts: int) -> None:
        """Assert that a passage of ``conftest.HOSTILE`` is text, and that the page has only its own scripts."""
        hostile = "<script>document.title='owned'</script>\u2028<img src=x onerror="
        assert any(hostile in text for text in self.texts(".observation pre"))
        assert "owned" not in self.run("document.title")
        assert self.run("[document.images.length, document.scripts.length]") == [0, scripts]

    def wait_for(self, condition: str) -> None:
        wait_until(lambda: self.run(condition), lambda: condition)

    def seen(self, *methods: str) -> list[dict[str, Any]]:
        """Parameters of the events so far."""
        self.run("0")  # events before this answer have arrived
        return [event["params"] for event in self.events if event["method"] in methods]

    def complaints(self) -> list[dict[str, Any]]:
        """What the page wrote to the console, and its uncaught errors."""
        return self.seen(*COMPLAINTS)

    def requests(self) -> list[str]:
        """Addresses that the page asked for, its own first."""
        return [event["request"]["url"] for event in self.seen("Network.requestWillBeSent")]

    def key(self, key: str) -> None:
        """A key pressed and let go: a character, or a name as ``ArrowDown``."""
        text = {"text": key} if len(key) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def move_to(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """Put the pointer on an element, at the shares ``x`` and ``y`` of its width and height."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        left, top, width, height = self.run(
            f"(() => {{ const r = {box}; return [r.left, r.top, r.width, r.height]; }})()"
        )
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=left + x * width, y=top + y * height)

    def contrast(self, selector: str) -> float:
        """WCAG's contrast ratio of text to what is behind it, the lowest over the elements that match."""
        script = """((selector) => {
          const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
          const rgb = (paint) => {
            canvas.clearRect(0, 0, 1, 1);
            paint.forEach((colour) => { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); });
            return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
          };
          const luminance = (values) => values.map((v) => v / 255)
            .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
            .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
          return Math.min(...[...document.querySelectorAll(selector)].map((element) => {
            const behind = [];
            for (let e = element; e; e = e.parentElement) behind.unshift(getComputedStyle(e).backgroundColor);
            const ink = luminance(rgb([...behind, getComputedStyle(element).color]));
            const ground = luminance(rgb(behind));
            return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
          }));
        })"""
        return float(self.run(f"{script}({selector!r})"))
