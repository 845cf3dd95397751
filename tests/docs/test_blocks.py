"""Every shell and Python block of the pages is executed, here or by a test that the page names, or says why not.

The blocks of a page run one after the other in a folder of their own, which has what a clone has at its top.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ..waiting import wait_until
from . import given
from .blocks import REPOSITORY, Block, pages, read_blocks

STAMPS = [
    f"-o {Path(sys.prefix)}/.{name}" for name in ("train", "dev", "interop", "smollm2", "gguf", "bench")
]
BIN = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "SHORT": given.SHORT}
# What make would run is run in the reader's folder, with the environment of this test in place of one that make builds.
# Other targets are the tests themselves, or install: make only has to know them.
RUN_HERE = "quickstart|collapse|model"
PRELUDE = f"""make() {{
    local recipe
    recipe=$(command make --no-print-directory -n -C {REPOSITORY} VENV={BIN.parent} {" ".join(STAMPS)} "$@")
    case $1 in {RUN_HERE}) bash -euo pipefail -c "$recipe" ;; esac
}}
open() {{ test -f "$1"; }}
"""
LINKS = ("configs", "tasks", "docs", "benchmarks", "pyproject.toml")
BLOCKS = [block for page in pages() for block in read_blocks(page) if block.language != "text"]
EXECUTED = [block for block in BLOCKS if not {"not run", "tested"} & block.marks.keys()]


@dataclass
class Folder:
    """Where the blocks of one page run, and what they have left there."""

    path: Path
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "a_page"})
    ports: dict[str, str] = field(default_factory=dict)  # as printed: as served
    servers: list[subprocess.Popen[str]] = field(default_factory=list)

    def run(self, block: Block) -> None:
        for name in filter(None, block.marks.get("given", "").split(", ")):
            getattr(given, name)(self.path, self.names)
        if block.language == "python":
            self._python(block)
        else:
            self._shell(block)

    def _python(self, block: Block) -> None:
        if name := block.marks.get("file"):
            self._finish(block, [sys.executable, name])
        else:
            exec(compile(block.text, block.place, "exec"), self.names)

    def _shell(self, block: Block) -> None:
        text = block.text
        for printed, served in self.ports.items():
            text = text.replace(f":{printed}", f":{served}")
        if options := block.marks.get("adds"):
            command = options.split()[0]
            text = f'{command}() {{ command {command} "$@"{options[len(command) :]}; }}\n{text}'
        if port := block.marks.get("server"):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.ports[port] = str(free.getsockname()[1])
            self._start(block, f"{text.rstrip()} --port {self.ports[port]}", int(self.ports[port]))
        else:
            self._finish(block, ["bash", "-euo", "pipefail", "-c", PRELUDE + text])

    def _start(self, block: Block, text: str, port: int) -> None:
        log = self.path / f"server_{port}.log"
        with log.open("w") as out:
            server = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", PRELUDE + text],
                cwd=self.path,
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.servers.append(server)

        def listens() -> bool:
            assert server.poll() is None, f"{block.place}: the server ended\n{log.read_text()}"
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait_until(listens)

    def _finish(self, block: Block, command: list[str]) -> None:
        done = subprocess.run(
            command, cwd=self.path, env=ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert done.returncode == 0, (
            f"{block.place} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        )


@contextmanager
def folder_of_a_reader(path: Path) -> Iterator[Folder]:
    for name in LINKS:
        (path / name).symlink_to(REPOSITORY / name)
    (path / ".venv").symlink_to(BIN.parent)
    folder = Folder(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.syspath_prepend(path)
        patch.setenv("PATH", ENVIRONMENT["PATH"])
        try:
            yield folder
        finally:
            for server in folder.servers:
                with suppress(ProcessLookupError):  # it ended by itself
                    os.killpg(server.pid, signal.SIGKILL)
                server.wait()
            for name, module in list(sys.modules.items()):
                if str(getattr(module, "__file__", None)).startswith(f"{path}/"):
                    del sys.modules[name]


def run_page(page: Path, folder: Path, slow: bool) -> None:
    blocks = [b for b in EXECUTED if b.page == page and (slow or "slow" not in b.marks)]
    with folder_of_a_reader(folder) as reader:
        for block in blocks:
            if name := block.marks.get("file"):  # a page may show a file after the commands that read it
                (folder / name).write_text(block.text, encoding="utf-8")
        for block in blocks:
            reader.run(block)


def ids(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


@pytest.mark.parametrize("page", dict.fromkeys(b.page for b in EXECUTED if "slow" not in b.marks), ids=ids)
def test_blocks(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", dict.fromkeys(b.page for b in EXECUTED if "slow" in b.marks), ids=ids)
def test_slow_blocks(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path, slow=True)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b not in EXECUTED], ids=lambda b: b.place)
def test_what_is_not_executed_here_says_why(block: Block) -> None:
    if test := block.marks.get("tested"):
        assert block.page.name in (REPOSITORY / test).read_text(encoding="utf-8"), (
            f"{test} reads no {block.page.name}"
        )
    else:
        assert len(block.marks["not run"].split()) >= 2, f"{block.place}: no reason"


# --- the test itself can fail ---
A_PAGE = """\
Text.

<!-- given: questions, run -->
<!-- slow -->

    one  # a comment
    two

1. An item

   with a second paragraph:

       three

```text
not a command
```
```python
four
```
"""


def planted(folder: Path, text: str) -> list[Block]:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return read_blocks(page)


def test_a_page_is_read_with_its_marks(tmp_path: Path) -> None:
    blocks = planted(tmp_path, A_PAGE)
    assert [(b.line, b.language, b.text, dict(b.marks)) for b in blocks] == [
        (6, "shell", "one  # a comment\ntwo\n", {"given": "questions, run", "slow": ""}),
        (13, "shell", "three\n", {}),
        (16, "text", "not a command\n", {}),
        (19, "python", "four\n", {}),
    ]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("    true\n    false\n    true\n", "ended with 1"),
        ("    sorl-train --no_such_option 1\n", "no_such_option"),
        ("    make no-such-target\n", "no-such-target"),
        ("    open runs/missing/report.html\n", "ended with 1"),
        ("    false | true\n", "ended with 1"),
        ("```python\nassert False, 'planted'\n```\n", "planted"),
        ("<!-- file: own.py -->\n```python\n1\n```\n", "own.py"),
        ("<!-- server: 8301 -->\n\n    sorl-serve nothing\n", "the server ended"),
    ],
)
def test_a_block_that_fails_fails_the_page(block: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "reader").mkdir()
    with folder_of_a_reader(tmp_path / "reader") as reader, pytest.raises(AssertionError, match=message):
        for one in planted(tmp_path, block):
            reader.run(one)


def test_unknown_marks_and_languages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'basch'"):
        planted(tmp_path, "```basch\ntrue\n```\n")
    with pytest.raises(ValueError, match="not runn"):
        planted(tmp_path, "<!-- not runn: needs a GPU -->\n\n    true\n")
