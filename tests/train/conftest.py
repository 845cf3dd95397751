"""A small MiniHop world, a tiny policy and a random one, made once a session."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.task.registry import load_task
from sorl_env.trajectory import Trajectory
from sorl_train.config.files import load_config
from sorl_train.config.settings import TrainConfig
from sorl_train.models.policy import load_policy, load_tokenizer
from sorl_train.run.folder import RunDir
from sorl_train.train_rl import run

WORLD = {"entities": 240, "lookalikes": 4, "train_questions": 48, "test_questions": 16, "hops": [1, 2]}

# A run of seconds: a few short trajectories, a tiny policy with a few supervised steps.
SHORT: dict[str, Any] = {
    "task_args": WORLD,
    "tiny.hidden_size": 48,
    "tiny.num_layers": 2,
    "tiny.num_heads": 4,
    "hardware.threads": 1,
    "sft.num_demos": 48,
    "sft.steps": 100,
    "sft.batch_size": 8,
    "sft.lr": 6e-3,
    "rollout.batch_size": 16,
    "update.steps": 2,
    "update.mini_batch_size": 8,
    "update.micro_batch_size": 8,
    "eval.num_examples": 8,
    "eval.num_examples_final": 8,
    "eval.every": 0,
    "log.tensorboard": False,
}


class QuietDisplay:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def start(self, title: str, steps: int, first_step: int = 0) -> None:
        self.messages.append(title)

    def step(self, step: int, metrics: Any) -> None: ...

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        yield lambda done: None

    def message(self, text: str) -> None:
        self.messages.append(text)

    def close(self, summary: Any = None) -> None: ...


def flags(settings: dict[str, Any]) -> list[str]:
    """The settings as words of a command line."""
    pairs = (
        (name, value if isinstance(value, str) else json.dumps(value)) for name, value in settings.items()
    )
    return [word for name, value in pairs for word in (f"--{name}", value)]


def weights_of(model: Any) -> torch.Tensor:
    """A copy of all parameters, one after the other."""
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def short_config(**overrides: Any) -> TrainConfig:
    """MiniHop with a tiny policy, shrunk to seconds; ``a__b=1`` overrides ``a.b``."""
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    shared = {name: value for name, value in SHORT.items() if name not in dotted}  # replaced, not merged
    return load_config("minihop", dotted, shared=shared)


def train_short(path: Path, resume: bool = False, **overrides: Any) -> tuple[RunDir, dict[str, Any]]:
    """Train with ``short_config`` in this process."""
    config = short_config(**overrides)
    run_dir = RunDir.resume(path, config)[0] if resume else RunDir.create(path, config)
    return run_dir, run(config, run_dir, QuietDisplay(), resume)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Cold starts are cached for the session, not in the user's folder."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SORL_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny policy with random weights."""
    from sorl_train.models.tiny import build_tiny_policy

    folder = tmp_path_factory.mktemp("tiny")
    build_tiny_policy(load_task("minihop", **WORLD), folder, hidden_size=48, num_layers=2, num_heads=4)
    return str(folder)


@pytest.fixture(scope="session")
def minihop_env() -> ToolUseEnv:
    return ToolUseEnv(load_task("minihop", **WORLD))


@pytest.fixture(scope="session")
def trajectories(tiny_folder: str, minihop_env: ToolUseEnv) -> list[Trajectory]:
    """Eight of the tiny policy, some with several turns."""
    from .rollout.test_sampler import roll

    found = roll(minihop_env, load_policy(tiny_folder), load_tokenizer(tiny_folder), 8)[0]
    assert any(len(t.turns) > 1 for t in found)
    return found


@pytest.fixture(scope="session")
def random_policy() -> tuple[Any, Any]:
    """A random model whose turns end in all three ways and whose draws hang on every token read, and its tokenizer."""
    words = ["<eos>", "<stop>", *(f"w{i}" for i in range(28))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval(), wrapped
