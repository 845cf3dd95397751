"""The environments of a run, made from its config."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from sorl_env.envs.text_env import TextEnv, open_env, require_tool_env
from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.outside import ask_for_prompt
from sorl_env.task import Example, Limits, Task, ToolSettings
from sorl_env.task.data import ExampleSet, load_examples
from sorl_env.task.import_file import own_code
from sorl_env.task.registry import load_task
from sorl_env.tool import ToolReply
from sorl_env.tool.toolbox import Toolbox
from sorl_tools.index.index import hash_file
from sorl_train.config.find_algorithm import algorithm_facts
from sorl_train.config.settings import LimitsConfig, SearchConfig, TrainConfig
from sorl_train.run.folder import RunDir

# Endings of files that a person writes. Others that a task's argument names may be large, or written by the run.
_WRITTEN = (".py", ".json", ".jsonl", ".yaml", ".yml", ".toml", ".txt", ".md")


def make_env(config: TrainConfig, *, evaluation: bool = False) -> TextEnv:
    """The environment for training or for evaluation. Raises ``UserError`` for training on test questions, or with
    settings that the task or its examples do not fit (``refuse_unsuitable_task``)."""
    task = load_task(config.task, **config.task_args)
    env = open_env(
        task,
        data=(config.eval_data or config.data) if evaluation else config.data,
        split=config.eval.split if evaluation else config.split,
        tool_settings=tool_settings(config.search, config.tools),
        limits=limits(task, config.limits),
        format=config.format,
    )
    if config.eval.search_off and not isinstance(env, ToolUseEnv):
        raise UserError(
            f"eval.search_off: task {task.name} has no tools that could be switched off; give --eval.search_off false"
        )
    if not evaluation:
        refuse_test_questions(env.examples)
        refuse_unsuitable_task(config, env)
    return env


def training_examples(config: TrainConfig) -> Sequence[Example]:
    """The examples to train on, without making an environment and its tools. Raises as ``make_env`` does."""
    task = load_task(config.task, **config.task_args)
    examples = load_examples(task, config.data, config.split)
    refuse_test_questions(examples)
    return examples.examples


def refuse_test_questions(examples: ExampleSet) -> None:
    """Raise ``UserError`` when the examples to train on are test questions, whatever their split is called."""
    if examples.is_test:
        raise UserError(
            f"split {examples.split!r} of {examples.source} contains test questions (their column 'split' is 'test'); "
            "training on them is refused. Choose another split or file"
        )


def refuse_unsuitable_task(config: TrainConfig, env: TextEnv) -> None:
    """Raise ``UserError`` where settings ask for what the task or its examples do not have."""
    if config.stage != "rl":
        return
    task, limit, examples = env.task, env.limits.max_trajectory_tokens, len(env.examples.examples)
    # it would be GRPO by another name
    if config.algorithm.advantage == "turn_group" and task.turn_reward is None:
        raise UserError(
            f"algo {config.algo} compares the rewards of turns, but task {task.name} gives none (Task.turn_reward): "
            "minihop gives them with --task_args.hit_reward 0.5; for other tasks see docs/add_a_task.md, or use algo "
            "grpo or gigpo, which need none"
        )
    buffer = config.overlong.buffer
    if buffer is not None and buffer >= limit:  # no trajectory would be unpunished
        raise UserError(
            f"overlong.buffer {buffer} must be below the {limit} tokens that task {config.task} allows a trajectory: "
            "choose a shorter one, or set limits.max_trajectory_tokens"
        )
    prompts = config.rollout.batch_size // config.rollout.group_size
    if config.replay.size and config.update.steps * prompts <= examples:
        raise UserError(
            f"replay.size {config.replay.size}: nothing would ever be replayed, because {config.update.steps} training "
            f"steps (update.steps) of {prompts} questions ask none of the {examples} questions twice. Take more steps "
            "or fewer questions, or replay.size=0"
        )


def without_tools(env: TextEnv) -> ToolUseEnv:
    """The same environment, with tools that find nothing. Raises ``UserError`` if it is none with tools."""
    talking = require_tool_env(env, "eval.search_off")
    silent = talking.spawn()
    silent.toolbox = Toolbox(
        [SilentTool(tool.name, tool.description, tool.schema) for tool in talking.toolbox.tools]
    )
    return silent


def limits(task: Task, config: LimitsConfig) -> Limits:
    """The task's limits, overridden by those that the config sets."""
    given = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return dataclasses.replace(
        task.limits, **{name: value for name, value in given.items() if value is not None}
    )


