"""What all commands share: how options are read, and how a command ends when something is wrong.

A mistake of the user's becomes one message on standard error and a nonzero status, without a traceback. A fault of
sorl's own keeps its traceback, below a line that asks for a report.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from sorl_env.bounds import MAX_SEED, MOST, Bounds
from sorl_env.errors import UserError, did_you_mean
from sorl_env.task_file import their_lines

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130  # 130 is what a shell reports for Ctrl-C
_LONGEST_WORD = 300  # characters of a value that a message repeats
_MOVES = {
    errno.ENOSPC: "free some space there, or choose a folder on another disk",
    errno.EDQUOT: "free some space there, or choose a folder on another disk",
    errno.EFBIG: "choose a folder on another disk",
    errno.EROFS: "choose a folder that can be written",
    errno.EACCES: "change its permissions, or choose another path",
    errno.EPERM: "change its permissions, or choose another path",
    errno.EIO: "the disk may be damaged; choose a folder on another one",
    errno.EMFILE: "allow more open files: ulimit -n 4096",
    errno.ENFILE: "close other programs: the system has too many files open",
}
_MOVES_OF_A_PATH = {
    errno.ENOENT: "a part of this path does not exist; correct it, or make the folder first",
    errno.ENOTDIR: "a part of this path is a file; choose another path",
    errno.EISDIR: "it is a folder; name a file",
    errno.EEXIST: "it is there already; choose another path",
    errno.ENOTEMPTY: "the folder is not empty; choose another one",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "its links lead in a circle; choose another path",
    errno.EINVAL: "the system cannot use this path; choose another one",
    errno.ENXIO: "it is no ordinary file; choose another path",
    errno.ENODEV: "it is no ordinary file; choose another path",
}


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line as ``UserError``: one message, not the whole usage before it."""

    def error(self, message: str) -> NoReturn:
        said = re.sub(r"^argument (.+?): (must|cannot|expected)", r"\1 \2", message)
        raise UserError(f"{said}; {self.prog} --help explains all options")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; an unknown option is answered with the nearest known one."""
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            option = next((word for word in unknown if word.startswith("-")), None)
            if option is None:
                self.error(f"unexpected argument {unknown[0]!r}")
            name = option.partition("=")[0]
            self.error(f"unknown option {name}. {did_you_mean(name, set(self._options()))}")
        return known

    def _options(self) -> Iterable[str]:
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from parser._options()


def whole(low: int | None = None, high: int = MOST) -> Callable[[str], int]:
    """An argparse type: a whole number from ``low`` to ``high``, in plain digits."""
    bounds = Bounds(low, high)

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,40}", text):
            raise argparse.ArgumentTypeError(f"must be a whole number, it is {text!r}")
        return int(_within(bounds, int(text)))

    return read


def number(
    low: float | None = None, high: float | None = None, *, above: float | None = None
) -> Callable[[str], float]:
    """An argparse type: a finite number from ``low`` to ``high``, or larger than ``above``."""
    bounds = Bounds(low, high, above)

    def read(text: str) -> float:
        try:
            value = float(text) if text.isascii() and "_" not in text else math.nan
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"must be a finite number, it is {text!r}")
        return _within(bounds, value)

    return read


def _within(bounds: Bounds, value: float) -> float:
    if (problem := bounds.problem(value)) is not None:
        raise argparse.ArgumentTypeError(problem)
    return value


seed = whole(0, MAX_SEED)


def run_command(
    program: str,
    main: Callable[[list[str]], int],
    argv: Sequence[str] | None,
    *,
    refused: int = WRONG_USAGE,
    interrupted: str = "interrupted",
) -> int:
    """Run a command to its exit status; whatever ends it is said on standard error.

    Args:
        main: from the arguments to the exit status.
        argv: the arguments; those of the process when None.
        refused: the status after a mistake of the user's (``UserError``).
        interrupted: what to say after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a terminal that lacks a letter is no reason to fail
    try:
        for argument in arguments:
            _check_text(argument)
        status = main(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # now, so that a full disk is noticed
        return status
    except UserError as error:
        say(program, str(error))
        return refused
    except BrokenPipeError:  # the reader of a pipe, as `head`, has seen enough
        _drop_output()
        return 0
    except KeyboardInterrupt:
        say(program, interrupted, before="\n")
        return INTERRUPTED
    except OSError as error:
        message = about_os_error(error)
        if message is None:
            _own_fault(program)
            raise
        _drop_output()
        say(program, message)
        return refused
    except Exception as error:
        lines = their_lines(error)
        if lines is None:
            _own_fault(program)
            raise
        say(program, f"the task's own code failed:\n{lines}")
        return FAILED


def say(program: str, message: str, before: str = "") -> None:
    """Print a message on standard error; very long values in it are shortened."""
    if sys.stderr is not None:
        sys.stderr.write(f"{before}{program}: {shortened(message)}\n")
        sys.stderr.flush()


def shortened(message: str) -> str:
    """``message`` with the middle of its very long words left out."""

    def cut(match: re.Match[str]) -> str:
        return f"{match[0][:80]}..{match[0][-20:]} ({len(match[0]):,} characters)"

    return re.sub(rf"\S{{{_LONGEST_WORD},}}", cut, message)


def about_os_error(error: OSError) -> str | None:
    """What the system refused, and what to do about it; None where it may be a fault of ours."""
    number = error.errno or 0
    moves = _MOVES | _MOVES_OF_A_PATH if error.filename is not None else _MOVES
    if number not in moves:
        return None
    paths = [str(path) for path in (error.filename, error.filename2) if isinstance(path, (str, os.PathLike))]
    where = f"{' and '.join(paths)}: " if paths else ""
    return f"{where}{(error.strerror or str(error)).lower()}: {moves[number]}"


def _check_text(argument: str) -> None:
    try:
        argument.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"the argument {os.fsencode(argument)!r} is not UTF-8 text: correct it, or rename the file that it names"
        ) from error


def _drop_output() -> None:
    """Have nothing more written to standard output, which would fail again when Python ends."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):
        with contextlib.suppress(
            OSError, ValueError, AttributeError
        ):  # no file of the system's, as in a test
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _own_fault(program: str) -> None:
    say(program, "this is a fault of sorl itself; please report it, with the command and the lines below")
