"""What the cards of a run's policies and trajectories say about the run, and the parts that both have.

Everything is read from the run: its settings, manifest and metrics. A figure that the run does not have is left out.
No clock and no folder of this machine is in it, so that a run that was killed and resumed writes the same cards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sorl_env.task import Task
from sorl_train.config.settings import TINY, TrainConfig
from sorl_train.run.files import read_jsonl
from sorl_train.run.folder import RunDir

CARD = "README.md"
HUB = "hf:"


@dataclasses.dataclass(frozen=True)
class CardRun:
    """What a card is written from."""

    config: TrainConfig
    task: Task
    manifest: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    folder: RunDir

    @classmethod
    def read(cls, folder: RunDir, config: TrainConfig, task: Task) -> CardRun:
        metrics = read_jsonl(folder.metrics) if folder.metrics.is_file() else []
        return cls(config, task, folder.read_manifest(), metrics, folder)

    @property
    def method(self) -> str:
        """The algorithm, or what was done in its place."""
        return "supervised fine-tuning" if self.config.stage == "sft" else self.config.algo

    @property
    def task_text(self) -> str:
        """The task and what it is."""
        return f"`{self.task.name}`" + (f": {self.task.description}" if self.task.description else "")

    @property
    def drawing(self) -> str:
        """How answers are drawn in its evaluations."""
        temperature = self.config.eval.temperature
        return "greedy" if temperature == 0 else f"sampled at temperature {temperature:g}"

    def evaluations(self, step: int) -> list[Mapping[str, Any]]:
        """The metrics of the evaluation before training and of the newest one up to ``step``."""
        found = [line for line in self.metrics if "eval/success" in line and line["step"] <= step]
        return found[:1] + found[1:][-1:]

    def questions(self, step: int) -> int | None:
        """How many questions the evaluation of ``step`` asked; None where its trajectories are gone."""
        path = self.folder.trajectories / f"eval_{step:06d}.jsonl"
        if not path.is_file():
            return None
        with path.open("rb") as file:
            return sum(1 for _ in file)

    def data(self, name: str) -> Mapping[str, Any]:
        """The manifest's facts about the data of ``train`` or ``eval``; empty where there are none."""
        facts: Mapping[str, Any] = self.manifest.get("data", {}).get(name, {})
        return facts

    def data_text(self, name: str) -> str:
        """The same as text."""
        facts = self.data(name)
        if not facts:
            return ""
        source = str(facts["source"])
        where = "embedded in the task" if source == "embedded" else f"`{public_name(source)}`"
        sample = ", a sample and **not the benchmark**" if facts.get("is_sample") else ""
        return (
            f"{where}, split `{facts['split']}`, {facts['examples']:,} questions{sample}, SHA-256 "
            f"`{facts['sha256']}`"
        )

    def base_text(self) -> str:
        """What the policy was made from."""
        if self.config.model == TINY:
            return "none: a small transformer with random weights, taught by the task's scripted expert"
        local = ", a local folder" if Path(self.config.model).is_dir() else ""
        return f"`{public_name(self.config.model)}`{local}"

    def versions_text(self) -> str:
        """Section on packages and commit, as of the run's start."""
        versions, git = self.manifest["versions"], self.manifest.get("git")
        shown = ", ".join(f"{name} {version}" for name, version in versions.items())
        changed = ", with changes" if git and git["dirty"] else ""
        commit = f" Code at commit `{git['commit']}`{changed}." if git else ""
        return f"## Versions\n\nAt the start of the run: {shown}.{commit}"


def front_matter(data: Any) -> str:
    """The head of a card from huggingface_hub's ``CardData``."""
    return f"---\n{data.to_yaml()}\n---"


def hub_name(facts: Mapping[str, Any]) -> str | None:
    """The data set on the hub that the facts are about, if it is one."""
    source = str(facts.get("source", ""))
    return source[len(HUB) :].partition(":")[0] if source.startswith(HUB) else None


def public_name(name: str) -> str:
    """A hub name as it is; of a path on this machine only its last part, for others have no use for the rest."""
    path = Path(name)
    return path.name if not name.startswith(HUB) and (path.is_absolute() or path.exists()) else name


def figure(value: float | None) -> str:
    """Three digits after the point, or nothing."""
    return "" if value is None else f"{value:.3f}"
