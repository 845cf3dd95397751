"""What all commands share: how options are read, how figures are printed as JSON, and how a command ends.

A user's mistake becomes one message on standard error and a nonzero exit status, without a traceback. A fault of sorl
itself keeps its traceback, below a line that asks for a report.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import errno
import io
import json
import math
import os
import re
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from sorl_env.errors import MAX_SEED, MOST, Bounds, UserError, did_you_mean, installed
from sorl_env.task.import_file import user_traceback
from sorl_env.text import valid_text

_T = TypeVar("_T")
FAILED, WRONG_USAGE, INTERRUPTED, UNREAD = 1, 2, 130, 141  # a shell reports Ctrl-C and SIGPIPE in this way
_LONGEST_WORD = 300  # characters; a message shows only both ends of a longer one
# What to do about an error of the system, by its number; about others that name a path, there is `_OTHER_PATH`.
_ADVICE = dict.fromkeys(
    [errno.ENOSPC, errno.EDQUOT], "free some space there, or choose a folder on another disk"
)
_ADVICE |= dict.fromkeys(
    (errno.EROFS, errno.EACCES, errno.EPERM), "choose another path, or make this one writable"
)
_ADVICE[errno.EMFILE] = "allow more open files: ulimit -n 4096"
_OTHER_PATH = "correct the path, or choose another one"


class Parser(argparse.ArgumentParser):
    """Reads the options of every command in the same way.

    ``--run_dir`` may be written ``--run-dir``; a value follows its option after a space or after ``=``; names are
    written in full; ``--version`` prints the installed version. A wrong command line raises ``UserError``, which
    becomes one message instead of argparse's whole usage text.

    Args:
        mappings: options whose keys only the user knows. ``("task_args",)`` accepts ``--task_args.hops 2``, and the
            parsed arguments then have the attribute ``task_args.hops``.
    """

    def __init__(self, *args: Any, mappings: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **settings})
        self._prefixes = tuple(f"--{name}." for name in mappings)
        if " " not in self.prog:  # not for the subcommands
            said = f"{self.prog} {version()}"
            self.add_argument("--version", action="version", version=said, help="print the installed version")

    def format_help(self) -> str:
        """Without the marks of docstrings, which some texts come from."""
        return super().format_help().replace("``", "")

    def error(self, message: str) -> NoReturn:
        """Raise ``UserError`` instead of printing the usage and leaving."""
        said = re.sub(r"^argument (.+?): (must|cannot|expected)", r"\1 \2", message)
        raise UserError(f"{said}; {self.prog} --help explains all options")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Print ``message`` and leave with ``status``, without ending the interpreter."""
        self._print_message(message or "", sys.stderr)
        raise _LeaveError(status)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, with dashes in the names of options read as underscores."""
        words = self._underscored(sys.argv[1:] if args is None else args)
        names = {word.partition("=")[0] for word in words if word.startswith(self._prefixes)}
        for name in sorted(names - self._option_string_actions.keys()):
            self.add_argument(name, dest=name[2:])
        return super().parse_known_args(words, namespace)

    def _underscored(self, words: Iterable[str]) -> list[str]:
        """``--run-dir=a-b`` becomes ``--run_dir=a-b``; what follows a bare ``--`` stays as it is."""
        found = list(words)
        end = found.index("--") if "--" in found else len(found)
        for i, word in enumerate(found[:end]):
            name, equals, value = word.partition("=")
            if re.fullmatch(r"--\w[\w.-]*", name) and name not in self._option_string_actions:
                found[i] = f"--{name[2:].replace('-', '_')}{equals}{value}"
        return found

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; the message about an unknown option suggests the nearest known one."""
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


class _LeaveError(SystemExit):
    """The parser's own end of the process, after ``--help`` or ``--version``."""


def version() -> str:
    """The installed version of sorl."""
    return installed("sorl") or "unknown (sorl is not installed)"


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``; `print_json` is what a command calls when it is given."""
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of text")


def print_json(figures: Any) -> None:
    """Print mappings, sequences and dataclasses as JSON on standard output; NaN and infinities become null."""
    text = json.dumps(_plain(figures), indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write(f"{text}\n")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)


def whole(low: int | None = None, high: int = MOST) -> Callable[[str], int]:
    """An argparse type: a whole number from ``low`` to ``high``, in plain digits."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,40}", text):
            raise argparse.ArgumentTypeError(f"must be a whole number, it is {text!r}")
        return int(_within(Bounds(low, high), int(text)))

    return read


