"""The card of a saved policy: a Hugging Face model card beside its weights."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sorl_env.figures import markdown_table
from sorl_env.task import Task
from sorl_train.config.files import config_hash
from sorl_train.config.find_algorithm import short_name
from sorl_train.config.settings import TINY, TrainConfig
from sorl_train.run.cards.facts import CARD, HUB, CardRun, figure, front_matter, hub_name, public_name
from sorl_train.run.files import atomic_write
from sorl_train.run.folder import RunDir

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

    Args:
        best: the policy is kept because its evaluation is the best so far.
    """
    atomic_write(folder / CARD, _text(CardRun.read(run_dir, config, task), step, best))


def usage_options(config: TrainConfig) -> list[str]:
    """Options of ``sorl-ask``, ``sorl-eval`` and ``sorl-serve-agent`` with a run's settings, for those who have only
    the policy. What only the run's author has (a server, a corpus) is a name in capitals."""
    options = ["--task", public_name(config.task)]
    for name, value in config.task_args.items():
        options += [f"--task_args.{name}", json.dumps(value)]
    for name, value in dataclasses.asdict(config.limits).items():
        options += [] if value is None else [f"--limits.{name}", str(value)]
    for _ in config.tools or ():
        options += ["--tools", "MCP_SERVER"]
    if config.search.url:
        options += ["--search.url", "RETRIEVAL_SERVER"]
    if config.search.corpus:
        options += ["--search.corpus", "PASSAGES"]
    if config.search.top_k != 3:
        options += ["--search.top_k", str(config.search.top_k)]
    if config.format != "tags":
        options += ["--format", config.format]
    return options if config.chat_template else [*options, "--chat_template", "false"]


