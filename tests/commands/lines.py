"""Run a command line, in this process or as one of its own, and see what it said and what it left behind."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import uvicorn

from .world import DEEP, DIGITS

COMMANDS = {  # as in pyproject.toml
    "sorl-ask": "sorl_train.evaluate.ask",
    "sorl-check-task": "sorl_env.commands.check_task",
    "sorl-data": "sorl_train.prepare.cli",
    "sorl-doctor": "sorl_train.preflight.doctor",
    "sorl-eval": "sorl_train.evaluate.cli",
    "sorl-index": "sorl_tools.index.cli",
    "sorl-lab": "sorl_train.lab.cli",
    "sorl-play": "sorl_env.commands.play",
    "sorl-push": "sorl_train.evaluate.push",
    "sorl-report": "sorl_train.report.report",
    "sorl-serve": "sorl_tools.serve.cli",
    "sorl-serve-agent": "sorl_train.serve_agent.cli",
    "sorl-serve-env": "sorl_tools.serve_env.cli",
    "sorl-train": "sorl_train.cli",
    "sorl-view": "sorl_train.report.viewer",
}
LONGEST_S = 30  # no refusal takes longer, whatever it waits for
_SERVED_S = 8.0  # a server that has not ended by then would not
_REAL_RUN = uvicorn.Server.run
_VARIABLE = re.compile(r"([A-Z_]+)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """A line of a table: ``[*] [NAME=VALUE ..] command argument .. => text | text``, the texts in what it says.

    A star marks a row of the plain suite; the others are for the slow one.
    """

    line: str
    says: tuple[str, ...]
    plain: bool = False

    def words(self, places: Mapping[str, str]) -> tuple[dict[str, str], str, list[str]]:
        """The environment variables, the command, its arguments."""
        words = [_fill(word, places) for word in shlex.split(self.line)]
        environment = {}
        while found := _VARIABLE.fullmatch(words[0]):
            environment[found[1]] = found[2]
            del words[0]
        return environment, words[0], words[1:]


def _fill(word: str, places: Mapping[str, str]) -> str:
    for name, value in places.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def read_table(path: Path) -> list[Row]:
    """The rows of a table; ``#`` begins a comment line."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            command, _, says = line.removeprefix("* ").partition(" => ")
            texts = tuple(text.strip() for text in says.split(" | ") if text.strip())
            rows.append(Row(command.strip(), texts, plain=line.startswith("* ")))
    return rows


@dataclass(frozen=True)
class Outcome:
    """The exit status and what was said; ``trace`` is that of an exception that got out of ``main``."""

    status: int
    out: str
    err: str
    trace: str = ""


@contextlib.contextmanager
def sockets() -> Iterator[dict[str, str]]:
    """Texts for tables: a port in use, an address where nothing listens, one where a server never answers."""
    with socket.socket() as busy, socket.socket() as free:
        busy.bind(("127.0.0.1", 0))
        busy.listen(64)
        free.bind(("127.0.0.1", 0))
        yield {
            "port": str(busy.getsockname()[1]),
            "silent": f"http://127.0.0.1:{busy.getsockname()[1]}",
            "dead": f"http://127.0.0.1:{free.getsockname()[1]}",  # bound and not listening: refused
            "deep": DEEP[:5_000],
            "digits": DIGITS,
            "long": "x" * 5_000,
            "bytes": "caf\udce9",  # as Python reads the bytes of an argument that is not UTF-8
        }


def listing(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every entry below a folder: its kind and mode, its size, when it was last written."""
    found = {}
    for path in folder.rglob("*"):
        about = path.lstat()
        is_folder = stat.S_ISDIR(about.st_mode)
        size, written = (0, 0) if is_folder else (about.st_size, about.st_mtime_ns)
        found[str(path.relative_to(folder))] = (about.st_mode, size, written)
    return found


def environment(root: Path) -> dict[str, str]:
    """Variables that keep a command inside ``root``, and off the network."""
    return {
        "HOME": str(root / "home"),
        "TMPDIR": str(root / "tmp"),
        "SORL_CACHE": str(root / "cache"),
        "XDG_CACHE_HOME": str(root / "home/.cache"),
        "HF_HOME": str(root / "home/hf"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "COLUMNS": "100",
    }


def as_process(row: Row, root: Path, places: Mapping[str, str], stdin: bytes = b"") -> Outcome:
    """Run a row as a process."""
    variables, command, arguments = row.words(places)
    done = subprocess.run(
        [sys.executable, "-m", COMMANDS[command], *(os.fsencode(argument) for argument in arguments)],
        input=stdin,
        capture_output=True,
        cwd=root / "work",
        env={**os.environ, **environment(root), **variables},
        timeout=4 * LONGEST_S,
    )
    return Outcome(done.returncode, *(text.decode("utf-8", "replace") for text in (done.stdout, done.stderr)))


def in_process(row: Row, root: Path, places: Mapping[str, str]) -> Outcome:
    """Run a row through the command's ``main``; all it changes of this process is put back."""
    variables, command, arguments = row.words(places)
    main = importlib.import_module(COMMANDS[command]).main
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    changed = _put_back(root / "work", {**environment(root), **variables})
    with changed, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status, trace = _status(main, arguments)
    said = [stream.buffer.getvalue().decode("utf-8", "replace") for stream in (out, err)]  # type: ignore[attr-defined]
    return Outcome(status, *said, trace)


def _status(main: Callable[[list[str]], int], arguments: list[str]) -> tuple[int, str]:
    try:
        return main(arguments), ""
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0, ""
        print(ended.code, file=sys.stderr)
        return 1, ""
    except BaseException:  # noqa: BLE001 - also those that end a command which goes on
        return 1, traceback.format_exc()


class TookTooLong(BaseException):
    """Raised into a command that does not end."""


class BeganToServe(BaseException):
    """Raised into a server that was to refuse its command line."""


def _serve_briefly(server: uvicorn.Server, sockets: Any = None) -> None:
    """What a server does, until its source is opened or cannot be; ends one that would go on."""
    served = []

    def end() -> None:
        served.append(True)
        server.should_exit = True

    timer = threading.Timer(_SERVED_S, end)
    timer.start()
    _REAL_RUN(server, sockets)
    timer.cancel()
    if served:
        raise BeganToServe


@contextlib.contextmanager
def _put_back(folder: Path, variables: Mapping[str, str]) -> Iterator[None]:
    def too_long(number: int, frame: Any) -> None:
        raise TookTooLong

    root, kept_modules = logging.getLogger(), set(sys.modules)
    level, handlers = root.level, root.handlers[:]
    kept_signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    kept_signals[signal.SIGALRM] = signal.signal(signal.SIGALRM, too_long)
    with mock.patch.dict(os.environ, variables), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(tempfile, "tempdir", None)  # read TMPDIR again
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
        patch.setattr(uvicorn.Server, "run", _serve_briefly)
        signal.setitimer(signal.ITIMER_REAL, LONGEST_S, 1.0)  # again, for those who go on after it
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in kept_signals.items():
                signal.signal(number, handler)
            root.setLevel(level)
            root.handlers[:] = handlers
            for name in set(sys.modules) - kept_modules:
                if name.startswith("sorl_task_"):
                    del sys.modules[name]
