"""The options of ``sorl-train``, built from the config dataclasses.

argparse rather than tyro: mappings with keys of the user's own (``--task_args.hops``), settings that depend on the
algorithm, YAML as the one syntax of values, and a help text that shows the values of the chosen config all need work
around tyro's static types, and argparse starts ten times faster.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from sorl_env.command import Parser
from sorl_env.errors import UserError
from sorl_train.algorithms import ALGORITHMS
from sorl_train.config.files import value_from_text
from sorl_train.config.find_algorithm import installed_algorithms
from sorl_train.config.schema import ConfigField, as_text, fields, flatten, sections, suggest_key
from sorl_train.config.settings import TrainConfig

DESCRIPTION = """\
Train a tool-using language-model agent with SO-PPO, SO-GRPO or an algorithm they are compared with.
Without options it runs the quickstart: MiniHop, a tiny policy, minutes on two cores, no downloads.

examples:
  sorl-train --algo so_ppo
  sorl-train --algo so_grpo --seed 1 --update.steps 80 --run_dir runs/mine
  sorl-train --config smollm2_hotpotqa --model FOLDER --data train.jsonl --search.corpus passages.jsonl.gz
  sorl-train --task my_task.py --dry_run
  sorl-train --task minihop --task_args.hops "[1, 2]" --stage sft
  sorl-train --resume --run_dir runs/quickstart-so_ppo-s0
"""
EPILOG = """\
Values are written as in YAML (1e-4, true, null, "[1, 2]"). The command line wins over the config, the config over what
the algorithm brings (docs/algorithms.md), and that over the defaults. Exit status: 0 done, 1 the run failed, 2 wrong
usage or settings, 130 interrupted (state saved).
"""
_FLAGS = {
    "list_configs": "describe the packaged configs and leave",
    "dry_run": "show settings, data and memory need; write nothing",
    "resume": "go on with the run in --run_dir, with its settings",
    "overwrite": "move an earlier run in --run_dir aside",
    "help": "this text; with --config, that config's values",
}
_MAPPINGS = tuple(field.name for field in fields() if field.is_mapping)


class Arguments(NamedTuple):
    """A parsed command line: a packaged name or path, dotted names with their values, and flags."""

    config: str | None
    overrides: dict[str, Any]
    resume: bool
    overwrite: bool
    dry_run: bool
    list_configs: bool
    help: bool


def parse(argv: Sequence[str]) -> Arguments:
    """Raises ``UserError`` for an unknown option, a missing or an unreadable value."""
    known, unknown = _parser().parse_known_args(argv)
    if unknown:
        raise UserError(_about_unknown(unknown))
    values = vars(known)
    flags = {name: values.pop(name) for name in ("config", *_FLAGS)}
    texts = {name: text for name, text in values.items() if text is not None}
    return Arguments(overrides={name: value_from_text(name, text) for name, text in texts.items()}, **flags)


def help_text(config: TrainConfig, config_name: str) -> str:
    """The help, with the values that ``config`` gives each field."""
    return _parser(config, config_name).format_help()


def _parser(config: TrainConfig | None = None, config_name: str = "") -> argparse.ArgumentParser:
    parser = Parser(
        prog="sorl-train",
        usage="sorl-train [--config NAME_OR_PATH] [--algo ALGO] [--FIELD VALUE ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=36),
        mappings=_MAPPINGS,
        add_help=False,
    )
    run = parser.add_argument_group("command")
    about = "a packaged config or a YAML file (default: quickstart)"
    run.add_argument("--config", metavar="NAME_OR_PATH", help=about)
    for name, about in _FLAGS.items():
        names = ("-h", "--help") if name == "help" else (f"--{name}",)
        run.add_argument(*names, action="store_true", help=about)
    shown = flatten(config) if config else {}
    top = parser.add_argument_group(f"settings, in brackets as in config {config_name!r}")
    groups = {"": top} | {name: parser.add_argument_group(name, about) for name, about in sections().items()}
    for field in fields():
        switch: Any = {"nargs": "?", "const": "true"} if field.type is bool else {}  # a bare --flag is true
        groups[field.name.rpartition(".")[0]].add_argument(
            f"--{field.name}",
            dest=field.name,
            metavar=field.metavar,
            **switch,
            help=_field_help(field, shown).replace("%", "%%"),
        )
    return parser


def _field_help(field: ConfigField, shown: dict[str, Any]) -> str:
    choices = f" ({', '.join(field.choices)})" if field.choices else ""
    if field.name == "algo":
        critic = ", ".join(name for name, row in ALGORITHMS.items() if row.needs_critic)
        group = ", ".join(name for name, row in ALGORITHMS.items() if row.needs_groups)
        choices = f" {critic} train a critic; {group} need rollout.group_size >= 2."
        if installed := installed_algorithms():
            choices += f" Installed: {', '.join(installed)}."
    return f"{field.help}{choices} [{as_text(shown.get(field.name))}]"


def _about_unknown(arguments: list[str]) -> str:
    options = [argument for argument in arguments if argument.startswith("-")]
    if not options:
        return f"unexpected argument {arguments[0]!r}: options are written --name value, as in --algo so_ppo"
    name = options[0].partition("=")[0]
    return f"unknown option {name}. {suggest_key(name.lstrip('-'), extra=('config', *_FLAGS), prefix='--')}"
