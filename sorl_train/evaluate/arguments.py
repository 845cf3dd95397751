"""Command-line options of ``sorl-eval`` and ``sorl-ask``, and what is built from them: policy and environments."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sorl_env.bounds import MOST
from sorl_env.command import number, seed, whole
from sorl_env.env import ToolUseEnv
from sorl_env.errors import UserError, did_you_mean
from sorl_env.registry import load_task, task_names
from sorl_env.rollout import RolloutSettings
from sorl_env.task import Limits, ToolSettings
from sorl_train.config.files import parse_yaml
from sorl_train.config.settings import TrainConfig
from sorl_train.evaluate.endpoint import EndpointSampler, TextTokenizer
from sorl_train.evaluate.find_policy import PolicySource, find_policy, fingerprint
from sorl_train.evaluate.runner import Policy
from sorl_train.rollout.environments import limits as config_limits
from sorl_train.rollout.environments import tool_settings as config_tools

API_KEY = "SORL_API_KEY"  # not an option: the manifest keeps the command line
_LIMITS = tuple(field.name for field in dataclasses.fields(Limits))


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Where the policy is, and how it draws."""
    served = parser.add_argument_group(
        "a served model, in place of a local one; $SORL_API_KEY is sent as a bearer token"
    )
    served.add_argument(
        "--endpoint", metavar="URL", help="of an OpenAI-compatible API: http://127.0.0.1:8000/v1"
    )
    served.add_argument("--model_name", metavar="NAME", help="as the server calls the model")
    served.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="the model's: prompts go out as token ids; without it as plain text",
    )
    served.add_argument(
        "--timeout_s",
        type=number(above=0, high=86400),
        default=600.0,
        help="for one turn, retries included (default: 600)",
    )
    local = parser.add_argument_group("a local model")
    local.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    local.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    local.add_argument(
        "--threads", type=whole(0, 1024), default=0, help="CPU threads of torch; 0 leaves torch's own choice"
    )
    drawing = parser.add_argument_group("drawing")
    drawing.add_argument(
        "--temperature", type=number(0, 100), metavar="T", help="default: 0, greedy; 1 with --samples"
    )
    drawing.add_argument(
        "--top_p", type=number(above=0, high=1), default=1.0, metavar="P", help="default: 1, all tokens"
    )
    drawing.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="of the sample and the draws (default: 0)"
    )
    drawing.add_argument(
        "--no_chat_template", action="store_true", help="leave the model's chat template out"
    )
    drawing.add_argument(
        "--concurrency",
        type=whole(1, 65536),
        default=32,
        help="questions in flight (default: 32); each holds a cache row",
    )


def add_task_options(parser: argparse.ArgumentParser) -> None:
    """What a task is built from. ``NAME=`` in front of a value is for one of several tasks."""
    tasks = parser.add_argument_group("tasks; write NAME=VALUE where a value is for one of several tasks")
    tasks.add_argument("--task_args", nargs="+", default=[], metavar="KEY=VALUE", help="knobs: hops=[1,2]")
    tasks.add_argument("--data", nargs="+", default=[], help="a file, a folder, or hf:owner/name")
    tasks.add_argument("--split", help="default: test")
    tasks.add_argument("--corpus", nargs="+", default=[], help="passages for search in process")
    tasks.add_argument("--search_url", nargs="+", default=[], help="a retrieval server")
    tasks.add_argument("--top_k", type=whole(1), help="passages a search (default: 3)")
    tasks.add_argument("--limits", nargs="+", default=[], metavar="KEY=VALUE", help=", ".join(_LIMITS))


def find_source(args: argparse.Namespace, model: str | None) -> PolicySource | None:
    """The policy that the options name; None for a served one. Raises ``UserError`` for neither, or both."""
    if args.endpoint and model:
        raise UserError(f"both a model ({model}) and --endpoint {args.endpoint}: give one of them")
    if args.endpoint:
        if not args.model_name:
            raise UserError("--endpoint needs --model_name, as the server calls the model")
        return None
    if not model:
        raise UserError(
            "give a model folder, a checkpoint, a run folder, or --endpoint URL --model_name NAME"
        )
    return find_policy(model)


def policy_facts(args: argparse.Namespace, source: PolicySource | None) -> dict[str, Any]:
    """What identifies the policy, for the settings of an evaluation."""
    if source is not None:
        return dict(fingerprint(source.folder))
    tokenizer = (
        dict(fingerprint(args.tokenizer)) if args.tokenizer else "none: counts of tokens are estimates"
    )
    return {"served": args.model_name, "tokenizer": tokenizer}


def rollout_settings(args: argparse.Namespace, source: PolicySource | None) -> RolloutSettings:
    """How turns are drawn. A policy keeps the chat template it was trained with, or without."""
    trained = source.config.chat_template if source is not None and source.config else True
    return RolloutSettings(
        temperature=args.temperature or 0.0,
        top_p=args.top_p,
        use_chat_template=trained and not args.no_chat_template,
        max_concurrency=args.concurrency,
    )


