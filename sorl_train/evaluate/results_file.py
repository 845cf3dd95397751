"""The folder of an evaluation: its settings, and one line for each answered question.

::

    settings.json    what decides the results: policy, tasks and their data, modes, sampling
    manifest.json    versions, commit, hardware, command
    results.jsonl    one result per question and sample; the same bytes for the same settings
    summary.json     figures with intervals       table.md    the paper's Table 1 with ours

An evaluation may grow: it may be started again with more questions, modes, samples or tasks, as long as these include
all that the folder has.

A killed evaluation leaves complete lines, in the order in which questions ended, and at most one incomplete line. The
next start continues from them, and sorts all lines at the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_env.text import read_json
from sorl_train.evaluate.results import EvalResult, Job, Key
from sorl_train.run.files import LOCK, append_line, atomic_write
from sorl_train.run.manifest import environment_facts


class EvalResultsFile:
    """The results of one evaluation on disk. Nothing is written before the first result.

    Args:
        folder: created with the first result.
        settings: JSON values; a folder with results of other settings is refused.

    Raises:
        UserError: the folder contains something else.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self.path = folder / "results.jsonl"
        self._settings = json.loads(json.dumps(settings))
        self._is_new = not (folder / "settings.json").is_file()
        if not self._is_new:
            self._check(_read_settings(folder / "settings.json"))
        elif folder.exists() and {path.name for path in folder.iterdir()} - {LOCK, "manifest.json"}:
            raise UserError(f"{folder} holds no evaluation of ours; give another folder with --out")
        # those of a tool's outage are tried again
        found = (
            [result for result in _read_results(self.path) if not result.excluded]
            if self.path.is_file()
            else []
        )
        self.results = {result.key: result for result in found}
        if self.path.is_file():
            self._write(list(self.results))  # without an incomplete last line

    def _check(self, old: Mapping[str, Any]) -> None:
        changed = list(_differences(_grown(old, self._settings), self._settings))
        if changed:
            lines = "\n".join(f"  {line}" for line in changed)
            raise UserError(
                f"{self.folder} holds an evaluation with other settings:\n{lines}\nGive another folder with --out. "
                "(The same one can grow: more questions, modes, samples or tasks beside those it has.)"
            )
        if old != self._settings:
            self._write_settings()

    def add(self, result: EvalResult) -> None:
        """Append a result immediately."""
        if self._is_new:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write(self.folder / "manifest.json", json.dumps(environment_facts(), indent=2) + "\n")
            self._write_settings()
            self._is_new = False
        append_line(self.path, _line(result))
        self.results[result.key] = result

    def finish(self, jobs: Sequence[Job]) -> list[EvalResult]:
        """Write the file in the order of the questions, and return the results."""
        self._write([job.key for job in jobs])
        return [self.results[job.key] for job in jobs]

    def _write(self, keys: Sequence[Key]) -> None:
        atomic_write(self.path, "".join(_line(self.results[key]) for key in keys))

    def _write_settings(self) -> None:
        atomic_write(self.folder / "settings.json", json.dumps(self._settings, indent=2) + "\n")


def read_folder(folder: Path) -> tuple[dict[str, Any], list[EvalResult]]:
    """The settings and results of an evaluation's folder. Raises ``UserError`` if it is not one."""
    settings, results = folder / "settings.json", folder / "results.jsonl"
    if not settings.is_file() or not results.is_file():
        raise UserError(
            f"{folder} holds no evaluation (no {settings.name} with {results.name}): give the folder that "
            "sorl-eval wrote with --out"
        )
    return _read_settings(settings), _read_results(results)


def _read_results(path: Path) -> list[EvalResult]:
    results = []
    # an incomplete last line is left out
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            record = read_json(line)
        except ValueError as error:
            raise UserError(
                f"{path}:{number}: not a result of sorl-eval: {error}; delete the folder, or name another"
            ) from error
        results.append(EvalResult.from_json(record, f"{path}:{number}"))
    return results


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


def _differences(old: Any, new: Any, name: str = "") -> Iterator[str]:
    """One line for each value that differs between two JSON values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    elif isinstance(old, dict) and new is None:
        yield f"{name}: there, not now"
    elif isinstance(new, dict) and old is None:
        yield f"{name}: not there, now"
    elif old != new:
        yield f"{name}: {old!r} there, {new!r} now"


def _line(result: EvalResult) -> str:
    return json.dumps(result.to_json(), ensure_ascii=False) + "\n"
