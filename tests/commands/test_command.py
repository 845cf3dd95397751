"""How every command ends: mistakes, full and read-only disks, Ctrl-C, pipes, odd terminals, faults of our own."""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest

from sorl_env.commands.command import Parser, number, print_json, run_command, seed, whole
from sorl_env.commands.task_options import add_task_options, task_args
from sorl_env.errors import MOST, Bounds, UserError, did_you_mean, no_such_file
from sorl_env.folders import new_folder
from sorl_train.config.files import value_from_text

from ..waiting import wait_until


def ends(raised: BaseException) -> int:
    def main(argv: Sequence[str]) -> int:
        raise raised

    return run_command("sorl-x", main, [])


FULL = OSError(errno.ENOSPC, "No space left on device")
READ_ONLY = OSError(errno.EROFS, "Read-only file system", "/disk/run")
TAKEN = FileExistsError(errno.EEXIST, "File exists", "out")


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (UserError("correct it"), 2, "sorl-x: correct it\n"),
        (KeyboardInterrupt(), 130, "\nsorl-x: interrupted\n"),
        (
            FULL,
            2,
            "sorl-x: no space left on device: free some space there, or choose a folder on another disk\n",
        ),
        (
            READ_ONLY,
            2,
            "sorl-x: /disk/run: read-only file system: choose another path, or make this one writable\n",
        ),
        (TAKEN, 2, "sorl-x: out: file exists: correct the path, or choose another one\n"),
    ],
)
def test_how_a_command_ends(
    raised: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ends(raised) == status
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize("code", [0, None, 3, "some library's last words"])
def test_what_ends_python_inside_a_command_is_no_success(
    code: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ends(SystemExit(code)) == 1
    assert f"SystemExit: {SystemExit(code)}".rstrip(": ") in capsys.readouterr().err
    for option in ("--help", "--version"):  # the parser's own end is one
        with pytest.raises(SystemExit) as ended:
            run_command("sorl-x", lambda words: Parser(prog="sorl-x").parse_args(words) or 0, [option])
        assert ended.value.code == 0


@pytest.mark.parametrize(
    "fault",
    [
        KeyError("x"),
        ConnectionResetError(),
        BrokenPipeError(errno.EPIPE, "of a process that is dead"),  # not of standard output
        OSError("no number"),
        MemoryError(),
    ],
)
def test_a_fault_of_ours_keeps_its_traceback(fault: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(type(fault)):
        ends(fault)
    assert "please report it" in capsys.readouterr().err
    ends(UserError(f"--seed {'7' * 5000} is too large"))
    said = capsys.readouterr().err
    assert len(said) < 200 and "(5,000 characters) is too large" in said


def read(kind: object, text: str) -> object:
    parser = Parser(prog="sorl-x")
    parser.add_argument("--n", type=kind)  # type: ignore[arg-type]
    return parser.parse_args([f"--n={text}"]).n


@pytest.mark.parametrize("text", ["", "x", "0x10", "1_0", "9" * 5000])
@pytest.mark.parametrize(
    ("kind", "what", "others"),
    [
        (whole(), "a whole number", ("1.5", "1e3", "\u0661", "\u00b2")),
        (number(), "a finite number", ("nan", "-inf", "1e999", "\uff11.\uff15")),
    ],
)
def test_no_number(kind: object, what: str, others: tuple[str, ...], text: str) -> None:
    for wrong in (text, *others):
        with pytest.raises(UserError, match=rf"--n must be {what}, it is '"):
            read(kind, wrong)


@pytest.mark.parametrize(
    ("kind", "text", "rule"),
    [
        (whole(1), "0", "must be at least 1, it is 0"),
        (whole(0), "-1", "cannot be negative, it is -1"),
        (whole(0, 65535), "65536", "must lie between 0 and 65535, it is 65536"),
        (whole(), str(MOST + 1), f"must be at most {MOST}"),
        (seed, str(2**64), "must lie between 0 and 9223372036854775807"),
        (number(above=0), "0", "must be above 0, it is 0"),
        (number(above=0, high=1), "1.5", "must be above 0, up to 1, it is 1.5"),
        (number(0, 1), "-0.5", "must lie between 0 and 1, it is -0.5"),
    ],
)
def test_numbers_out_of_range_and_in_it(kind: object, text: str, rule: str) -> None:
    with pytest.raises(UserError) as raised:
        read(kind, text)
    assert f"--n {rule}" in str(raised.value)
    assert (read(whole(1), "+3"), read(seed, str(2**63 - 1)), read(number(0), "1e-4")) == (3, 2**63 - 1, 1e-4)
    assert Bounds(0, 1).problem(1) is None and Bounds(above=0).problem(1e-300) is None


def test_an_unknown_option_gets_a_suggestion() -> None:
    parser = Parser(prog="sorl-x")
    parser.add_subparsers().add_parser("build").add_argument("--batch_size", type=int)
    with pytest.raises(UserError, match=r"unknown option --batch_sise\. Did you mean '--batch_size'\?"):
        parser.parse_args(["build", "--batch_sise", "3"])
    with pytest.raises(UserError, match="unexpected argument 'more'"):
        parser.parse_args(["build", "more"])


def test_dashes_and_underscores_are_the_same_in_names_only() -> None:
    parser = Parser(prog="sorl-x", mappings=("task_args",))
    parser.add_argument("--run_dir")
    parser.add_argument("--viewers", action=argparse.BooleanOptionalAction)
    parser.add_argument("rest", nargs="*")
    words = ["--run-dir=a-b", "--no-viewers", "--task-args.top-k", "x-y", "--", "--as-it-is"]
    read = vars(parser.parse_args(words))
    assert read == {"run_dir": "a-b", "viewers": False, "task_args.top_k": "x-y", "rest": ["--as-it-is"]}


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"checks": (Bounds(low=1),), "share": math.nan, "path": Path("a/b")})
    assert json.loads(capsys.readouterr().out) == {"checks": [[1, None, None]], "share": None, "path": "a/b"}


def test_what_is_at_a_path(tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").mkdir()
    assert "good.jsonl: it is a folder; give a file" in no_such_file(tmp_path / "good.jsonl")
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    assert "a link to" in no_such_file(tmp_path / "gone.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "it is not an ordinary file" in no_such_file(tmp_path / "pipe.jsonl")
    assert "Did you mean 'good.jsonl'" in no_such_file(tmp_path / "good.json")
    assert "does not exist either" in no_such_file(tmp_path / "no" / "god.jsonl")
    assert "There are none" in no_such_file(tmp_path / "x.py", (".py",))
    assert did_you_mean("x", map(str, range(30))).endswith("and 10 more.")


def test_a_new_folder_goes_again_when_its_use_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyError), new_folder(tmp_path / "a" / "b"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").mkdir()
    with pytest.raises(KeyError), new_folder(tmp_path / "a" / "b" / "c"):
        (tmp_path / "a" / "b" / "kept").write_text("")
        raise KeyError
    assert sorted(path.name for path in (tmp_path / "a").rglob("*")) == ["b", "kept"]


# -- real processes --------------------------------------------------------------------------------------------
def start(module: str, *words: str, **options: object) -> subprocess.Popen[bytes]:
    """Start a command. It hears Ctrl-C even where the tests run in the background, where a shell ignores it."""
    options.setdefault("preexec_fn", lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", module, *words], **{**pipes, **options})  # type: ignore[call-overload,no-any-return]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no /proc")
def test_ctrl_c_at_a_question() -> None:
    playing = start("sorl_env.commands.play", "nq", stdin=subprocess.PIPE)
    assert playing.stdout is not None
    while b"q               quit" not in playing.stdout.readline():
        pass
    # the prompt is next; before it a signal may be seen at the end of the input only
    while playing.stdout.read(1) != b">":
        pass
    stat = Path(f"/proc/{playing.pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S")  # it sleeps in its read
    playing.send_signal(signal.SIGINT)
    _, err = playing.communicate(timeout=60)
    assert playing.returncode == 130 and b"Traceback" not in err


def test_closed_input_and_a_terminal_without_letters(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "Où?", "golden_answers": ["à"]}\n', encoding="utf-8")
    words = ("nq", "--data", str(tmp_path / "q.jsonl"), "--index", "0", "--show-answer")
    code = f"exec {sys.executable} -m sorl_env.commands.play {' '.join(words)} <&-"
    playing = subprocess.run(
        ["sh", "-c", code], capture_output=True, timeout=60, env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert playing.returncode == 0, playing.stderr
    assert rb"O\xf9?" in playing.stdout and b"You left before the end" in playing.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_standard_output_on_a_full_disk() -> None:
    with Path("/dev/full").open("wb") as full:
        done = start("sorl_env.commands.play", "nq", "--index", "0", stdin=subprocess.DEVNULL, stdout=full)
        _, err = done.communicate(timeout=60)
    assert done.returncode == 1
    said = [line for line in err.decode().splitlines() if line.startswith("sorl-play: ")]
    assert len(said) == 1 and said[0].startswith("sorl-play: no space left on device: free some space there")
    assert "Traceback" not in err.decode() and "Exception ignored" not in err.decode()


@pytest.mark.slow
def test_a_reader_who_leaves() -> None:
    """As `head` does."""
    playing = start("sorl_env.commands.play", "nq", "--index", "0", stdin=subprocess.PIPE)
    assert playing.stdout is not None and playing.stdin is not None
    playing.stdout.close()
    playing.stdin.close()
    assert playing.stderr is not None
    err = playing.stderr.read()
    assert playing.wait(timeout=60) == 141 and b"Traceback" not in err and b"Exception ignored" not in err


def test_an_interrupt_that_python_drops_comes_again(capsys: pytest.CaptureFixture[str]) -> None:
    def main(_: Sequence[str]) -> int:
        words = {"a word"}
        watched = weakref.ref(words, lambda _: signal.raise_signal(signal.SIGINT))
        del words  # the callback runs, and what it raises is dropped
        assert watched() is None
        time.sleep(30)
        return 0

    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's jobs in the background ignore it
    try:
        assert run_command("sorl-x", main, []) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "\nsorl-x: interrupted\n"


def test_arguments_of_a_task_are_read_as_sorl_train_reads_them() -> None:
    """``--task_args.search_off False`` must not switch search off, as any text would."""
    parser = Parser(prog="sorl-x", mappings=("task_args",))
    add_task_options(parser)
    for text in ("False", "false", "no", "Yes", ".5", "0.5", "null", "[1, 2]", "a.b"):
        args = parser.parse_args(["minihop", "--task_args.hasty", text])
        assert task_args(args) == {"hasty": value_from_text("task_args.hasty", text)}, text
