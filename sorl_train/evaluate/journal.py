"""The folder of an evaluation: its settings, and one line for each answered question.

::

    settings.json    what decides the results: policy, tasks and their data, modes, sampling
    manifest.json    versions, commit, hardware, command
    results.jsonl    one row per question and sample; the same bytes for the same settings
    timings.jsonl    seconds of each row
    summary.json     figures with intervals       table.md, table.tex    the paper's Table 1 with ours

An evaluation may grow: it may be started again with more questions, modes, samples or tasks, as long as these include
all that the folder has.

A killed evaluation leaves complete lines, in the order in which questions ended, and at most one incomplete line. The
next start continues from them, and sorts all lines at the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_env.folders import remove_empty
from sorl_env.text import read_json
from sorl_train.evaluate.rows import Job, Key, Row
from sorl_train.run.files import append_line, atomic_write, read_jsonl
from sorl_train.run.lock import LOCK
from sorl_train.run.manifest import environment_facts


class Journal:
    """The results of one evaluation on disk.

    Args:
        folder: created if missing.
        settings: JSON values; a folder with results of other settings is refused.

    Raises:
        UserError: the folder contains something else.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self.results = folder / "results.jsonl"
        self.timings = folder / "timings.jsonl"
        self._is_new = not (folder / "settings.json").exists()
        self._check(settings)
        self.rows: dict[Key, Row] = {}
        self.seconds: dict[Key, dict[str, Any]] = {}
        self._read()

    def _check(self, settings: Mapping[str, Any]) -> None:
        file = self.folder / "settings.json"
        fresh = json.loads(json.dumps(settings))
        if file.is_file():
            old = _read_settings(file)
            changed = list(differences(_grown(old, fresh), fresh))
            if changed:
                lines = "\n".join(f"  {line}" for line in changed)
                raise UserError(
                    f"{self.folder} holds an evaluation with other settings:\n{lines}\nGive another folder with "
                    "--out. (The same one can grow: more questions, modes, samples or tasks beside those it has.)"
                )
            if old != fresh:
                atomic_write(file, json.dumps(fresh, indent=2) + "\n")
            return
        if self.folder.exists() and any(path.name != LOCK for path in self.folder.iterdir()):
            raise UserError(f"{self.folder} holds no evaluation of ours; give another folder with --out")
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic_write(self.folder / "manifest.json", json.dumps(environment_facts(), indent=2) + "\n")
        atomic_write(file, json.dumps(fresh, indent=2) + "\n")

    def _read(self) -> None:
        """Read the complete lines; drop an incomplete one, and those of questions to try again."""
        if not self.results.is_file():
            return
        rows = read_results(self.results)
        kept = [row for row in rows if not row.excluded]
        self.rows = {row.key: row for row in kept}
        if self.timings.is_file():
            for line in read_jsonl(self.timings):
                self.seconds[line["task"], line["mode"], line["index"], line["sample"]] = line
        self._write([row.key for row in kept])

    @contextmanager
    def dropped_if_empty(self) -> Iterator[None]:
        """If the block raises before there is a row, delete a new evaluation's files, and its folder."""
        try:
            yield
        except BaseException:
            if self._is_new and not self.rows:
                for name in ("manifest.json", "settings.json", self.results.name, self.timings.name):
                    (self.folder / name).unlink(missing_ok=True)
                remove_empty([self.folder])  # what holds the lock removes it otherwise
            raise

    def add(self, row: Row, seconds: Mapping[str, float]) -> None:
        """Append a row immediately; its seconds first, so that every row has some."""
        task, mode, index, sample = row.key
        timing = {"task": task, "mode": mode, "index": index, "sample": sample, **seconds}
        append_line(self.timings, _line(timing))
        append_line(self.results, _line(row.to_json()))
        self.rows[row.key], self.seconds[row.key] = row, timing

    def finish(self, jobs: Sequence[Job]) -> list[Row]:
        """Write the files in the order of the questions, and return the rows."""
        self._write([job.key for job in jobs])
        return [self.rows[job.key] for job in jobs]

    def _write(self, keys: Sequence[Key]) -> None:
        timings = [self.seconds[key] for key in keys if key in self.seconds]
        atomic_write(self.timings, "".join(map(_line, timings)))
        atomic_write(self.results, "".join(_line(self.rows[key].to_json()) for key in keys))


def read_results(path: Path) -> list[Row]:
    """The rows of ``results.jsonl``. Raises ``UserError`` for a line that is not a row."""
    rows = []
    # an incomplete last line is left out
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            record = read_json(line)
        except ValueError as error:
            raise UserError(
                f"{path}:{number}: not a row of sorl-eval: {error}; delete the folder, or name another"
            ) from error
        rows.append(Row.from_json(record, f"{path}:{number}"))
    return rows


def read_folder(folder: Path) -> tuple[dict[str, Any], list[Row]]:
    """The settings and rows of an evaluation's folder. Raises ``UserError`` if it is not one."""
    settings, results = folder / "settings.json", folder / "results.jsonl"
    if not settings.is_file() or not results.is_file():
        raise UserError(
            f"{folder} holds no evaluation (no {settings.name} with {results.name}): give the folder that "
            "sorl-eval wrote with --out"
        )
    return _read_settings(settings), read_results(results)


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        settings = read_json(file.read_bytes())
        if not {"label", "tasks", "modes", "limit", "samples"} <= settings.keys():
            raise ValueError("it lacks settings that sorl-eval writes")
        return dict(settings)
    except (ValueError, AttributeError) as error:
        raise UserError(
            f"{file}: not the settings of an evaluation ({error}); give another folder with --out"
        ) from error


def _grown(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """``old`` with those values of ``new`` that include everything ``old`` asked for."""
    limit = new["limit"]
    wider = {
        "tasks": old["tasks"].keys() <= new["tasks"].keys(),
        "modes": set(old["modes"]) <= set(new["modes"]),
        "limit": limit is None or (old["limit"] is not None and old["limit"] <= limit),
        "samples": old["samples"] <= new["samples"],
    }
    grown = dict(old) | {name: new[name] for name, contains in wider.items() if contains}
    if wider["tasks"]:
        grown["tasks"] = {name: old["tasks"].get(name, facts) for name, facts in new["tasks"].items()}
    return grown


def differences(old: Any, new: Any, name: str = "") -> Iterator[str]:
    """One line for each value that differs between two JSON values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    elif isinstance(old, dict) and new is None:
        yield f"{name}: there, not now"
    elif isinstance(new, dict) and old is None:
        yield f"{name}: not there, now"
    elif old != new:
        yield f"{name}: {old!r} there, {new!r} now"


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"
