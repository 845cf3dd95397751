"""The run folder: what a run was, what it did, and enough to repeat or resume it.

::

    config.yaml      the resolved config            timings.jsonl   seconds and speeds, one line a step
    manifest.json    versions, commit, data hashes  trajectories/   rollouts
    metrics.jsonl    one line a step; reproducible  checkpoints/    best and newest
    summary.json     final and best figures         events/         TensorBoard
    report.html      curves and tables              viewer.html     its dialogues, token by token
    events.jsonl     collapse alarms, roll-backs

Whole files appear under their name only when complete (``atomic_write``).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_env.folders import missing_folders, remove_empty
from sorl_env.text import read_json
from sorl_train.config.files import config_hash, read_resolved, to_yaml
from sorl_train.config.schema import flatten
from sorl_train.config.settings import TrainConfig
from sorl_train.run.files import atomic_write
from sorl_train.run.hashed_folder import hash_json
from sorl_train.run.manifest import environment_facts

# What may change when a run is resumed: nothing of this alters a step already taken.
RESUMABLE = (
    "run_dir search.url search.cache search.timeout_s search.retries update.steps rollout.save_every hardware.threads "
    "eval.every eval.num_examples eval.num_examples_final eval.temperature eval.search_off eval.patience "
    "checkpoint.every checkpoint.keep log.tensorboard log.wandb"
).split()

_TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}(\.unfinished)?")  # of ``atomic_write`` and of trajectory files


def read_own_file(path: Path) -> bytes:
    """The bytes of a file that we have written. Raises ``UserError`` when it is missing or cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: restore it from a copy") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): restore it from a copy") from error


