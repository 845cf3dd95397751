"""The card of a run's trajectories: a README, whose head tells Hugging Face's ``datasets`` how to load them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sorl_env.figures import markdown_table
from sorl_env.task import Task
from sorl_train.config.settings import TrainConfig
from sorl_train.run.cards.facts import CARD, CardRun, figure, front_matter
from sorl_train.run.files import atomic_write
from sorl_train.run.folder import RunDir

# configuration -> its split, its files, and the metric of their steps
_KINDS = {
    "sampled": ("train", "step_*.jsonl", "rollout/success"),
    "evaluation": ("test", "eval_*.jsonl", "eval/success"),
}
_COLUMNS = """## Use

```python
datasets.load_dataset("FOLDER", "sampled")
sorl_env.trajectory_io.read_jsonl("FOLDER/step_000001.jsonl")  # exact, as the run had them
```

A row is a trajectory. `token_ids`, `action_mask`, `turn_ids` and `rollout_log_probs` are aligned, one value a token;
`action_mask` is true for the policy's own tokens, and only those have a turn. `turns` holds the text, the parsed kind,
the observation, the rewards and the tool calls of each turn (mappings as JSON); `reward` and `stop_reason` are the
whole trajectory's. `step_*.tokens.jsonl.gz` have the figures of the loss for each token, for `sorl-view`."""
_LIMITS = """## Limits

The observations contain the passages that searches returned: whoever shares these files shares them too. The questions
of `evaluation` are held out, so nobody should train on them. What the policy wrote may be wrong."""
_LICENCE = """## Licence

The licences of the questions, of the passages and of the policy's base model apply to these files; they are not known
here. Read them before you share the files, then put yours into the head of this one."""


def write_trajectory_card(run_dir: RunDir, config: TrainConfig, task: Task) -> None:
    """Write the card of the trajectory files that the run has so far, unless it would be the same as before."""
    card = _text(CardRun.read(run_dir, config, task))
    path = run_dir.trajectories / CARD
    if not path.is_file() or path.read_text(encoding="utf-8") != card:
        atomic_write(path, card)


def _text(run: CardRun) -> str:
    files = {kind: sorted(run.folder.trajectories.glob(pattern)) for kind, (_, pattern, _) in _KINDS.items()}
    files = {kind: found for kind, found in files.items() if found}
    title = f"Trajectories of {run.method} on {run.task.name}"
    facts = {
        "policy at the start": run.base_text(),
        "task": run.task_text,
        "questions trained on": run.data_text("train"),
        "questions evaluated on": run.data_text("eval"),
        "seed": str(run.config.seed),
    }
    parts = [
        front_matter(_front(run, title, list(files))),
        f"# {title}",
        "What a policy wrote, turn by turn, and what its tools replied: as sampled in training (`sampled`), and when "
        f"it was evaluated on held-out questions (`evaluation`, {run.decoding}). Made with sorl.",
        _files_table(run, files),
        markdown_table(("", ""), [(name, text) for name, text in facts.items() if text]),
        _COLUMNS,
        _LIMITS,
        _LICENCE,
        run.versions_text(),
    ]
    return "\n\n".join(parts) + "\n"


def _front(run: CardRun, title: str, kinds: Sequence[str]) -> object:
    from huggingface_hub import DatasetCardData

    return DatasetCardData(
        pretty_name=title,
        license="unknown",
        language=["en"],
        task_categories=["question-answering", "text-generation"],
        tags=["sorl", "tool-use", run.task.name],
        configs=[
            {"config_name": kind, "data_files": [{"split": _KINDS[kind][0], "path": _KINDS[kind][1]}]}
            for kind in kinds
        ],
    )


def _files_table(run: CardRun, files: Mapping[str, Sequence[Path]]) -> str:
    rows = []
    for kind, found in files.items():
        first, last = (int(path.stem.rpartition("_")[2]) for path in (found[0], found[-1]))
        success = {line["step"]: line.get(_KINDS[kind][2]) for line in run.metrics}
        ends = [figure(success.get(step)) for step in (first, last)]
        rows.append((f"`{kind}`", f"`{_KINDS[kind][1]}`", f"{len(found)}, of steps {first} to {last}", *ends))
    head = ("configuration", "files", "how many", "success in the first", "success in the last")
    return markdown_table(head, rows)
