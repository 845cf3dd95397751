"""Who may write into a folder: one process and those that it hands the lock to, and nobody after their death."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from sorl_env.errors import UserError
from sorl_train.run.files import LOCK, FolderLock

from ...waiting import wait_until

HOLD = """
import subprocess, sys, os
from pathlib import Path
from sorl_train.run.files import HELD, FolderLock
with FolderLock(Path(sys.argv[1]), "--run_dir") as lock:
    if len(sys.argv) > 2:
        handed = os.environ | {HELD: str(lock.descriptor)}
        subprocess.Popen([sys.executable, "-c", sys.argv[2]], env=handed, pass_fds=[lock.descriptor])
    else:
        print(os.getpid(), flush=True)
    sys.stdin.read()
"""
HEIR = """
import os, subprocess, sys, time
from sorl_train.run.files import join_lock
join_lock()
child = subprocess.Popen(["sleep", "600"], close_fds=False)  # a careless child, which must not hold the lock
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""
RACE = """
import sys
from pathlib import Path
from sorl_env.errors import UserError
from sorl_train.run.files import FolderLock
sys.stdin.read(1)
try:
    with FolderLock(Path(sys.argv[1]), "--run_dir"):
        print("has it", flush=True)
        sys.stdin.read()
except UserError as error:
    print(error, flush=True)
"""


@contextmanager
def started(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def is_free(folder: Path) -> bool:
    try:
        with FolderLock(folder, "--run_dir"):
            return True
    except UserError:
        return False


def test_a_holder_is_named_and_its_death_frees_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    with started(HOLD, str(folder)) as process:
        number = line(process)
        with pytest.raises(UserError) as error, FolderLock(folder, "--run_dir"):
            pass
        assert str(error.value) == (
            f"{folder} is in use by process {number}: wait until it has ended, end it (kill -INT {number}), or give "
            "another --run_dir"
        )
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (folder / LOCK).is_file() and is_free(folder)
    assert not (folder / LOCK).exists()  # whoever has ended as it should leaves nothing


def test_an_heir_holds_the_lock_alone(tmp_path: Path) -> None:
    with started(HOLD, str(tmp_path), HEIR) as process:
        heir, child = map(int, line(process).split())
        try:
            process.send_signal(signal.SIGKILL)
            process.wait()
            with pytest.raises(UserError, match=f"in use by process {heir}: .*kill -INT {heir}"):
                FolderLock(tmp_path, "--run_dir").take()
        finally:
            os.kill(heir, signal.SIGKILL)
        try:
            wait_until(lambda: is_free(tmp_path))
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_holder_elsewhere_is_named_with_its_host(tmp_path: Path) -> None:
    with FolderLock(tmp_path, "--out"):
        for text, who in {
            "77 node-3\n": "another process on node-3",
            "": "another process:",
            "\0": "another process:",
            f"{2**22 + 1} {os.uname().nodename}\n": f"another process on {os.uname().nodename}",
        }.items():
            (tmp_path / LOCK).write_text(text)
            with pytest.raises(UserError, match=who):
                FolderLock(tmp_path, "--out").take()


def test_of_many_that_begin_at_once_one_has_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    with ExitStack() as stack:
        racers = [stack.enter_context(started(RACE, str(folder))) for _ in range(3)]
        for process in racers:
            assert process.stdin is not None
            process.stdin.write("x")
            process.stdin.flush()
        said = [line(process) for process in racers]
    assert said.count("has it") == 1 and sum("in use by" in text for text in said) == 2


def test_a_folder_that_is_moved_aside_takes_its_lock_along(tmp_path: Path) -> None:
    """A process that has opened the old one meanwhile must not believe that it has the new one."""
    folder, aside = tmp_path / "run", tmp_path / "run-2"
    with FolderLock(folder, "--run_dir") as lock:
        (folder / "file").touch()
        folder.rename(aside)
        lock.take()
        assert not is_free(folder) and is_free(aside)
    assert is_free(folder) and not folder.exists() and (aside / "file").exists()


def test_a_lock_that_was_removed_while_it_was_opened_is_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flock, calls = fcntl.flock, []

    def removed_first(file: object, how: int) -> None:
        calls.append(how)
        if len(calls) == 1:
            (tmp_path / LOCK).unlink()
        flock(file, how)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", removed_first)
        lock = FolderLock(tmp_path, "--run_dir")
        lock.take()
    assert len(calls) == 2 and not is_free(tmp_path)


def test_a_file_system_without_locks_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with FolderLock(tmp_path, "--run_dir"):
        pass
    assert capsys.readouterr().err.count("its file system has no locks") == 1
