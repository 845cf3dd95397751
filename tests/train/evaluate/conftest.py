"""A small MiniHop world, a run with a cold-started tiny policy, and one that plays the task's expert."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.rollout import RolloutSettings, SampledTurn, SamplingParams
from sorl_env.task.registry import load_task
from sorl_train.config.files import load_config
from sorl_train.evaluate.runner import Policy
from sorl_train.models.tiny import task_texts, word_tokenizer
from sorl_train.run.display import Display
from sorl_train.run.folder import RunDir
from sorl_train.train_rl import run

WORLD = {"entities": 240, "lookalikes": 4, "train_questions": 96, "test_questions": 64, "hops": [1, 2]}
# large enough to learn from, for a policy of the quickstart's size
LARGER = {"entities": 1500, "lookalikes": 8, "train_questions": 1200, "test_questions": 64, "hops": [1, 2]}
SETTINGS: dict[str, Any] = {
    "task_args": {**WORLD, "hasty": 0.0},
    "tiny": {"hidden_size": 48, "num_layers": 2, "num_heads": 4},
    "hardware.threads": 1,
    "sft.num_demos": 96,
    "sft.steps": 150,
    "sft.batch_size": 8,
    "sft.lr": 6e-3,
    "rollout.batch_size": 16,
    "update.steps": 1,
    "update.mini_batch_size": 16,
    "optim.lr": 1e-6,
    "eval.num_examples_final": 8,
    "log.tensorboard": False,
}


def make_run(path: Path, cache: Path, **overrides: Any) -> Path:
    """Train one step on the small world; ``a__b`` overrides ``a.b``."""
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    with pytest.MonkeyPatch.context() as patch, Path(os.devnull).open("w") as nowhere:
        patch.setenv("SORL_CACHE", str(cache))
        # replaced, not merged
        shared = {name: value for name, value in SETTINGS.items() if name not in dotted}
        config = load_config("minihop", dotted, shared=shared)
        run_dir = RunDir.create(path, config)
        run(config, run_dir, Display(nowhere), False)
    return run_dir.path


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose policy has hardly left its random weights: it answers nothing, fast."""
    folder = tmp_path_factory.mktemp("random")
    return make_run(folder / "small", folder, sft__steps=1)


@pytest.fixture(scope="session")
def cold_started_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose small policy has learned the format, and now and then an answer."""
    folder = tmp_path_factory.mktemp("cold")
    return make_run(folder / "run", folder)


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a cold start: its policy searches, and answers some questions."""
    folder = tmp_path_factory.mktemp("trained")
    settings = {"sft__num_demos": 1200, "sft__steps": 260, "sft__batch_size": 16, "sft__lr": 4e-3}
    world = {**LARGER, "hasty": 0.0}
    return make_run(folder / "trained", folder, task_args=world, tiny={}, **settings)


@pytest.fixture(scope="session")
def minihop() -> ToolUseEnv:
    return ToolUseEnv(load_task("minihop", **WORLD), split="test")


class Expert:
    """A sampler that plays the task's scripted expert, who reads the observations out of the tokens."""

    def __init__(self, env: ToolUseEnv, tokenizer: Any) -> None:
        self.env = env
        self.tokenizer = tokenizer
        self.most_in_flight = 0
        self._sessions: set[str] = set()

    async def generate(self, session: str, token_ids: Sequence[int], params: SamplingParams) -> SampledTurn:
        self._sessions.add(session)
        self.most_in_flight = max(self.most_in_flight, len(self._sessions))
        _, _, index, _ = session.split("/")
        example = self.env.examples.examples[int(index)]
        text = self.tokenizer.decode(token_ids)
        # the tokenizer puts blanks around marks; the expert reads titles as the tool writes them
        seen = [
            re.sub(r"Doc (\d+) \( (.*?) \) :", r"\nDoc \1 (\2):", block)
            for block in re.findall(r"<information>(.*?)</information>", text, re.DOTALL)
        ]
        assert self.env.task.expert is not None
        ids = self.tokenizer.encode(self.env.task.expert(example, seen), add_special_tokens=False)
        return SampledTurn(ids, [0.0] * len(ids), "stop")

    def release(self, session: str) -> None:
        self._sessions.discard(session)


@pytest.fixture(scope="session")
def tokenizer(minihop: ToolUseEnv) -> Any:
    return word_tokenizer(task_texts(minihop.task, 64), 4096)


@pytest.fixture
def expert(minihop: ToolUseEnv, tokenizer: Any) -> Policy:
    settings = RolloutSettings(temperature=0.0, max_concurrency=4)
    return Policy(Expert(minihop, tokenizer), tokenizer, nullcontext, settings)