def make_policy(args: argparse.Namespace, source: PolicySource | None, envs: Iterable[ToolUseEnv]) -> Policy:
    """Load the model for the trajectories of ``envs`` and check it (see ``model_check``), or connect to the server.

    Imports torch and transformers for a model or a tokenizer.

    Raises:
        UserError: the model cannot be loaded, or our sampler would not compute it as it computes itself.
    """
    settings = rollout_settings(args, source)
    if source is None:
        tokenizer: Any = TextTokenizer()
        if args.tokenizer:
            from sorl_train.models.policy import load_tokenizer

            tokenizer = load_tokenizer(args.tokenizer)
        served = EndpointSampler(
            args.endpoint,
            args.model_name,
            tokenizer,
            concurrency=args.concurrency,
            timeout_s=args.timeout_s,
            api_key=os.environ.get(API_KEY),
        )
        return Policy(served, tokenizer, served.session, settings)
    import torch
    from transformers.utils import logging as transformers_logging

    from sorl_train.models.policy import load_policy, load_tokenizer
    from sorl_train.rollout.model_check import check_policy
    from sorl_train.rollout.sampler import TransformersSampler

    transformers_logging.disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    tokenizer = load_tokenizer(source.folder)
    model = load_policy(source.folder, args.device)
    longest = max(env.limits.max_trajectory_tokens for env in envs)
    check_policy(model, longest, sampled=True, trained=False)
    local = TransformersSampler(model, tokenizer, settings.max_concurrency, args.dtype)
    return Policy(local, tokenizer, local.session, settings)


def make_envs(
    args: argparse.Namespace, references: Sequence[str], config: TrainConfig | None
) -> dict[str, ToolUseEnv]:
    """An environment for each task, by the task's name. Settings of the run count for the run's own task.

    Raises:
        UserError: no task, one given twice, or an option for a task that is not there.
    """
    if not references and config is not None:
        references = [config.task]
    if not references:
        raise UserError(f"give --task NAME, one or several. Known: {', '.join(task_names())}")
    options = {
        name: _by_task(getattr(args, name), references, name) for name in ("data", "corpus", "search_url")
    }
    knobs = {reference: _knobs(args.task_args, references, reference) for reference in references}
    envs: dict[str, ToolUseEnv] = {}
    for reference in references:
        given = {name: values.get(reference) for name, values in options.items()}
        run = config if config is not None and config.task == reference else None
        env = _make_env(args, reference, knobs[reference], given, run)
        if env.task.name in envs:
            raise UserError(f"--task names {env.task.name!r} twice")
        envs[env.task.name] = env
    return envs


def _make_env(
    args: argparse.Namespace,
    reference: str,
    knobs: Mapping[str, Any],
    given: Mapping[str, str | None],
    run: TrainConfig | None,
) -> ToolUseEnv:
    task = load_task(reference, **{**(run.task_args if run else {}), **knobs})
    data = given["data"] or (run and (run.eval_data or run.data)) or None
    split = args.split or (run.eval.split if run else "test")
    tools = config_tools(run) if run else ToolSettings()
    if given["corpus"] or given["search_url"]:
        tools = dataclasses.replace(tools, corpus=given["corpus"], search_url=given["search_url"])
    if args.top_k is not None:
        tools = dataclasses.replace(tools, top_k=args.top_k)
    limits = _limits(args.limits, config_limits(task, run.limits) if run else task.limits)
    return ToolUseEnv(task, data=data, split=split, tool_settings=tools, limits=limits)


def _by_task(values: Sequence[str], references: Sequence[str], option: str) -> dict[str, str]:
    """Values by task: ``NAME=VALUE`` for one, a value without a name for all."""
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
    return found


def _knobs(texts: Sequence[str], references: Sequence[str], reference: str) -> dict[str, Any]:
    """The knobs of one task: ``KEY=VALUE`` where there is one task, ``NAME.KEY=VALUE`` where there are several."""
    knobs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--task_args {text}: write KEY=VALUE")
        task, dot, name = key.rpartition(".")
        if not dot and len(references) > 1:
            raise UserError(f"--task_args {text}: with several tasks write NAME.{text}")
        if dot and task not in references:
            raise UserError(f"--task_args {text}: no task {task!r} here. {did_you_mean(task, references)}")
        if not dot or task == reference:
            knobs[name] = parse_yaml(value, f"--task_args {key}")
    return knobs


def _limits(texts: Sequence[str], limits: Limits) -> Limits:
    changed = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or key not in _LIMITS:
            raise UserError(f"--limits {text}: write KEY=VALUE. {did_you_mean(key, _LIMITS)}")
        changed[key] = parse_yaml(value, f"--limits {key}")
    for key, value in changed.items():
        kinds = (int, float, type(None)) if key == "max_seconds" else (int,)
        if type(value) not in kinds or (value is not None and not 0 < value <= MOST):
            raise UserError(f"--limits {key}={value}: a number must be at least 1, and at most {MOST}")
    try:
        return dataclasses.replace(limits, **changed)
    except (TypeError, ValueError) as error:
        raise UserError(f"--limits: {error}") from error
