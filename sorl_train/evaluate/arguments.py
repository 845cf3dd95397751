"""The options that ``sorl-eval``, ``sorl-ask`` and ``sorl-serve-agent`` share, and what they make of them: the policy
and the environments.

What is a setting of ``sorl-train``, too, has the same name here, the same form of value and the same checks.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sorl_env.commands.command import Parser, number, seed, whole
from sorl_env.envs.text_env import TextEnv, open_env, require_tool_env
from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.errors import UserError, did_you_mean, http_address
from sorl_env.rollout import RolloutSettings
from sorl_env.task.registry import load_task, task_names
from sorl_train.config.files import value_from_text, with_overrides
from sorl_train.config.schema import fields
from sorl_train.config.settings import TrainConfig
from sorl_train.evaluate.endpoint import EndpointSampler, TextTokenizer
from sorl_train.evaluate.find_policy import PolicySource, find_policy, fingerprint
from sorl_train.evaluate.runner import Policy
from sorl_train.rollout.environments import limits, tool_settings

API_KEY = "SORL_API_KEY"  # not an option, because the manifest keeps the command line
_KNOBS = "task_args"
# settings of sorl-train that these commands have, too, or how their names begin
_SETTINGS = ("tools", "format", "chat_template", "limits.", "search.", "hardware.")
_UNUSED = "hardware.gradient_checkpointing"
_OF_A_TASK = ("data", "search.corpus", "search.url")  # options that may differ between several tasks


def make_parser(prog: str, **settings: Any) -> Parser:
    """A parser to which `add_options` can be added. Its help fits a screen: settings that ``sorl-train`` has, too, are
    explained there."""
    formatter: Any = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=28)
    return Parser(prog=prog, mappings=(_KNOBS,), formatter_class=formatter, **settings)


def add_one_task_options(parser: argparse.ArgumentParser) -> None:
    """Add all options of a command that has one policy and one task."""
    parser.add_argument("--model", help="a model folder, checkpoint, run folder or hub name")
    parser.add_argument("--task", help="the task whose prompt, tools and limits to use (default: the run's)")
    add_options(parser)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what the environments are built from, where the policy is, and how it samples."""
    add = parser.add_argument_group("data and tools; with several tasks write NAME=VALUE").add_argument
    about = "questions: a file, a folder, or hf:owner/name"
    add("--data", nargs="+", default=[], metavar="WHERE", help=about)
    add("--split", help="of the data (default: the run's, or test)")
    add("--search.corpus", nargs="+", default=[], metavar="FILE", help="passages for search in this process")
    add("--search.url", nargs="+", default=[], metavar="URL", help="a retrieval server, instead of a corpus")
    about = f"{' '.join(f'--{name}' for name in _SETTINGS)}\n(sorl-train --help all explains them)"
    add = parser.add_argument_group("settings as in sorl-train", about).add_argument
    knob = f"an argument of the task; of one of several: {_KNOBS}.NAME.KEY"
    add(f"--{_KNOBS}.KEY", metavar="YAML", help=knob)
    for field in fields():
        if field.name.startswith(_SETTINGS) and field.name not in (*_OF_A_TASK, _UNUSED):
            # a bare --flag is true
            switch: Any = {"nargs": "?", "const": "true"} if field.type is bool else {}
            add(f"--{field.name}", metavar=field.metavar, help=argparse.SUPPRESS, **switch)
    add = parser.add_argument_group("a served model, instead of a local one").add_argument
    url = f"an OpenAI-compatible API, with ${API_KEY} as its bearer token"
    add("--endpoint", metavar="URL", help=url)
    add("--model_name", metavar="NAME", help="the model's name on that server")
    tokenizer = "the model's tokenizer: prompts are then sent as token ids, otherwise as plain text"
    add("--tokenizer", metavar="FOLDER", help=tokenizer)
    timeout = number(above=0, high=86400)
    about = "seconds for a turn with its retries (default: 600)"
    add("--timeout_s", type=timeout, metavar="S", help=about)
    add = parser.add_argument_group("sampling").add_argument
    greedy = "0 is greedy (default: 0; 1 with --samples)"
    add("--sampler.temperature", dest="temperature", type=number(0, 100), metavar="T", help=greedy)
    nucleus = "sample from the most likely tokens with this much probability (default: 1, all tokens)"
    share = number(above=0, high=1)
    add("--sampler.top_p", dest="top_p", type=share, default=1.0, metavar="P", help=nucleus)
    rows = "questions in flight (default: 32)"
    count = whole(1, 65536)
    add("--sampler.max_concurrency", dest="concurrency", type=count, default=32, metavar="N", help=rows)
    add(
        "--seed", type=seed, default=0, metavar="N", help="chooses the questions and the samples (default: 0)"
    )


