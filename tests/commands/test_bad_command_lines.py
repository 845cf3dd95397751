"""Command lines that ought to be refused, from the tables beside this file.

Each is a real command line with its prepared files. It ends with a nonzero status and one short message that names
what is wrong and what to do about it; there is no traceback, and nothing stays behind: the working folder, run
folders, caches and temporary folders are the same before and after.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    tomllib = None  # type: ignore[assignment]

for package in ("torch", "transformers", "uvicorn", "msgspec", "numba"):
    pytest.importorskip(package, reason="all commands want all packages")

from sorl_env.commands.command import version  # noqa: E402

from .lines import COMMANDS, Outcome, Row, as_process, in_process, listing, read_table, sockets  # noqa: E402
from .world import make_world  # noqa: E402

TABLES = Path(__file__).parent / "tables"
ROWS = [row for table in sorted(TABLES.glob("*.txt")) for row in read_table(table)]
# of a message; a task's own traceback and lists of settings are the longest
MOST_LINES, MOST_CHARACTERS = 12, 2_000


@pytest.fixture(scope="module")
def places() -> Iterator[dict[str, str]]:
    with sockets() as found:
        yield found


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    """In this process the hub's client was imported without the variable that the processes get."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    for name in ("tmp", "cache", "home"):
        (folder / name).mkdir()
    make_world(folder / "work")
    return folder


def check(row: Row, outcome: Outcome, root: Path, before: dict[str, tuple[int, int, int]]) -> None:
    after = listing(root)
    # before any assertion, so that the next row starts clean
    for name in sorted(after.keys() - before.keys()):
        path = root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    said = outcome.out + outcome.err
    assert not outcome.trace, outcome.trace
    assert "Traceback" not in said, said
    assert outcome.status not in (0, None), f"it ended as if all was well: {said}"
    command = row.words({})[1]
    if f"{command}: " in outcome.err:
        message = outcome.err[outcome.err.index(f"{command}: ") :]
        assert len(message) <= MOST_CHARACTERS and message.count("\n") <= MOST_LINES, message
    else:  # a table of checks that says which failed
        assert "fail" in outcome.out.lower(), said
    for text in row.says:
        assert text in said, said
    assert row.says, "the table does not say what the message names"
    assert after == before, sorted(after.items() ^ before.items())


@pytest.mark.parametrize("row", [row for row in ROWS if row.plain], ids=lambda row: row.line[:60])
def test_some_bad_command_lines(row: Row, root: Path, places: dict[str, str]) -> None:
    before = listing(root)
    check(row, in_process(row, root, places), root, before)


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if not row.plain], ids=lambda row: row.line[:60])
def test_all_other_bad_command_lines(row: Row, root: Path, places: dict[str, str]) -> None:
    before = listing(root)
    check(row, in_process(row, root, places), root, before)


ALONE = ("sorl-train", "sorl-eval", "sorl-serve", "sorl-check-task")  # the others end in the same function
FIRST_OF_EACH = [next(row for row in ROWS if row.plain and row.words({})[1] == name) for name in ALONE]


@pytest.mark.slow
@pytest.mark.parametrize("row", FIRST_OF_EACH, ids=lambda row: row.line[:60])
def test_as_processes(row: Row, root: Path, places: dict[str, str]) -> None:
    """In a process of its own a command ends as it does in this one, exit status and words."""
    before = listing(root)
    alone = as_process(row, root, places)
    check(row, alone, root, before)
    inside = in_process(row, root, places)
    assert (alone.status, alone.err.splitlines()[-1:]) == (inside.status, inside.err.splitlines()[-1:])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_prints_its_version(command: str, root: Path, places: dict[str, str]) -> None:
    outcome = in_process(Row(f"{command} --version", ()), root, places)
    assert (outcome.status, outcome.out, outcome.err) == (0, f"{command} {version()}\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_fits_a_screen(command: str, root: Path, places: dict[str, str]) -> None:
    outcome = in_process(Row(f"COLUMNS=80 {command} --help", ()), root, places)
    assert (outcome.status, outcome.err) == (0, "") and len(outcome.out.splitlines()) <= 60


def test_the_tables_know_every_command() -> None:
    assert len(ROWS) >= 300 and len({row.line for row in ROWS}) == len(ROWS)
    counts = Counter(row.words({})[1] for row in ROWS)
    assert set(counts) == set(COMMANDS) and min(counts.values()) >= 10, counts
    if tomllib is not None:
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
        assert {name: f"{module}:main" for name, module in COMMANDS.items()} == project["scripts"]