def tool_settings(search: SearchConfig, tools: Sequence[str] | None) -> ToolSettings:
    """The settings of search and tools, in the form that a task's tools take."""
    given = dataclasses.asdict(search)
    return ToolSettings(search_url=given.pop("url"), tools=tuple(tools or ()), **given)


@dataclasses.dataclass(eq=False)
class SilentTool:
    """Stands in for a tool and finds nothing: what a policy still answers, it knew or guessed."""

    name: str
    description: str
    schema: Mapping[str, Any]
    inline: ClassVar[bool] = True

    def __call__(self, *_: Any, **__: Any) -> ToolReply:
        return ToolReply("Nothing found.", hits=0)


def source_facts(config: TrainConfig, task: Task, known: Collection[str] = ()) -> dict[str, str]:
    """SHA-256 of the files that a user can edit between a start and a resume, by name; empty where there are none. They
    are a task's own, texts and code that its arguments name, demonstrations, and those in the commands of MCP servers.
    For ``known`` see ``own_code``."""
    commands = [shlex.split(tool.partition(":")[2]) for tool in config.tools or ()]
    arguments = [value.partition(":")[0] for value in config.task_args.values() if isinstance(value, str)]
    words = [word for word in (*arguments, *itertools.chain(*commands)) if word.endswith(_WRITTEN)]
    named = [Path(word) for word in [*([config.sft.demos] if config.sft.demos else []), *words]]
    return own_code(task, known) | {path.name: hash_file(path) for path in named if _is_file(path)}


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # no path at all, but a text that is too long for one
        return False


def record_sources(config: TrainConfig, run_dir: RunDir, task: Task) -> None:
    """Record the ``source_facts`` of a run's start; at a resume, compare those that were recorded. Raises ``UserError``
    if a file has changed."""
    known = run_dir.read_manifest().get("sources")
    facts = source_facts(config, task, known or ())
    if known is not None:  # which modules are imported by now may differ
        facts = {name: facts[name] for name in known if name in facts}
    if facts or known:
        run_dir.record("sources", facts)


def record_facts(config: TrainConfig, run_dir: RunDir, env: TextEnv, eval_env: TextEnv) -> None:
    """Record what identifies a run's data, files and algorithm; ``UserError`` if a resume finds another one."""
    run_dir.record("data", {"train": env_facts(env), "eval": env_facts(eval_env)})
    record_sources(config, run_dir, env.task)
    if outside := algorithm_facts(config.algo):
        run_dir.record("algorithm", outside)


def env_facts(env: TextEnv) -> dict[str, Any]:
    """What identifies an environment, its data and its tools, as JSON values for manifests."""
    tools = env.toolbox.tools if isinstance(env, ToolUseEnv) else ()
    prompts = hashlib.sha256()
    for example in env.examples.examples:
        prompts.update(ask_for_prompt(env.task.name, env.task.prompt, example).encode() + b"\0")
    return {
        "task": env.task.name,
        "source": env.examples.source,
        "split": env.examples.split,
        "examples": len(env.examples.examples),
        "sha256": env.examples.sha256,
        "is_sample": env.examples.is_sample,
        "prompts_sha256": prompts.hexdigest(),
        "tools": {tool.name: getattr(tool, "fingerprint", None) for tool in tools},
        "limits": json.loads(json.dumps(dataclasses.asdict(env.limits))),
    }