def _given(args: argparse.Namespace, prefix: str) -> dict[str, Any]:
    texts = {name: text for name, text in vars(args).items() if name.startswith(prefix)}
    return {name: value_from_text(name, text) for name, text in texts.items() if isinstance(text, str)}


def find_source(args: argparse.Namespace, model: str | None) -> PolicySource | None:
    """The local policy that the options name, or None for a served one. Raises ``UserError`` if the options name
    neither a local nor a served policy, or both, or for a local one what only a served one has."""
    if args.endpoint and model:
        raise UserError(f"both a model ({model}) and --endpoint {args.endpoint}: give one of them")
    if args.endpoint:
        if not args.model_name:
            raise UserError("--endpoint needs --model_name, the model's name on that server")
        http_address(args.endpoint, "--endpoint", "http://127.0.0.1:8000/v1")
        return None
    for name in ("model_name", "tokenizer", "timeout_s"):
        if (value := getattr(args, name)) is not None:
            raise UserError(f"--{name} {value} is for a served model: give --endpoint URL, or leave it out")
    if not model:
        raise UserError(
            "give a model folder, a checkpoint, a run folder, or --endpoint URL --model_name NAME"
        )
    return find_policy(model)


def policy_facts(args: argparse.Namespace, source: PolicySource | None) -> dict[str, Any]:
    """What identifies the policy in the settings of an evaluation."""
    if source is not None:
        return dict(fingerprint(source.folder))
    known = dict(fingerprint(args.tokenizer)) if args.tokenizer else "none: counts of tokens are estimates"
    return {"served": args.model_name, "tokenizer": known}


def rollout_settings(args: argparse.Namespace, source: PolicySource | None) -> RolloutSettings:
    """How turns are sampled. By default a policy is prompted as in training: with a chat template or without."""
    trained = source.config if source is not None and source.config else TrainConfig()
    given = _given(args, "chat_template")
    return RolloutSettings(
        temperature=args.temperature or 0.0,
        top_p=args.top_p,
        use_chat_template=with_overrides(trained, given).chat_template,
        max_concurrency=args.concurrency,
    )


def make_policy(args: argparse.Namespace, source: PolicySource | None, envs: Iterable[TextEnv]) -> Policy:
    """Load the model and check it on the longest trajectory of ``envs`` (see ``model_check``), or prepare the client of
    a served one. Only the former, or a tokenizer, imports torch and transformers. Raises ``UserError`` if the model
    cannot be loaded, or our sampler would not compute what the model itself computes."""
    settings = rollout_settings(args, source)
    if source is None:
        return _served_policy(args, settings)
    import torch
    from transformers.utils import logging as transformers_logging

    from sorl_train.models.policy import load_policy, load_tokenizer
    from sorl_train.rollout.model_check import check_policy, try_packing
    from sorl_train.rollout.sampler import TransformersSampler

    transformers_logging.disable_progress_bar()
    hardware = with_overrides(TrainConfig(), _given(args, "hardware.")).hardware
    if hardware.threads:
        torch.set_num_threads(hardware.threads)
    tokenizer = load_tokenizer(source.folder)
    model = load_policy(source.folder, hardware.device)
    longest = max(env.limits.max_trajectory_tokens for env in envs)
    check_policy(model, longest, sampled=True, trained=False)
    try_packing(model, longest, sampled=True)  # a model that cannot is sampled with its own attention
    local = TransformersSampler(model, tokenizer, settings.max_concurrency, hardware.dtype)
    return Policy(local, tokenizer, local.session, settings)


def _served_policy(args: argparse.Namespace, settings: RolloutSettings) -> Policy:
    tokenizer: Any = TextTokenizer()
    if args.tokenizer:
        from sorl_train.models.policy import load_tokenizer

        tokenizer = load_tokenizer(args.tokenizer)
    served = EndpointSampler(
        args.endpoint,
        args.model_name,
        tokenizer,
        concurrency=args.concurrency,
        timeout_s=args.timeout_s or 600.0,
        api_key=os.environ.get(API_KEY),
    )
    return Policy(served, tokenizer, served.session, settings)


