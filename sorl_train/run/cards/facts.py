"""Facts about a run for the cards of its policies and trajectories, and the parts that both cards have.

Everything comes from the run's settings, manifest and metrics; a figure that the run does not have is left out. Cards
have no times and no paths of this machine, so that a run that was killed and resumed writes the same cards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sorl_env.task import Task
from sorl_train.config.find_algorithm import short_name
from sorl_train.config.settings import TINY, TrainConfig
from sorl_train.run.files import read_jsonl
from sorl_train.run.folder import RunDir

CARD = "README.md"
HUB = "hf:"


@dataclasses.dataclass(frozen=True)
class CardRun:
    """The run that a card is written about."""

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
        """The algorithm, or supervised fine-tuning."""
        return "supervised fine-tuning" if self.config.stage == "sft" else short_name(self.config.algo)

    @property
    def task_text(self) -> str:
        """The task's name and description."""
        return f"`{self.task.name}`" + (f": {self.task.description}" if self.task.description else "")

    @property
    def decoding(self) -> str:
        """How answers are decoded in its evaluations."""
        temperature = self.config.eval.temperature
        return "greedy" if temperature == 0 else f"sampled at temperature {temperature:g}"

    def evaluations(self, step: int) -> list[Mapping[str, Any]]:
        """The metrics of the evaluation before training, and of the newest one up to ``step``."""
        found = [line for line in self.metrics if "eval/success" in line and line["step"] <= step]
        return found[:1] + found[1:][-1:]

    def questions(self, step: int) -> int | None:
        """The number of questions in the evaluation of ``step``; None if its trajectories were deleted."""
        path = self.folder.trajectories / f"eval_{step:06d}.jsonl"
        if not path.is_file():
            return None
        with path.open("rb") as file:
            return sum(1 for _ in file)

    def data(self, name: str) -> Mapping[str, Any]:
        """The manifest's facts about the data for ``train`` or ``eval``; empty if there are none."""
        facts: Mapping[str, Any] = self.manifest.get("data", {}).get(name, {})
        return facts

    def data_text(self, name: str) -> str:
        """The facts of ``data`` as text."""
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
        """What training started from."""
        if self.config.model == TINY:
            return "none: a small transformer with random weights, taught by the task's scripted expert"
        local = ", a local folder" if Path(self.config.model).is_dir() else ""
        return f"`{public_name(self.config.model)}`{local}"

    def versions_text(self) -> str:
        """A section on packages and commit at the start of the run."""
        versions, git = self.manifest["versions"], self.manifest.get("git")
        shown = ", ".join(f"{name} {version}" for name, version in versions.items())
        changed = ", with changes" if git and git["dirty"] else ""
        commit = f" Code at commit `{git['commit']}`{changed}." if git else ""
        return f"## Versions\n\nAt the start of the run: {shown}.{commit}"


def front_matter(data: Any) -> str:
    """The YAML head of a card, from huggingface_hub's ``CardData``."""
    return f"---\n{data.to_yaml()}\n---"


def hub_name(facts: Mapping[str, Any]) -> str | None:
    """The name of the data set that the facts are about, if it is on the hub."""
    source = str(facts.get("source", ""))
    return source[len(HUB) :].partition(":")[0] if source.startswith(HUB) else None


def public_name(name: str) -> str:
    """A hub name as it is; of a path on this machine only the last part, as the rest means nothing elsewhere."""
    path = Path(name)
    return path.name if not name.startswith(HUB) and (path.is_absolute() or path.exists()) else name


def figure(value: float | None) -> str:
    """A figure with three digits after the point; empty for None."""
    return "" if value is None else f"{value:.3f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
