"""The run folder: a run's settings, its results, and all that is needed to repeat or resume it.

::

    config.yaml      the resolved config            timings.jsonl   seconds and speeds, one line a step
    manifest.json    versions, commit, data hashes  trajectories/   rollouts
    metrics.jsonl    one line a step; reproducible  checkpoints/    best policy and newest checkpoints
    summary.json     final and best figures         events/         TensorBoard
    report.html      curves and tables              viewer.html     its dialogues, token by token
    events.jsonl     collapse alarms, steps taken back, damaged checkpoints

Files that are written at once appear under their name only when they are complete (``atomic_write``).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shlex
import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_env.folders import remove_empty
from sorl_train.config.files import DEFAULT_CONFIG, config_hash, load_config, read_resolved, to_yaml
from sorl_train.config.find_algorithm import short_name
from sorl_train.config.options import Arguments
from sorl_train.config.schema import fields, flatten
from sorl_train.config.settings import LimitsConfig, TrainConfig
from sorl_train.run.files import (
    LOCK,
    FolderLock,
    append_line,
    atomic_write,
    check_place,
    free_name,
    read_own_file,
    read_own_json,
)
from sorl_train.run.manifest import environment_facts

# names that ``atomic_write`` and writers of trajectory files use
_TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}(\.unfinished)?")

_HASH = "manifest_sha256"  # of the manifest's other facts

NON_FINITE = "non_finite_{}.jsonl"  # the trajectories of the step in which a figure was not finite


class RunDir:
    """Paths and small files of one run. ``create`` and ``resume`` make it. The ``lock`` is the one that this process
    holds (``sorl-train`` does)."""

    def __init__(self, path: Path, lock: FolderLock | None = None) -> None:
        self.path = path
        self.lock = lock
        self.begun = False  # whether this start or resume was accepted: then the folder is its own to change
        self.moved: Path | None = None  # where ``overwrite`` has moved an earlier run
        self._accepted: tuple[dict[str, Any], str] | None = None  # what ``begin_resume`` writes
        self.config = path / "config.yaml"
        self.manifest = path / "manifest.json"
        self.metrics = path / "metrics.jsonl"
        self.timings = path / "timings.jsonl"
        self.events = path / "events.jsonl"
        self.logs = (self.metrics, self.timings, self.events)
        self.summary = path / "summary.json"
        self.report = path / "report.html"
        self.trajectories = path / "trajectories"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "events"
        self.stop_file = path / ".stop"  # asks a run in another process to finish its step, save and end

    # -- a new run ------------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls, path: str | Path, config: TrainConfig, *, overwrite: bool = False, lock: FolderLock | None = None
    ) -> RunDir:
        """A new run folder. An earlier run there is an error; with ``overwrite`` it is moved aside, never deleted."""
        run = cls(Path(path), lock)
        run.check_free(overwrite=overwrite)
        if run._is_taken():
            run.moved = run.path.rename(free_name(run.path))
            if lock is not None:
                lock.take()
                (run.moved / LOCK).unlink()
        run.trajectories.mkdir(parents=True, exist_ok=True)
        run.checkpoints.mkdir(exist_ok=True)
        run.remove_leftovers()
        text = to_yaml(config)
        atomic_write(run.config, text)
        started = {
            "run_id": uuid.uuid4().hex,  # its checkpoints have it too, so that those of another run are noticed
            "started": _now(),
            "seed": config.seed,
            "config_sha256": config_hash(config),
            "config_files": [_sha256(text)],
            "resumes": [],
        }
        run._write_manifest(started | environment_facts())
        run.begun = True
        return run

    def check_free(self, *, overwrite: bool = False) -> None:
        """Raise ``UserError`` unless a new run can use this folder; ``overwrite`` allows an earlier run in it."""
        check_place(self.path, "--run_dir")
        if not self._is_taken() or (overwrite and self.config.is_file()):
            return
        another = f"another folder (--run_dir {shlex.quote(str(free_name(self.path)))})"
        if not self.summary.is_file() and not self.config.is_file():
            raise UserError(f"{self.path} is not empty and is not a run folder; give {another}")
        state, move = "an unfinished", f"Give {another}"
        if self.summary.is_file():
            state = "a finished"
        elif self.has_checkpoint:
            again = f"sorl-train --resume --run_dir {shlex.quote(str(self.path))}"
            move = f"Continue it ({again}), give {another}"
        raise UserError(
            f"{self.path} holds {state} run. {move}, or --overwrite to move that run aside and start again"
        )

    def _is_taken(self) -> bool:
        """Whether more is in the folder than a start leaves that was killed before it had written its config."""
        own = (self.trajectories, self.checkpoints)
        empty = {path for path in own if path.is_dir() and not any(path.iterdir())}
        there = set(self.path.iterdir()) if self.path.is_dir() else set()
        return bool(there - {self.path / LOCK, *empty, *self._leftovers()})

    def discard_if_unused(self) -> None:
        """Delete the folder if nothing was trained in it, so that a corrected command can use its name."""
        remove_empty([self.trajectories])
        remove_empty([self.checkpoints])
        if {path.name for path in self.path.iterdir()} <= {self.config.name, self.manifest.name, LOCK}:
            self.config.unlink(missing_ok=True)
            self.manifest.unlink(missing_ok=True)
            remove_empty([self.path])  # what holds the lock is removed with it

    # -- a resumed run --------------------------------------------------------------------------------------------

    @classmethod
    def resume(
        cls, path: str | Path, config: TrainConfig, *, lock: FolderLock | None = None
    ) -> tuple[RunDir, list[str]]:
        """An existing run folder, and the settings that have changed since, as ``name: old -> new``.

        Nothing in it changes until ``begin_resume``: data, files or the model may still refuse the resume. Raises
        ``UserError`` if there is no run, its config or manifest is damaged or another run's, or a setting changed that
        may not.
        """
        run = cls(Path(path), lock)
        old, new, manifest = flatten(saved_config(path)), flatten(config), run.read_manifest()
        if manifest.pop(_HASH, None) not in (None, _hash(manifest)):  # earlier versions did not write it
            raise UserError(f"{run.manifest} is damaged, or was edited: restore it from a copy")
        # the limits that the run has: those that are set, or else the task's own, which the manifest has
        own = manifest.get("data", {}).get("train", {}).get("limits", {})
        before = old | {f"limits.{name}": own[name] for name in own if old.get(f"limits.{name}") is None}
        changed = [name for name in new if old[name] != new[name]]
        may_change = {field.name for field in fields() if field.resumable}
        refused = [
            name
            for name in changed
            # what was sampled under lower limits is within higher ones
            if name not in may_change and not (name.startswith("limits.") and _rises(before[name], new[name]))
        ]
        if refused:
            lines = "\n".join(f"  {name}: {before[name]!r} in the run, {new[name]!r} now" for name in refused)
            raise UserError(
                f"cannot resume {run.path} with other settings: only steps, eval, checkpoint and log settings may "
                f"change, and limits may rise:\n{lines}\nDrop these changes, or start a new run with another "
                "--run_dir."
            )
        if run.summary.is_file() and config.update.steps == old["update.steps"]:
            raise UserError(
                f"{run.path} holds a finished run; train it longer with --update.steps N, "
                f"N above {config.update.steps}, or start a new run with another --run_dir"
            )
        changes = [f"{name}: {old[name]!r} -> {new[name]!r}" for name in changed if name != "run_dir"]
        environment = environment_facts()
        if others := list(differences(_numeric(manifest), _numeric(environment), "environment")):
            changes.append("from here on its numbers are not exactly the same: " + "; ".join(others))
        resumed = {"time": _now(), "changes": changes, "environment": environment}
        run._accepted = resumed, to_yaml(config)
        return run, changes

    def begin_resume(self) -> None:
        """Note an accepted resume in the manifest, write its settings, and mark the run as unfinished."""
        assert self._accepted is not None
        resume, text = self._accepted
        manifest = self.read_manifest()
        manifest.setdefault("resumes", []).append(resume)
        manifest["config_files"] = sorted({*manifest.get("config_files", ()), _sha256(text)})
        self.summary.unlink(missing_ok=True)  # it marks a run as finished with the steps of its config
        # before the config: after a kill in between, it knows the old one and the new one
        self._write_manifest(manifest)
        atomic_write(self.config, text)
        self.begun = True

    def check_config(self) -> None:
        """Raise ``UserError`` unless ``config.yaml`` exists, is not empty, and was written by this run. The last is
        checked only if there is a manifest: others than a resume need none."""
        if not os.path.lexists(self.config) and not os.path.lexists(self.manifest):
            raise UserError(
                f"nothing to resume: {self.path} is not a run folder (it has no {self.config.name}); drop --resume to "
                "start a run there"
            )
        content = read_own_file(self.config)
        if not content.strip():
            raise UserError(f"{self.config} is empty: restore it from a copy")
        known = self.read_manifest().get("config_files") if os.path.lexists(self.manifest) else None
        if known is not None and hashlib.sha256(content).hexdigest() not in known:
            raise UserError(
                f"{self.config} is not the file that this run wrote: it was edited, damaged, or is another run's. "
                "Restore it from a copy. To resume with other settings, give options (--update.steps 200)."
            )

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint to resume from, damaged or not."""
        return any(self.checkpoints.glob("step_*"))  # a damaged one that was set aside has another name

    def remove_leftovers(self) -> None:
        """Delete the temporary files that a killed run left."""
        for path in self._leftovers():
            path.unlink()

    def _leftovers(self) -> list[Path]:
        hidden = [path for folder in (self.path, self.trajectories) for path in folder.glob(".*")]
        return [path for path in hidden if _TEMPORARY.fullmatch(path.name) and path.is_file()]

    # -- facts ----------------------------------------------------------------------------------------------------

    def record(self, section: str, facts: Mapping[str, Any]) -> None:
        """Add facts (JSON values) to the manifest under ``section``, such as data sources and hashes.

        Those that the run began with stay: ``limits`` may be higher now. Raises ``UserError`` if another fact has
        changed at a resume, so that the rest of the run would not fit its beginning.
        """
        manifest = self.read_manifest()
        fresh = json.loads(json.dumps(facts))
        changed = list(differences(manifest.get(section, fresh), fresh, section, rise=True))
        if changed:
            lines = "\n".join(f"  {line}" for line in changed)
            raise UserError(
                f"{self.path} was started with other data, files, another model or another algorithm:\n{lines}\n"
                "Restore what it was started with, or start a new run with another --run_dir."
            )
        if section not in manifest:
            self._write_manifest(manifest | {section: fresh})

    def begun_limits(self, now: LimitsConfig) -> LimitsConfig:
        """The limits that the run began with, on which its cold start depends; ``now`` if it begins now."""
        limits = self.read_manifest().get("data", {}).get("train", {}).get("limits")
        return now if limits is None else LimitsConfig(**limits)

    def read_manifest(self) -> dict[str, Any]:
        """The facts in ``manifest.json``. Raises ``UserError`` if it is missing or is not a JSON object."""
        return read_own_json(self.manifest)

    @property
    def run_id(self) -> str:
        """An id that no other run has, not even one with the same settings."""
        return str(self.read_manifest().get("run_id"))

    def append_event(self, step: int, kind: str, reason: str, **more: Any) -> None:
        """Append a line to ``events.jsonl``."""
        append_line(self.events, json.dumps({"step": step, "kind": kind, "reason": reason, **more}) + "\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write final and best figures. The file marks the run as finished."""
        atomic_write(self.summary, json.dumps(summary, indent=2) + "\n")

    def _write_manifest(self, manifest: Mapping[str, Any]) -> None:
        facts = {name: value for name, value in manifest.items() if name != _HASH}
        atomic_write(self.manifest, json.dumps(facts | {_HASH: _hash(facts)}, indent=2) + "\n")


def saved_config(
    path: str | Path, overrides: Mapping[str, Any] | None = None, *, check: bool = True
) -> TrainConfig:
    """The settings of the run in a folder, with overrides on top; ``check`` is that of ``read_resolved``.

    Raises ``UserError`` if there is no run, or if its ``config.yaml`` is not the one that the run wrote
    (``RunDir.check_config``).
    """
    run = RunDir(Path(path))
    run.check_config()
    return read_resolved(run.config, overrides, check=check)


def settings_of(arguments: Arguments) -> TrainConfig:
    """The config of a command line, with its run folder. A resumed run keeps its saved settings unless --config is
    given."""
    from_saved = arguments.resume and arguments.config is None
    folder = arguments.overrides.get("run_dir") if from_saved else None
    if folder is None:
        config = load_config(arguments.config or DEFAULT_CONFIG, arguments.overrides)
        # such as runs/quickstart-so_ppo-s0, named after the config, or after a --task that is given
        origin = arguments.config or arguments.overrides.get("task") or DEFAULT_CONFIG
        kind = short_name(config.algo) if config.stage == "rl" else config.stage
        name = re.sub(r"[^a-zA-Z0-9_.]+", "_", Path(origin).stem)
        folder = config.run_dir or f"runs/{name}-{kind}-s{config.seed}"
    if from_saved:
        config = saved_config(folder, arguments.overrides)
    return dataclasses.replace(config, run_dir=folder)


def differences(old: Any, new: Any, name: str = "", was: str = "then", rise: bool = False) -> Iterator[str]:
    """One line for each value that differs between two JSON values; with ``rise`` a limit may be higher now."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from differences(old.get(key), new.get(key), f"{name}.{key}" if name else key, was, rise)
    elif isinstance(old, dict) and new is None:
        yield f"{name}: {was}, not now"
    elif isinstance(new, dict) and old is None:
        yield f"{name}: not {was}, now"
    elif old != new and not (rise and ".limits." in name and _rises(old, new)):
        yield f"{name}: {old!r} {was}, {new!r} now"


def _rises(old: float | None, new: float | None) -> bool:
    """Whether a limit is at least what it was. What None stands for differs from limit to limit."""
    return old is not None and new is not None and new >= old


def _numeric(environment: Mapping[str, Any]) -> dict[str, Any]:
    """What the last bits of a run's numbers depend on."""
    hardware, git = environment.get("hardware", {}), environment.get("git") or {}
    return {
        "versions": environment.get("versions", {}),
        "commit": git.get("commit"),
        "processor": hardware.get("processor"),
        "gpus": hardware.get("gpus"),
    }


def _hash(manifest: Mapping[str, Any]) -> str:
    return _sha256(json.dumps(manifest, sort_keys=True))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