def read_own_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file that we have written. Raises ``UserError`` when it is missing or damaged."""
    try:
        content = read_json(read_own_file(path))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): restore it from a copy") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged (no JSON object): restore it from a copy")
    return content


class RunDir:
    """Paths and small files of one run; made by ``create`` or ``resume``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made: list[Path] = []  # this folder and those above it that were made for it
        self.config = path / "config.yaml"
        self.manifest = path / "manifest.json"
        self.metrics = path / "metrics.jsonl"
        self.timings = path / "timings.jsonl"
        self.summary = path / "summary.json"
        self.report = path / "report.html"
        self.trajectories = path / "trajectories"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "events"
        self.events = path / "events.jsonl"
        self.stop_file = path / ".stop"  # asks a run in another process to finish its step, save, and end

    @classmethod
    def create(cls, path: str | Path, config: TrainConfig, *, overwrite: bool = False) -> RunDir:
        """A new run folder. An earlier run there is an error, or with ``overwrite`` moved aside (never deleted)."""
        run = cls(Path(path))
        run.check_free(overwrite=overwrite)
        if run.path.is_dir() and any(run.path.iterdir()):
            run.path.rename(_free_name(run.path))
        run._made = missing_folders(run.path)
        run.trajectories.mkdir(parents=True, exist_ok=True)
        run.checkpoints.mkdir(exist_ok=True)
        text = to_yaml(config)
        atomic_write(run.config, text)
        started = {
            "run_id": uuid.uuid4().hex,  # its checkpoints carry it, so that another run's are told apart
            "started": _now(),
            "seed": config.seed,
            "config_sha256": config_hash(config),
            "config_files": [_sha256(text)],
            "resumes": [],
        }
        run._write_manifest(started | environment_facts())
        return run

    def check_free(self, *, overwrite: bool = False) -> None:
        """Raise ``UserError`` unless a new run can take this folder; ``overwrite`` allows an earlier run there."""
        for part in (self.path, *self.path.parents):
            if part.exists() and not part.is_dir():
                raise UserError(f"run_dir {self.path}: {part} is a file; choose another --run_dir")
        if self.path.is_dir() and any(self.path.iterdir()) and not (overwrite and self.config.is_file()):
            raise UserError(self._taken())

    @classmethod
    def resume(cls, path: str | Path, config: TrainConfig) -> tuple[RunDir, list[str]]:
        """An existing run folder, and the settings that changed since, as ``name: old -> new``.

        Raises ``UserError`` when there is no run, when its config or its manifest is damaged or of another run, or
        when a setting changed that would make it another run.
        """
        run = cls(Path(path))
        manifest = run.intact_manifest()
        old, new = flatten(saved_config(path)), flatten(config)
        changed = [name for name in new if old[name] != new[name]]
        refused = [name for name in changed if name not in RESUMABLE]
        if refused:
            lines = "\n".join(f"  {name}: {old[name]!r} in the run, {new[name]!r} now" for name in refused)
            raise UserError(
                f"cannot resume {run.path} with other settings; a resumed run keeps all but steps, eval, checkpoint "
                f"and log settings:\n{lines}\nDrop these changes, or start a new run with another --run_dir."
            )
        if run.summary.is_file() and config.update.steps == old["update.steps"]:
            raise UserError(
                f"{run.path} holds a finished run; train it longer with --update.steps N, "
                f"N above {config.update.steps}, or start a new run with another --run_dir"
            )
        changes = [f"{name}: {old[name]!r} -> {new[name]!r}" for name in changed if name != "run_dir"]
        text = to_yaml(config)
        manifest["resumes"].append({"time": _now(), "changes": changes, "environment": environment_facts()})
        manifest["config_files"] = sorted({*manifest["config_files"], _sha256(text)})
        run._write_manifest(
            manifest
        )  # before the config: a kill in between leaves one that the manifest knows
        atomic_write(run.config, text)
        run.summary.unlink(missing_ok=True)  # it marks a finished run
        return run, changes

    def record(self, section: str, facts: Mapping[str, Any]) -> None:
        """Add facts (JSON values) to the manifest under ``section``: data sources and hashes, say.

        On a resumed run the same facts must come again; ``UserError`` names one that changed, for then the rest of
        the run would not belong to its beginning.
        """
        manifest = self.read_manifest()
        fresh = json.loads(json.dumps(facts))
        changed = list(_differences(manifest.get(section, fresh), fresh, section))
        if changed:
            lines = "\n".join(f"  {line}" for line in changed)
            raise UserError(
                f"{self.path} was started with something else:\n{lines}\n"
                "Restore it, or start a new run with another --run_dir."
            )
        if manifest.get(section) != fresh:
            self._write_manifest(manifest | {section: fresh})

    def read_manifest(self) -> dict[str, Any]:
        """The facts of ``manifest.json``. Raises ``UserError`` when it is missing or no JSON object."""
        return read_own_json(self.manifest)

    @property
    def run_id(self) -> str:
        """What tells this run from every other one, of the same settings too."""
        return str(self.read_manifest()["run_id"])

    def check_config(self) -> None:
        """Raise ``UserError`` unless ``config.yaml`` is there, is not empty, and is one that this run has had.

        The last is known where the manifest lies beside it and is of a version that records it.
        """
        if not os.path.lexists(self.config) and not os.path.lexists(self.manifest):
            raise UserError(
                f"nothing to resume: {self.path} holds no run (no {self.config.name}); drop --resume to start one "
                "there"
            )
        content = read_own_file(self.config)
        if not content.strip():
            raise UserError(f"{self.config} is empty: restore it from a copy")
        known = self.read_manifest().get("config_files") if os.path.lexists(self.manifest) else None
        if known is not None and hashlib.sha256(content).hexdigest() not in known:
            raise UserError(
                f"{self.config} is not the file that this run wrote: it was edited, damaged, or is another run's. "
                "Restore it from a copy; settings of a resumed run are changed by options (--update.steps 200)."
            )

    def intact_manifest(self) -> dict[str, Any]:
        """The manifest of a run that can go on: what is in it decides which files belong to the run."""
        self.check_config()
        manifest = self.read_manifest()
        claimed = manifest.pop("sha256", None)
        if claimed is None and "run_id" not in manifest:
            version = manifest.get("versions", {}).get("sorl", "unknown")
            raise UserError(
                f"{self.path} is a run of an earlier version of sorl ({version}), whose checkpoints carry no hashes "
                "and cannot be checked: go on with that version, or start a new run from its policy (--model "
                f"{self.checkpoints / 'best' / 'policy'})"
            )
        if claimed != hash_json(manifest):
            raise UserError(f"{self.manifest} is damaged (its hash is another one): restore it from a copy")
        return manifest

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Final and best figures; its presence marks the run as finished."""
        atomic_write(self.summary, json.dumps(summary, indent=2) + "\n")

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is something to resume from."""
        return any(self.checkpoints.glob("step_*"))  # a damaged one that was set aside has another name

    def discard_if_unused(self) -> None:
        """Delete the folder if nothing was trained in it, so that a corrected command can use the name."""
        for folder in (self.trajectories, self.checkpoints):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        if {path.name for path in self.path.iterdir()} <= {self.config.name, self.manifest.name}:
            self.config.unlink(missing_ok=True)
            self.manifest.unlink(missing_ok=True)
            self.path.rmdir()
            remove_empty(self._made[1:])

    def remove_leftovers(self) -> None:
        """Delete the half-written files under temporary names that a killed run left."""
        for folder in (self.path, self.trajectories):
            for path in folder.glob(".*"):
                if _TEMPORARY.fullmatch(path.name) and path.is_file():
                    path.unlink()

    def _write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """With a hash over the facts, by which a resume finds a damage."""
        facts = {name: value for name, value in manifest.items() if name != "sha256"}
        facts = json.loads(json.dumps(facts))
        atomic_write(self.manifest, json.dumps(facts | {"sha256": hash_json(facts)}, indent=2) + "\n")

    def _taken(self) -> str:
        another = _free_name(self.path)
        if self.summary.is_file():
            return (
                f"{self.path} holds a finished run. Give another folder (--run_dir {another}), "
                "or --overwrite to move the old run aside and start again"
            )
        if self.config.is_file():
            again = (
                f"Continue it (sorl-train --resume --run_dir {self.path}), give"
                if self.has_checkpoint
                else "Give"
            )
            return (
                f"{self.path} holds an unfinished run. {again} another folder (--run_dir {another}), "
                "or --overwrite to move it aside and start again"
            )
        return f"{self.path} is not empty and holds no run of ours; give another folder (--run_dir {another})"


def saved_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
    """The settings of the run in a folder, with overrides on top. Raises ``UserError`` when there is no run, or when
    its ``config.yaml`` is not the run's own (``RunDir.check_config``)."""
    run = RunDir(Path(path))
    run.check_config()
    return read_resolved(run.config, overrides)


def _differences(old: Any, new: Any, name: str) -> Iterator[str]:
    """One line for each value that differs between two JSON values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _differences(old.get(key), new.get(key), f"{name}.{key}")
    elif old != new:
        yield f"{name}: {old!r} then, {new!r} now"


def _free_name(path: Path) -> Path:
    number = 2
    while (candidate := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return candidate


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _now() -> str:
    return datetime.fromtimestamp(time.time(), tz=timezone.utc).isoformat(timespec="seconds")
