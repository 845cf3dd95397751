"""The cards of a run's policies: a template that huggingface_hub fills in.

Everything comes from the run's settings, manifest and metrics; a figure that the run does not have is left out. Cards
have no times and no paths of this machine, so that a run that was killed and resumed writes the same cards.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sorl_env.task import Task
from sorl_env.text import format_number, markdown_table
from sorl_train.config.files import config_hash
from sorl_train.config.find_algorithm import short_name
from sorl_train.config.settings import TINY, TrainConfig
from sorl_train.run.files import atomic_write, read_jsonl
from sorl_train.run.folder import RunDir

CARD = "README.md"
_TEMPLATE = Path(__file__).with_name("card.md.jinja")
_HUB = "hf:"
_MEDICAL = ("alphamed19k", "bioasq", "medmcqa", "medqa", "medxpertqa", "mmlu_medical", "pubmedqa")
_FIGURES = {
    "eval/success": "success",
    "eval/search_off_success": "success, search finds nothing",
    "eval/valid_turn_rate": "turns in the format",
    "eval/num_turns": "turns a question",
}


def write_policy_card(
    folder: Path, run_dir: RunDir, config: TrainConfig, task: Task, step: int, *, best: bool
) -> None:
    """Write the card of the policy in ``folder``, which is that of training step ``step``.
    ``best``: it is kept because its evaluation is the best so far."""
    from huggingface_hub import ModelCard, ModelCardData

    manifest = run_dir.read_manifest()
    method = "supervised fine-tuning" if config.stage == "sft" else short_name(config.algo)
    data, git = manifest.get("data", {}), manifest.get("git")
    versions = ", ".join(f"{name} {version}" for name, version in manifest["versions"].items())
    if git:
        versions += f". Code at commit `{git['commit']}`" + (", with changes" if git["dirty"] else "")
    asked, trained_on = data.get("eval", {}), _hub_name(data.get("train", {}))
    lines = read_jsonl(run_dir.metrics)
    evaluations = [line for line in lines if "eval/success" in line and line["step"] <= step]
    which = "The best checkpoint so far, of" if best else "The checkpoint after"
    tools = ", ".join(f"`{name}`" for name in asked.get("tools", data.get("train", {}).get("tools", {})))
    source, is_tiny = str(asked.get("source", "embedded")), config.model == TINY
    tags = "`<think>`, then the block of a tool or `<answer>`, and replies in `<information>`"
    calls = "the tool calls of its own chat template, one in a message, and an answer alone in the last one"
    card = ModelCard.from_template(
        ModelCardData(
            model_name=f"{task.name}-{method.replace(' ', '-')}-s{config.seed}-step{step}",
            base_model=None if is_tiny or Path(config.model).is_dir() else config.model,
            datasets=[trained_on] if trained_on else None,
            library_name="transformers",
            pipeline_tag="text-generation",
            license="unknown" if is_tiny else "other",
            license_name=None if is_tiny else "as-the-base-model",
            language=["en"],
            tags=["sorl", "tool-use", "reinforcement-learning" if config.stage == "rl" else "sft", task.name],
        ),
        template_path=str(_TEMPLATE),
        is_tiny=is_tiny,
        title=f"{method} on {task.name}",
        about=f"{which} step {step}: a language model that answers in several turns"
        + (f" and calls tools in between ({tools})" if tools else "")
        + ", trained with sorl.",
        facts=_facts(manifest, config, method, task, step),
        figures=_evaluated(run_dir, evaluations[:1] + evaluations[1:][-1:], step),
        best=best,
        is_sample=asked.get("is_sample"),
        options=shlex.join(usage_options(config)),
        data_option=""
        if source == "embedded"
        else f" --data {source if source.startswith(_HUB) else 'QUESTIONS'}",
        format=tags if config.format == "tags" else calls,
        versions=versions,
        decoding=f"sampled at temperature {config.eval.temperature:g}"
        if config.eval.temperature
        else "greedy",
        is_medical=task.name in _MEDICAL,
    )
    atomic_write(folder / CARD, f"{card}\n")


def usage_options(config: TrainConfig) -> list[str]:
    """Options of ``sorl-ask``, ``sorl-eval`` and ``sorl-serve-agent`` with a run's settings, for those who have only
    the policy. What only the run's author has (a server, a corpus) is a name in capitals."""
    search = config.search
    options = {
        "task": _public_name(config.task),
        **{f"task_args.{name}": json.dumps(value) for name, value in config.task_args.items()},
        **{f"limits.{name}": value for name, value in dataclasses.asdict(config.limits).items()},
        "search.url": "RETRIEVAL_SERVER" if search.url else None,
        "search.corpus": "PASSAGES" if search.corpus else None,
        "search.top_k": search.top_k if search.top_k != 3 else None,
        "format": config.format if config.format != "tags" else None,
        "chat_template": None if config.chat_template else "false",
    }
    given = [(f"--{name}", str(value)) for name, value in options.items() if value is not None]
    given += [("--tools", "MCP_SERVER")] * len(config.tools or ())
    return [word for option in given for word in option]


