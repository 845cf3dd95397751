"""The config as a schema: every field by its dotted name, building from plain values, suggestions."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import reprlib
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from sorl_env.errors import UserError
from sorl_train.algorithms import Algorithm
from sorl_train.config.run_settings import RESUMABLE, Common, LocalOnly, Needs
from sorl_train.config.settings import TrainConfig


class ConfigField(NamedTuple):
    """A field that is not a section: its dotted name, its type without bounds and None, whether it may be None, its
    docstring, what a run has to have to read it, whether it may change when a run is resumed, the heading below which
    a bare ``--help`` shows it (empty: it does not), and what engine=openrlhf refuses."""

    name: str
    type: Any
    optional: bool
    help: str
    needs: tuple[Needs, ...]
    resumable: bool
    common: str
    local_only: LocalOnly | None

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a ``Literal`` field, empty for other types."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def is_mapping(self) -> bool:
        """Whether it is a mapping such as ``task_args``, whose keys the user chooses."""
        return get_origin(self.type) is dict

    @property
    def metavar(self) -> str:
        """What stands for its value in ``--help``."""
        names = {int: "INT", float: "FLOAT", str: "TEXT", bool: "BOOL"}
        return "CHOICE" if self.choices else names.get(self.type, "YAML")


@functools.cache
def fields() -> tuple[ConfigField, ...]:
    """Every field that is not a section, in the order of the dataclasses."""
    return tuple(_fields(TrainConfig, "", ()))


def _fields(cls: Any, prefix: str, facts: tuple[Any, ...]) -> Iterable[ConfigField]:
    for name, info in cls.__pydantic_fields__.items():
        own = (*facts, *info.metadata)
        kind, optional = _bare(info.annotation)
        if dataclasses.is_dataclass(kind):
            yield from _fields(kind, f"{name}.", own)
        else:
            needs = tuple(fact for fact in own if isinstance(fact, Needs))
            about = " ".join((info.description or "").split())
            common = next((fact.heading for fact in own if isinstance(fact, Common)), "")
            local_only = next((fact for fact in own if isinstance(fact, LocalOnly)), None)
            resumable = RESUMABLE in own
            yield ConfigField(f"{prefix}{name}", kind, optional, about, needs, resumable, common, local_only)


def _bare(hint: Any) -> tuple[Any, bool]:
    """A type without what ``Annotated`` adds and without None, and whether it may be None."""
    if get_origin(hint) is Annotated:
        return _bare(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        (member,) = (member for member in get_args(hint) if member is not type(None))
        return _bare(member)[0], True
    return hint, False


def sections() -> dict[str, str]:
    """The sections of ``TrainConfig`` by name, with what each is about."""
    kinds = {field.name: type(field.default) for field in dataclasses.fields(TrainConfig)}
    return {name: str(kind.__doc__) for name, kind in kinds.items() if dataclasses.is_dataclass(kind)}


def flatten(config: TrainConfig) -> dict[str, Any]:
    """Every value by its dotted name, in the order of ``fields``."""
    return {field.name: functools.reduce(getattr, field.name.split("."), config) for field in fields()}


def unread(algorithm: Algorithm, given: Mapping[str, Any]) -> dict[str, str]:
    """The settings that a run with the values ``given``, by dotted name, would not read; what each of them needs."""
    return {
        field.name: need.text
        for field in fields()
        for need in field.needs
        if not need.is_met(algorithm, given)
    }


def build(values: Mapping[str, Any] | None, *, source: str = "") -> TrainConfig:
    """A ``TrainConfig`` from nested plain values; a field that they leave out keeps its default.

    Raises ``UserError`` for unknown keys, wrong types and numbers out of bounds, with ``source``, the dotted key, the
    value and what was expected; ``checks.validate`` checks combinations.
    """
    try:
        return _adapter().validate_python(values or {})
    except ValidationError as error:
        where = f"{source}: " if source else ""
        problems = [f"{where}{_problem(details)}" for details in error.errors(include_url=False)]
        raise UserError("\n".join(problems)) from None


@functools.cache
def _adapter() -> TypeAdapter[TrainConfig]:
    return TypeAdapter(TrainConfig)


def _problem(error: ErrorDetails) -> str:
    """An error of pydantic in our words."""
    name, value = ".".join(str(part) for part in error["loc"]), reprlib.repr(error["input"])
    if error["type"] in ("unexpected_keyword_argument", "invalid_key"):
        return f"unknown key '{name}'. {suggest_key(name, extra=sections())}"
    if error["type"] == "dataclass_type":
        return f"{name} is a section of settings, it cannot be {value}"
    if error["type"] == "value_error":
        return f"{name}: {error['ctx']['error']}"
    return f"{error['msg'].replace('Input', name, 1)}, it is {value}"


# What other trainers call a setting, where similar spelling does not lead to it.
NAMES_ELSEWHERE = {
    "learning_rate": ("optim.lr", "sft.lr"),
    "kl": ("loss.kl_coef", "update.trust_kl", "update.target_kl"),
    "beta": ("loss.kl_coef",),
    "teacher_model": ("loss.kl_model",),
    "num_generations": ("rollout.group_size",),
    "max_steps": ("update.steps", "sft.steps"),
    "num_train_epochs": ("update.steps", "update.epochs"),
    "num_iterations": ("update.epochs",),
    "model_name_or_path": ("model",),
    "output_dir": ("run_dir",),
    "dataset_name": ("data",),
    "train_batch_size": ("rollout.batch_size", "update.mini_batch_size"),
    "per_device_train_batch_size": ("update.micro_batch_size", "rollout.batch_size"),
    "gradient_accumulation_steps": ("update.micro_batch_size", "update.mini_batch_size"),
    "max_completion_length": ("limits.max_new_tokens", "limits.max_trajectory_tokens"),
    "epsilon": ("loss.clip_eps",),
}


def suggest_key(name: str, *, extra: Iterable[str] = (), prefix: str = "") -> str:
    """A sentence that helps after an unknown name: dotted names with the same last part, or of similar spelling.

    ``extra`` are names to consider besides those of fields; ``prefix`` goes before each suggestion.
    """
    if name in sections():
        inside = [f"{prefix}{field.name}" for field in fields() if field.name.startswith(f"{name}.")]
        return f"It is a section: set its fields, {', '.join(inside)}."
    known = [*(field.name for field in fields()), *extra]
    section, _, leaf = name.rpartition(".")
    if name in known:
        return f"Write it nested: {section}: {{{leaf}: ...}}"
    by_leaf: dict[str, list[str]] = {}
    for dotted in known:
        by_leaf.setdefault(dotted.rpartition(".")[2], []).append(dotted)
    near_leaf = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.7)
    found = (
        NAMES_ELSEWHERE.get(leaf.replace("-", "_"))
        or by_leaf.get(leaf)
        or difflib.get_close_matches(name, known, n=1, cutoff=0.7)
        or [dotted for near in near_leaf for dotted in by_leaf[near]]
    )
    if found:
        return f"Did you mean {' or '.join(repr(prefix + dotted) for dotted in found[:3])}?"
    return "sorl-train --help all lists them."


def as_text(value: Any) -> str:
    """A value as the command line has it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