def _text(run: CardRun, step: int, best: bool) -> str:
    which = "The best checkpoint so far, of" if best else "The checkpoint after"
    tools = ", ".join(
        f"`{name}`" for name in run.data("eval").get("tools", run.data("train").get("tools", {}))
    )
    evaluations = run.evaluations(step)
    parts = [
        front_matter(_front(run, step, evaluations)),
        f"# {run.method} on {run.task.name}",
        f"{which} step {step}: a language model that answers in several turns"
        + (f" and calls tools in between ({tools})" if tools else "")
        + ", trained with sorl.",
        _facts(run, step),
        _evaluated(run, evaluations, step, best),
        _use(run),
        _limits(run),
        _licence(run.config),
        run.versions_text(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front(run: CardRun, step: int, evaluations: Sequence[Mapping[str, Any]]) -> object:
    from huggingface_hub import EvalResult, ModelCardData

    config, facts = run.config, run.data("eval")
    results = None
    if facts and evaluations and evaluations[-1]["step"] == step:  # else the figure is one of other weights
        asked = run.questions(step)
        results = [
            EvalResult(
                task_type="question-answering",
                dataset_type=hub_name(facts) or run.task.name,
                dataset_name=run.task.name,
                dataset_split=facts["split"],
                metric_type="success",
                metric_name=f"success, {run.decoding}" + (f", {asked} questions" if asked else ""),
                metric_value=evaluations[-1]["eval/success"],
            )
        ]
    is_tiny, trained_on = config.model == TINY, hub_name(run.data("train"))
    return ModelCardData(
        model_name=f"{run.task.name}-{run.method.replace(' ', '-')}-s{config.seed}-step{step}",
        base_model=None if is_tiny or Path(config.model).is_dir() else config.model,
        datasets=[trained_on] if trained_on else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        license="unknown" if is_tiny else "other",
        license_name=None if is_tiny else "as-the-base-model",
        language=["en"],
        tags=["sorl", "tool-use", "reinforcement-learning" if config.stage == "rl" else "sft", run.task.name],
        eval_results=results,
    )


def _facts(run: CardRun, step: int) -> str:
    config = run.config
    resumes = run.manifest.get("resumes", [])
    changes = [c for resume in resumes for c in resume["changes"] if c.startswith(("eval.", "update."))]
    facts = {
        "base model": run.base_text(),
        "task": run.task_text,
        "training data": run.data_text("train"),
        "evaluation data": run.data_text("eval"),
        **(_supervised(config) if config.stage == "sft" else _reinforced(config, step)),
        "seed": str(config.seed),
        "all settings": f"`config.yaml` of the run, whose settings have the SHA-256 `{config_hash(config)}`",
        "changed on the way": ", ".join(changes),
    }
    return markdown_table(("", ""), [(name, text) for name, text in facts.items() if text])


def _reinforced(config: TrainConfig, step: int) -> dict[str, str]:
    loss, optim, update, rollout = config.loss, config.optim, config.update, config.rollout
    algorithm = config.algorithm
    normalized = "no normalization"
    if algorithm.normalize:
        normalized = (
            f"the {loss.clip_bias_target} normalized by the {loss.clip_bias_norm} norm of the clipping bias above "
            f"{loss.clip_bias_delta:g}"
        )
    critic = f", the critic's {optim.critic_lr:g}" if algorithm.needs_critic else ""
    groups = "" if algorithm.needs_critic else f" in groups of {rollout.group_size}"
    how = f"ratio of a {algorithm.ratio}, {algorithm.advantage} advantages, {normalized}"
    return {
        "algorithm": f"`{short_name(config.algo)}`: {how}",
        "steps": f"{step} of {update.steps}, of {rollout.batch_size} trajectories{groups}",
        "updates": f"mini-batches of {update.mini_batch_size}, epochs over a rollout batch: {update.epochs}, lag of "
        f"{rollout.max_staleness} steps",
        "replay": _replay(config),
        "rates and weights": f"learning rate {optim.lr:g}{critic}; {_clip_range(config)}; KL {loss.kl_coef:g}",
        "sampling": f"temperature {config.sampler.temperature:g}, top-p {config.sampler.top_p:g}",
    }


def _replay(config: TrainConfig) -> str:
    """What of past trajectories was trained on; empty if nothing was."""
    replay = config.replay
    if not replay.size:
        return ""
    what = (
        "past successes where all rollouts failed" if replay.mode == "success" else "the newest past rollouts"
    )
    return f"{what}: at most {replay.per_group} in a group, at most {replay.max_age} steps old"


def _clip_range(config: TrainConfig) -> str:
    """The clip range, and the temperatures of an algorithm that has a gate instead."""
    loss = config.loss
    above = "" if loss.clip_eps_high is None else f" below and {loss.clip_eps_high:g} above"
    gate = ""
    if config.algorithm.surrogate_name == "sapo":
        gate = f"; temperatures of the gate {loss.sapo_tau_pos:g} and {loss.sapo_tau_neg:g}"
    return f"clip range {loss.clip_eps:g}{above}{gate}"


def _supervised(config: TrainConfig) -> dict[str, str]:
    sft = config.sft
    source = f"of `{public_name(sft.demos)}`" if sft.demos else "of the task's scripted expert"
    return {
        "steps": f"{sft.steps}, of {sft.batch_size} demonstrations {source}",
        "learning rate": f"{sft.lr:g} at its peak",
    }


def _evaluated(run: CardRun, evaluations: Sequence[Mapping[str, Any]], step: int, best: bool) -> str:
    if not evaluations:
        return ""
    names = [name for name in _FIGURES if any(line.get(name) is not None for line in evaluations)]
    rows = []
    for line in evaluations:
        at: int = line["step"]
        whose = "this policy" if at == step else "before training" if at == 0 else "an earlier policy"
        figures = [figure(line.get(name)) for name in names]
        rows.append((f"{at}, {whose}", str(run.questions(at) or ""), *figures))
    split = run.data("eval").get("split", run.config.eval.split)
    notes = (
        f"Answers are {run.decoding}, questions are of split `{split}`. Success is the share of questions whose "
        "rewards add up to 1; those that a tool's outage ended are left out."
    )
    if best:
        notes += (
            " This policy was chosen by its figure on these questions, which makes that figure somewhat too good: "
            "evaluate it on others before you compare it."
        )
    if run.data("eval").get("is_sample"):
        notes += " The questions are a sample embedded in the task, **not the benchmark**."
    head = ("step", "questions", *(_FIGURES[name] for name in names))
    return f"## Figures\n\n{markdown_table(head, rows)}\n\n{notes}"


def _use(run: CardRun) -> str:
    options = shlex.join(usage_options(run.config))
    source = str(run.data("eval").get("source", "embedded"))
    data = "" if source == "embedded" else f" --data {source if source.startswith(HUB) else 'QUESTIONS'}"
    return f"""## Use

With this folder as `POLICY`, where sorl is installed with its extra `train`:

```sh
sorl-ask "a question" --model POLICY {options}
sorl-eval POLICY --mode agent {options}{data}
sorl-serve-agent --model POLICY {options}
```

It is a plain transformers folder, so `vllm serve POLICY` loads it, too. Whoever talks to that server has to answer the
tool calls; `sorl-serve-agent --endpoint` does."""


def _limits(run: CardRun) -> str:
    written = (
        "`<think>`, then the block of a tool or `<answer>`, and replies in `<information>`"
        if run.config.format == "tags"
        else "the tool calls of its own chat template, one in a message, and an answer alone in the last one"
    )
    lines = [
        f"It was trained for one format: {written}. Without a loop that answers its calls it stops at the first one, "
        "or makes up the reply.",
        "Its figures are of the questions and passages above, of one run with one seed.",
        "What it answers may be wrong, and so may what it says it has read.",
    ]
    if run.task.name in _MEDICAL:
        lines.append(
            "**Nothing that it says is medical advice.** It was made to study how to train such models."
        )
    return "## Limits\n\n" + "\n".join(f"- {line}" for line in lines)


def _licence(config: TrainConfig) -> str:
    if config.model == TINY:
        text = "The weights were made from random ones. Nobody has chosen a licence for them yet."
    else:
        text = (
            "These weights were made from those of the base model, whose licence counts for them and is not known "
            "here. Read it before you share them, then put it into the head of this file."
        )
    return f"## Licence\n\n{text}"
