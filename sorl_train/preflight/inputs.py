"""What every run needs before its first step, checked by its start, ``--dry_run`` and ``sorl-doctor`` alike, and the
form of what such a check finds."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sorl_env.errors import UserError
from sorl_env.task.data import load_examples, read_rows
from sorl_env.task.registry import load_task
from sorl_train.config.run_settings import RolloutConfig
from sorl_train.config.settings import TINY, TrainConfig
from sorl_train.models.find_model import is_hub_name, require_model

if TYPE_CHECKING:
    from sorl_env.envs.text_env import TextEnv
    from sorl_env.task import Task
    from sorl_train.models.policy import ModelShape

UNASKED = "http://127.0.0.1:8301"  # an address that is given to tools and never asked


def check_settings(config: TrainConfig) -> None:
    """Raise ``UserError`` for settings that ask for what is not installed, or for what the engine cannot do."""
    from sorl_train.run.metrics_log import require_package

    for package, wanted, why in (
        ("tensorboard", config.log.tensorboard, "log.tensorboard=true"),
        ("wandb", config.log.wandb is not None, f"log.wandb={config.log.wandb}"),
        ("trackio", config.log.trackio is not None, f"log.trackio={config.log.trackio}"),
        ("vllm", config.engine == "local" and config.sampler.backend == "vllm", "sampler.backend=vllm"),
    ):
        if wanted:
            require_package(package, why)
    if config.sft.demos is not None and not sum(1 for _ in read_rows(config.sft.demos)):
        raise UserError(f"sft.demos={config.sft.demos}: it has no rows; give a file of demonstrations")
    if config.engine == "openrlhf":
        from sorl_train.openrlhf.engine_limits import check

        check(config)
    else:
        from sorl_train.models.forward import pick_device

        pick_device(config.hardware.device)


def check_inputs(config: TrainConfig) -> None:
    """The model's place, ``check_settings``, and the task and its data: every row is read."""
    from sorl_train.rollout.environments import training_examples

    if config.model != TINY and not is_hub_name(config.model):  # the hub is asked when the model is loaded
        require_model(config.model)
    check_settings(config)
    task = load_task(config.task, **config.task_args)
    training_examples(config)
    load_examples(task, config.eval_data or config.data, config.eval.split)


def repeats(rollout: RolloutConfig, examples: int) -> str:
    """A caution where one step asks the same question in several groups; empty where there are enough questions."""
    prompts = rollout.batch_size // rollout.group_size
    if prompts <= examples:
        return ""
    return (
        f"each step asks {prompts} prompts (rollout.batch_size / rollout.group_size) of {examples} questions, so it "
        f"asks a question {prompts / examples:.1f} times: lower rollout.batch_size, or give more --data"
    )


@contextmanager
def planned(config: TrainConfig) -> Iterator[tuple[list[TextEnv], Any]]:
    """The environments of training and evaluation, and the policy's tokenizer.

    A corpus is not indexed, and no server of a search tool is asked.
    """
    from sorl_train.models.policy import load_tokenizer
    from sorl_train.models.tiny import tiny_tokenizer
    from sorl_train.rollout.environments import make_env

    # with an address even for a corpus, which would be indexed now
    url = config.search.url or (UNASKED if config.search.corpus else None)
    search = dataclasses.replace(config.search, url=url, corpus=None, cache=None)
    asking_nobody = dataclasses.replace(config, search=search)
    with ExitStack() as opened:
        envs = [
            opened.enter_context(closing(make_env(asking_nobody, evaluation=role))) for role in (False, True)
        ]
        if config.model == TINY:
            yield envs, tiny_tokenizer(envs[0].task, format=config.format)
        else:
            yield envs, load_tokenizer(config.model)


def planned_shape(config: TrainConfig, vocabulary: int) -> ModelShape:
    """The sizes of the policy, whose tokenizer has ``vocabulary`` words if it is tiny."""
    from sorl_train.models.policy import model_shape
    from sorl_train.models.tiny import tiny_shape

    if config.model == TINY:
        return tiny_shape(vocabulary, **dataclasses.asdict(config.tiny), lora_rank=config.lora.rank)
    return model_shape(config.model, config.lora.rank)


_WIDTH = 110


@dataclass(frozen=True)
class Finding:
    """What a check found; ``fix`` says what to do about it."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    fix: str = ""

    def as_text(self) -> str:
        """A line, with the fix indented below."""
        head = f"{self.status:<5} {self.name:<10} "
        lines = textwrap.wrap(self.detail, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
        if self.fix:
            arrow = " " * len(head) + "-> "
            lines += textwrap.wrap(self.fix, _WIDTH, initial_indent=arrow, subsequent_indent=" " * len(arrow))
        return "\n".join(lines)


@dataclass
class PreflightContext:
    """What is known of the run. Checks fill in the last three attributes, on which later ones build.

    The server at ``search.url`` should serve the folder ``index``. A ``new`` run begins a folder of its own, in which
    no other run may be.
    """

    config: TrainConfig
    index: Path | None = None
    new: bool = True
    task: Task | None = None
    shape: ModelShape | None = None
    failed: bool = False
