"""The options of ``sorl-train``, built from the config dataclasses.

argparse rather than tyro: mappings with keys of the user's own (``--task_args.hops``), settings that depend on the
algorithm, YAML as the one syntax of values, and a help text that shows the values of the chosen config all need work
around tyro's static types, and argparse starts ten times faster.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sorl_env.commands.command import Parser
from sorl_env.errors import UserError, did_you_mean
from sorl_train.algorithms import ALGORITHMS
from sorl_train.config.files import DEFAULT_CONFIG, value_from_text
from sorl_train.config.find_algorithm import installed_algorithms
from sorl_train.config.schema import ConfigField, as_text, fields, sections, suggest_key

DESCRIPTION = """\
Train a tool-using language-model agent with SO-PPO, SO-GRPO or an algorithm that
they are compared with. Without options: a tiny policy on MiniHop, in minutes.

  sorl-train --algo so_grpo --seed 1 --update.steps 80 --run_dir runs/mine
  sorl-train --config smollm2_hotpotqa --model FOLDER --data train.jsonl
  sorl-train --task my_task.py --dry_run
  sorl-train --resume --run_dir runs/mine
"""
EPILOG = """\
Values are as in YAML; in brackets are those of config {config!r}. The command
line wins over the config, and the config over what the algorithm brings.
Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted (state saved).
More settings: --help all, or --help SECTION, which is one of
{sections}"""
GENERAL, ALL = "general", "all"  # the settings outside all sections; all settings
_FLAGS = {
    "list_configs": "describe the packaged configs",
    "dry_run": "show what would be run, and write nothing",
    "resume": "go on with the run in --run_dir",
    "overwrite": "move an earlier run in --run_dir aside",
}
# What --dry_run reckons time and cost with: metavar, help.
_PLAN: dict[str, tuple[str, str]] = {
    "gpu": ("NAME", "with --dry_run: H100, H200, A100-80 or H20 [H100]"),
    "price": ("NUMBER", "with --dry_run: what a GPU costs for an hour"),
    "measured": ("FILE", "with --dry_run: a run, or a file of figures"),
}


class Arguments(NamedTuple):
    """A parsed command line: a packaged name or path, dotted names with their values, and flags. ``help`` is the
    section that ``--help`` asks for, empty for a bare ``--help`` and None without one; ``plan`` has what is given of
    ``--gpu``, ``--price`` and ``--measured``."""

    config: str | None
    overrides: dict[str, Any]
    resume: bool
    overwrite: bool
    dry_run: bool
    list_configs: bool
    plan: dict[str, Any]
    help: str | None


def parse(argv: Sequence[str]) -> Arguments:
    """Raises ``UserError`` for an unknown option, a missing or an unreadable value."""
    known, unknown = _parser().parse_known_args(argv)
    if unknown:
        raise UserError(_about_unknown(unknown))
    values = vars(known)
    own = {name: values.pop(name) for name in ("config", *_FLAGS, "help")}
    plan = {name: value for name in _PLAN if (value := values.pop(name)) is not None}
    if plan and not own["dry_run"]:
        raise UserError(f"--{next(iter(plan))} is for --dry_run alone, which estimates time and cost: add it")
    texts = {name: text for name, text in values.items() if text is not None}
    overrides = {name: value_from_text(name, text) for name, text in texts.items()}
    return Arguments(overrides=overrides, plan=plan, **own)


def help_text(values: Mapping[str, Any], config: str, section: str = "") -> str:
    """The help, with the ``values`` of a config by dotted name: the settings that most runs touch, or those of a
    section, or ``all``. A setting's name stands for its section. Raises ``UserError`` for an unknown section."""
    section = section.partition(".")[0]
    known = (GENERAL, *sections())
    if section not in ("", ALL, *known):
        raise UserError(f"--help {section}: there is no such section. {did_you_mean(section, (ALL, *known))}")
    parser = _parser(section, values)
    parser.epilog = EPILOG.format(config=config, sections=textwrap.fill(", ".join(known), 80))
    text = parser.format_help().rstrip()
    return text[text.index(f"\n{section}:\n") + 1 :] if section in known else text


def _parser(section: str = "", values: Mapping[str, Any] | None = None) -> argparse.ArgumentParser:
    """It reads all options; its help explains those that ``section`` asks for, with these values of the fields."""
    parser = Parser(
        prog="sorl-train",
        usage="sorl-train [--config NAME_OR_PATH] [--algo ALGO] [--FIELD VALUE ...]",
        description=DESCRIPTION,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=28),
        mappings=[field.name for field in fields() if field.is_mapping],
        add_help=False,
    )
    about = "this text; a section of the settings, or all"
    parser.add_argument("-h", "--help", nargs="?", const="", metavar="SECTION", help=about)
    about = f"a packaged config or a YAML file [{DEFAULT_CONFIG}]"
    parser.add_argument("--config", metavar="NAME_OR_PATH", help=about)
    for name, about in _FLAGS.items():
        parser.add_argument(f"--{name}", action="store_true", help=about)
    for name, (metavar, about) in _PLAN.items():
        kind: Any = {"measured": {"action": "append", "type": Path}, "price": {"type": float}}.get(name, {})
        parser.add_argument(f"--{name}", metavar=metavar, help=about, **kind)
    groups: dict[str, Any] = {}
    for field in fields():
        own = field.name.rpartition(".")[0] or GENERAL
        title = field.common if not section else own if section in (own, ALL) else ""
        if title not in groups:
            groups[title] = parser.add_argument_group(title, sections().get(title))
        about = _field_help(field, values or {}, brief=not section).replace("%", "%%")
        switch: Any = {"nargs": "?", "const": "true"} if field.type is bool else {}  # a bare --flag is true
        groups[title].add_argument(
            f"--{field.name}",
            dest=field.name,
            metavar=field.metavar,
            help=about if title else argparse.SUPPRESS,
            **switch,
        )
    return parser


def _field_help(field: ConfigField, values: Mapping[str, Any], *, brief: bool) -> str:
    """The text of a field with its choices and its value; if ``brief``, its choices or the beginning of its text."""
    about, choices = field.help, ", ".join(field.choices)
    if field.name == "algo":
        critic = ", ".join(name for name, row in ALGORITHMS.items() if row.needs_critic)
        group = ", ".join(name for name, row in ALGORITHMS.items() if row.needs_groups)
        choices = f"{critic} train a critic; {group} need rollout.group_size >= 2"
        if installed := installed_algorithms():
            choices += f". Installed: {', '.join(installed)}"
    if brief:
        about = choices or re.split(r"[;.] |\.$", about)[0]
    elif choices:
        about += f" ({choices})"
    value = values.get(field.name)
    return f"{about} [{as_text(value)}]" if value is not None or not brief else about


def _about_unknown(arguments: list[str]) -> str:
    options = [argument for argument in arguments if argument.startswith("-")]
    if not options:
        return f"unexpected argument {arguments[0]!r}: options are written --name value, as in --algo so_ppo"
    name = options[0].partition("=")[0]
    own = ("config", "help", *_FLAGS, *_PLAN)
    return f"unknown option {name}. {suggest_key(name.lstrip('-'), extra=own, prefix='--')}"