def _facts(manifest: Mapping[str, Any], config: TrainConfig, method: str, task: Task, step: int) -> str:
    """A table of the settings that matter most, and of those that a resume has changed."""
    base = f"`{_public_name(config.model)}`" + (", a local folder" if Path(config.model).is_dir() else "")
    if config.model == TINY:
        base = "none: a small transformer with random weights, taught by the task's scripted expert"
    sft, data, resumes = config.sft, manifest.get("data", {}), manifest.get("resumes", [])
    changes = [c for resume in resumes for c in resume["changes"] if c.startswith(("eval.", "update."))]
    source = f"`{_public_name(sft.demos)}`" if sft.demos else "the task's scripted expert"
    steps, rate = f"{sft.steps}, of {sft.batch_size} demonstrations of {source}", sft.lr
    if config.stage == "rl":
        steps = f"{step} of {config.update.steps}, of {config.rollout.batch_size} trajectories"
        rate = config.optim.lr
    facts = {
        "base model": base,
        "task": f"`{task.name}`" + (f": {task.description}" if task.description else ""),
        "training data": _data_text(data.get("train")),
        "evaluation data": _data_text(data.get("eval")),
        "method": method,
        "steps": steps,
        "rate": f"{rate:g}",
        "all settings": f"`config.yaml` of the run, whose settings have the SHA-256 `{config_hash(config)}`",
        "changed on the way": ", ".join(changes),
        "seed": str(config.seed),
    }
    return markdown_table(("", ""), [(name, text) for name, text in facts.items() if text])


def _evaluated(run_dir: RunDir, evaluations: Sequence[Mapping[str, Any]], step: int) -> str:
    names = [name for name in _FIGURES if any(line.get(name) is not None for line in evaluations)]
    rows = []
    for line in evaluations:
        at = line["step"]
        whose = "this policy" if at == step else "before training" if at == 0 else "an earlier policy"
        asked = run_dir.trajectories / f"eval_{at:06d}.jsonl"  # unless these were deleted
        count = str(asked.read_bytes().count(b"\n")) if asked.is_file() else ""
        rows.append((f"{at}, {whose}", count, *(format_number(line.get(name), missing="") for name in names)))
    return markdown_table(("step", "questions", *(_FIGURES[name] for name in names)), rows) if rows else ""


def _data_text(facts: Mapping[str, Any] | None) -> str:
    if not facts:
        return ""
    source = str(facts["source"])
    where = "embedded in the task" if source == "embedded" else f"`{_public_name(source)}`"
    sample = ", a sample and **not the benchmark**" if facts.get("is_sample") else ""
    return f"{where}, split `{facts['split']}`, {facts['examples']:,} questions{sample}, SHA-256 `{facts['sha256']}`"


def _hub_name(facts: Mapping[str, Any]) -> str | None:
    source = str(facts.get("source", ""))
    return source[len(_HUB) :].partition(":")[0] if source.startswith(_HUB) else None


def _public_name(name: str) -> str:
    """A hub name as it is; of a path on this machine only the last part, as the rest means nothing elsewhere."""
    path = Path(name)
    return path.name if not name.startswith(_HUB) and (path.is_absolute() or path.exists()) else name