def make_envs(
    args: argparse.Namespace, references: Sequence[str], config: TrainConfig | None
) -> dict[str, TextEnv]:
    """An environment for each task, by the task's name; without ``references`` for the task of the run that made the
    policy, whose settings (``config``) apply to that run's own task only. Raises ``UserError`` for no task, the same
    task twice, or a setting that is wrong or names another task."""
    if not references and config is not None:
        _check_files(args, config)
        references = [config.task]
    if not references:
        raise UserError(f"give --task NAME, one or several. Known: {', '.join(task_names())}")
    # the policy writes its own format, whatever the task
    written = with_overrides(config or TrainConfig(), _given(args, "format")).format
    overrides = _given(args, "search.") | _given(args, "limits.") | _given(args, "tools")
    data, corpora, urls = (_by_task(getattr(args, name), references, name) for name in _OF_A_TASK)
    knobs = _knobs(args, references)
    envs: dict[str, TextEnv] = {}
    for reference in references:
        own = config if config is not None and config.task == reference else TrainConfig()
        corpus, url = corpora.get(reference), urls.get(reference)
        # one replaces the other
        search = {"search.corpus": corpus, "search.url": url} if corpus or url else {}
        cache = {"search.cache": None} if corpus else {}  # it keeps what servers reply
        settings = with_overrides(own, {**cache, **overrides, **search})
        task = load_task(reference, **{**own.task_args, **knobs[reference]})
        env = open_env(
            task,
            data=data.get(reference) or own.eval_data or own.data,
            split=args.split or own.eval.split,
            tool_settings=tool_settings(settings.search, settings.tools),
            limits=limits(task, settings.limits),
            format=written,
        )
        if env.task.name in envs:
            raise UserError(f"--task names {env.task.name!r} twice")
        envs[env.task.name] = env
    return envs


def _check_files(args: argparse.Namespace, config: TrainConfig) -> None:
    """Raise ``UserError`` if a file that the run names, and no option replaces, cannot be found from this folder."""
    task = config.task if config.task.endswith(".py") else None
    named = {"task": task, "data": config.eval_data or config.data, "search.corpus": config.search.corpus}
    for option, path in named.items():
        if path and not (getattr(args, option) or path.startswith("hf:") or Path(path).expanduser().exists()):
            raise UserError(
                f"{path}, which the run was trained with, is not to be found from here: give --{option}, or start the "
                "command in the folder in which the run was started"
            )


def make_env(args: argparse.Namespace, source: PolicySource | None) -> ToolUseEnv:
    """The environment of a command with the options of `add_one_task_options`. Raises as `make_envs` does."""
    references = [args.task] if args.task else []
    (env,) = make_envs(args, references, source.config if source else None).values()
    return require_tool_env(env, "a question of your own")


def _by_task(values: Sequence[str], references: Sequence[str], option: str) -> dict[str, str]:
    """The values of an option by task: ``NAME=VALUE`` is for one task, a single value without a name for all."""
    found: dict[str, str] = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if equals and name in references:
            found[name] = rest
        elif len(values) == 1 or len(references) == 1:
            found |= dict.fromkeys(references, value)
        elif equals and re.fullmatch(r"[\w.:]+", name):
            raise UserError(
                f"--{option} {value}: no task {name!r} is given with --task. {did_you_mean(name, references)}"
            )
        else:
            raise UserError(f"--{option} {value}: with several of them write {references[0]}={value}")
    if len(found) < len(values):
        raise UserError(f"--{option} {' '.join(values)}: several of them are for one task: give it only one")
    return found


def _knobs(args: argparse.Namespace, references: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The arguments of each task: ``--task_args.KEY``, with several tasks ``--task_args.NAME.KEY``."""
    knobs: dict[str, dict[str, Any]] = {reference: {} for reference in references}
    spelled = {reference.replace("-", "_"): reference for reference in references}  # as the parser has them
    for option, value in _given(args, f"{_KNOBS}.").items():
        name = option.removeprefix(f"{_KNOBS}.")
        task, dot, key = name.rpartition(".")
        if not dot and len(references) > 1:
            raise UserError(f"--{option}: with several tasks write --{_KNOBS}.NAME.{name}")
        if dot and task not in spelled:
            raise UserError(f"--{option}: no task {task!r} here. {did_you_mean(task, references)}")
        knobs[spelled[task] if dot else references[0]][key] = value
    return knobs
