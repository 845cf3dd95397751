"""Commands that serve, each in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from typing import Self


class Process:
    """A command that prints its address, in which ``address`` finds the port. As a context it ends with it; ``stop``
    asks it to end and returns its exit status."""

    def __init__(self, module: str, *arguments: str, address: str, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # a shell's background jobs, and what they start, ignore Ctrl-C
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = int(self.wait_for(address)[1])

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def wait_for(self, pattern: str, timeout_s: float = 60.0) -> re.Match[str]:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            has_ended = self.process.poll() is not None
            if has_ended:
                self._reader.join(1.0)
            found = re.search(pattern, "".join(self.lines))
            if found:
                return found
            if has_ended:
                break
            time.sleep(0.02)
        self.process.kill()
        raise AssertionError(f"{pattern!r} was not printed: {''.join(self.lines)}")

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        self.process.send_signal(number)
        status = self.process.wait(timeout_s)
        self._close()
        return status

    def _close(self) -> None:
        self._reader.join(5.0)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._close()