def number(
    low: float | None = None, high: float | None = None, *, above: float | None = None
) -> Callable[[str], float]:
    """An argparse type: a finite number from ``low`` to ``high``, or larger than ``above``."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if text.isascii() and "_" not in text and math.isfinite(value := float(text)):
                return _within(Bounds(low, high, above), value)
        raise argparse.ArgumentTypeError(f"must be a finite number, it is {text!r}")

    return read


def _within(bounds: Bounds, value: float) -> float:
    if (problem := bounds.problem(value)) is not None:
        raise argparse.ArgumentTypeError(problem)
    return value


seed = whole(0, MAX_SEED)


@contextlib.contextmanager
def _no_interrupt_is_lost() -> Iterator[None]:
    """Raise a Ctrl-C again that came where Python drops exceptions, such as in the callback of a weak reference."""
    before = sys.unraisablehook

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            before(dropped)
            return
        again = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))  # this hook would drop it, too
        again.daemon = True
        again.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def run_command(
    program: str,
    main: Callable[[list[str]], int],
    argv: Sequence[str] | None,
    *,
    refused: int = WRONG_USAGE,
    interrupted: str = "interrupted",
) -> int:
    """Run a command and return its exit status. What went wrong is printed on standard error.

    Args:
        main: takes the arguments and returns the exit status.
        argv: the arguments; None takes those of the process.
        refused: exit status after a mistake of the user (``UserError``).
        interrupted: message after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal whose encoding lacks a character must not make the command fail.
            stream.reconfigure(errors="backslashreplace")
    try:
        for argument in arguments:
            if argument != valid_text(argument):
                raise UserError(f"the argument {os.fsencode(argument)!r} is not UTF-8 text: correct it")
        with _no_interrupt_is_lost():
            status = main(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, so that a full disk is reported as such
        return status
    except UserError as error:
        say(program, str(error))
        return refused
    except KeyboardInterrupt:
        say(program, interrupted, before="\n")
        return INTERRUPTED
    except _LeaveError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, BrokenPipeError) and drop_output():
            return UNREAD
        if isinstance(error, OSError) and (message := about_os_error(error)) is not None:
            drop_output()
            say(program, message)
            return refused
        if (lines := user_traceback(error)) is not None:
            say(program, f"the task's own code failed:\n{lines}")
            return FAILED
        say(program, "this is a fault of sorl itself; please report it, with the command and the lines below")
        if isinstance(error, Exception):
            raise
        traceback.print_exception(error)  # a library called sys.exit, which must not look like a success
        return FAILED


def say(program: str, message: str, before: str = "") -> None:
    """Print a message on standard error, with very long values in it shortened."""
    if sys.stderr is not None:
        sys.stderr.write(f"{before}{program}: {shortened(message)}\n")
        sys.stderr.flush()


def shortened(message: str) -> str:
    """``message`` with the middle of very long words left out."""

    def cut(match: re.Match[str]) -> str:
        return f"{match[0][:80]}..{match[0][-20:]} ({len(match[0]):,} characters)"

    return re.sub(rf"\S{{{_LONGEST_WORD},}}", cut, message)


def about_os_error(error: OSError) -> str | None:
    """What the system refused and what to do about it; None for an error that may be a fault of sorl itself."""
    paths = [str(path) for path in (error.filename, error.filename2) if isinstance(path, (str, os.PathLike))]
    advice = _ADVICE.get(error.errno or 0, _OTHER_PATH if paths else None)
    if advice is None:
        return None
    where = f"{' and '.join(paths)}: " if paths else ""
    return f"{where}{(error.strerror or str(error)).lower()}: {advice}"


def drop_output() -> bool:
    """Discard what standard output cannot take, now and from here on, as writing it would fail again, at the latest
    when Python ends. True if there was a reason: a full disk, or a reader who has left, as `head` does."""
    no_file = contextlib.suppress(OSError, ValueError, AttributeError)  # standard output, in a test
    with no_file:
        sys.stdout.flush()
        pipe = select.poll()  # without a buffer the flush has nothing to write
        pipe.register(sys.stdout.fileno(), 0)
        if not pipe.poll(0):
            return False
    with no_file:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


# Ctrl-C and SIGTERM while an event loop runs. A signal handler that raises inside asyncio's own code can lose a
# callback that the loop had just taken from its queue. The task that waited for it then never ends, and the process
# hangs. So the handler is ``interrupt``, which cancels the coroutine of ``run_async``; ``asyncio.run`` does the same
# for Ctrl-C alone, from Python 3.11 on.
class _Running:
    """What the main thread's event loop runs now."""

    task: asyncio.Task[Any] | None = None
    interrupted = False


def interrupt(number: int = 0, frame: Any = None) -> None:
    """Raise ``KeyboardInterrupt`` in the main thread: at once, or from ``run_async`` if that is running.

    It has the arguments of a signal handler, and is only to be called by one. The next ones raise at once, in case
    something ignores that it is cancelled.
    """
    task = _Running.task
    if task is None or _Running.interrupted:
        raise KeyboardInterrupt
    _Running.interrupted = True
    task.get_loop().call_soon_threadsafe(task.cancel)


def interrupt_on(*signals: signal.Signals) -> None:
    """Make these signals end the process as Ctrl-C does, so that it can save its work first."""
    for each in signals:
        signal.signal(each, interrupt)


def run_async(main: Coroutine[Any, Any, _T]) -> _T:
    """``asyncio.run``, which an interrupt always ends.

    Raises:
        KeyboardInterrupt: after an ``interrupt``, once the coroutine has dealt with its cancellation.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone handles signals
        return asyncio.run(main)
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:
        signal.signal(signal.SIGINT, interrupt)
    try:
        return asyncio.run(_watched(main))
    finally:
        interrupted, _Running.interrupted = _Running.interrupted, False
        if usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupted:
            raise KeyboardInterrupt


async def _watched(main: Coroutine[Any, Any, _T]) -> _T:
    _Running.task = asyncio.current_task()
    try:
        return await main
    finally:
        _Running.task = None
