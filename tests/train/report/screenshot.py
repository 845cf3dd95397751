"""A picture of a page: ``python -m tests.train.report.screenshot PAGE OUT.png [--scheme dark] [--height 1500]``."""

from __future__ import annotations

import argparse
import base64
import tempfile
from pathlib import Path

from .browser import Browser


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--scheme", choices=["light", "dark"], default="light")
    parser.add_argument("--width", type=int, default=1400)
    parser.add_argument("--height", type=int, default=1500)
    parser.add_argument("--script", help="JavaScript to run first, as a click on something")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(Path(profile))
        browser.open(arguments.page.resolve(), scheme=arguments.scheme, width=arguments.width)
        if arguments.script:
            browser.run(arguments.script)
        browser.run("new Promise((resolve) => setTimeout(resolve, 500))")
        clip = {"x": 0, "y": 0, "width": arguments.width, "height": arguments.height, "scale": 1}
        picture = browser.send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        arguments.out.write_bytes(base64.b64decode(picture["data"]))
        browser.process.terminate()
        browser.process.wait(timeout=30)


if __name__ == "__main__":
    main()
