"""The config dataclasses as a schema: dotted field names, strict building from plain values, suggestions."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import reprlib
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from sorl_env.bounds import MOST, Bounds
from sorl_env.errors import UserError, did_you_mean
from sorl_train.config.settings import TrainConfig

# Earlier names of settings, which old run folders and old commands have.
RENAMED = {
    "hardware.critic": "critic",
    "hardware.chat_template": "chat_template",
    "hardware.lora_rank": "lora.rank",
    "hardware.lora_alpha": "lora.alpha",
    "hardware.tiny": "tiny",
}
_NO_ROLL_BACK = (
    "There is no roll-back any more: use alarm.action=stop, which says how to go on, and update.trust_kl=0.01, which "
    "takes bad steps back one by one."
)
# Settings, and values of settings, that no longer exist, and what to use instead.
REMOVED = {"alarm.roll_back_lr": _NO_ROLL_BACK, "alarm.action=roll_back": _NO_ROLL_BACK}


class ConfigField(NamedTuple):
    """A field that is no section: its dotted name, its type, and what ``opt`` says about it."""

    name: str
    type: Any
    help: str
    paper: str | None
    bounds: Bounds

    @property
    def is_mapping(self) -> bool:
        """Whether it is a mapping such as ``task_args``, whose keys the user chooses."""
        return get_origin(self.type) is dict

    @property
    def is_number(self) -> bool:
        """Whether it is a number, which has bounds."""
        return without_none(self.type) in (int, float)

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a ``Literal`` field, empty for other types."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()


def fields(cls: Any = TrainConfig, prefix: str = "") -> Iterator[ConfigField]:
    """Every field that is no section, in the order of the dataclasses."""
    hints = _hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from fields(hints[field.name], f"{prefix}{field.name}.")
        else:
            about, hint = field.metadata, hints[field.name]
            bounds = about["bounds"]
            if without_none(hint) is int and bounds.high is None:
                bounds = bounds._replace(high=MOST)
            yield ConfigField(f"{prefix}{field.name}", hint, about["help"], about.get("paper"), bounds)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields. Cached: a study asks for them thousands of times."""
    return get_type_hints(cls)


def sections() -> dict[str, str]:
    """The sections of ``TrainConfig`` by name, with what each is about."""
    hints = _hints(TrainConfig)
    return {name: str(hint.__doc__) for name, hint in hints.items() if dataclasses.is_dataclass(hint)}


def flatten(config: TrainConfig) -> dict[str, Any]:
    """Every value by its dotted name, in the order of ``fields``."""
    flat = {}
    for field in fields():
        value: Any = config
        for part in field.name.split("."):
            value = getattr(value, part)
        flat[field.name] = value
    return flat


def build(values: Mapping[str, Any] | None, *, source: str = "") -> TrainConfig:
    """A ``TrainConfig`` from nested plain values; a field that they leave out keeps its default.

    Raises ``UserError`` for an unknown key or a wrong type; ``checks.validate`` checks bounds and combinations. The
    message names ``source``, the dotted key, the value and what was expected.
    """
    config: TrainConfig = _build(TrainConfig, values, f"{source}: " if source else "", "")
    return config


def _build(cls: Any, values: Any, source: str, prefix: str) -> Any:
    if values is None:  # a section whose lines are all commented out
        values = {}
    if not isinstance(values, Mapping):
        raise UserError(
            f"{source}{prefix.rstrip('.')} is a section of settings, it cannot be {reprlib.repr(values)}"
        )
    hints = _hints(cls)
    unknown = [f"{prefix}{key}" for key in values if key not in hints]
    if unknown:
        raise UserError(
            "\n".join(f"{source}unknown key '{key}'. {suggest_key(key, extra=sections())}" for key in unknown)
        )
    arguments = {}
    for key, value in values.items():
        if dataclasses.is_dataclass(hints[key]):
            arguments[key] = _build(hints[key], value, source, f"{prefix}{key}.")
        else:
            arguments[key] = _checked(value, hints[key], f"{source}{prefix}{key}")
    return cls(**arguments)


def _checked(value: Any, hint: Any, where: str) -> Any:
    """``value`` if it is of type ``hint``. A whole number becomes a float where the field is one."""
    inner = without_none(hint)
    if value is None and inner is not hint:
        return None
    if get_origin(inner) is Literal:
        if value not in get_args(inner):
            hint = next((text for name, text in REMOVED.items() if f"{where}={value}".endswith(name)), None)
            hint = hint or did_you_mean(str(value), get_args(inner))
            raise UserError(f"{where}: unknown value {value!r}. {hint}")
        return value
    if inner is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    if get_origin(inner) is dict and isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if get_origin(inner) is list:
        listed = value if isinstance(value, list) else [value]  # one text needs no brackets
        if all(type(item) is str for item in listed):
            return listed
    if inner in (int, str, bool) and type(value) is inner:  # not isinstance: True is no whole number
        return value
    raise UserError(f"{where}: expected {type_name(hint)}, got {reprlib.repr(value)}")


def without_none(hint: Any) -> Any:
    """The type ``X`` of a hint ``X | None``; any other hint unchanged."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (member for member in get_args(hint) if member is not type(None))
    return hint


def type_name(hint: Any) -> str:
    """A type in words: ``a number``, ``a whole number or null``."""
    inner = without_none(hint)
    if get_origin(inner) is Literal:
        name = "one of " + ", ".join(get_args(inner))
    elif get_origin(inner) is dict:
        name = "a mapping"
    elif get_origin(inner) is list:
        name = "a text or a list of texts"
    else:
        name = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}[inner]
    return name if inner is hint else f"{name} or null"


def suggest_key(name: str, *, extra: Iterable[str] = (), prefix: str = "") -> str:
    """A sentence that helps after an unknown name: its new name, or the nearest dotted names.

    These have the same last part in any section, or a similar spelling. ``extra`` are names to consider besides those
    of fields; ``prefix`` goes before each suggestion.
    """
    for old, new in RENAMED.items():
        if name == old or name.startswith(f"{old}."):
            return f"It is called '{prefix}{new}{name.removeprefix(old)}' now."
    if name in REMOVED:
        return REMOVED[name]
    if name in sections():
        inside = [f"{prefix}{field.name}" for field in fields() if field.name.startswith(f"{name}.")]
        return f"It is a section: set its fields, {', '.join(inside)}."
    by_leaf: dict[str, list[str]] = {}
    for dotted in (*(field.name for field in fields()), *extra):
        by_leaf.setdefault(dotted.rpartition(".")[2], []).append(dotted)
    known = [dotted for group in by_leaf.values() for dotted in group]
    section, _, leaf = name.rpartition(".")
    if name in known:
        return f"Write it nested: {section}: {{{leaf}: ...}}"
    found = (
        difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        or by_leaf.get(leaf)
        or difflib.get_close_matches(name, known, n=1, cutoff=0.7)
        or by_leaf.get(next(iter(difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.7)), ""))
    )
    if found:
        return f"Did you mean {' or '.join(repr(prefix + dotted) for dotted in found[:3])}?"
    return "sorl-train --help lists all."


def as_text(value: Any) -> str:
    """A value as the command line has it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def describe_type(field: ConfigField) -> str:
    """What stands for a field's value in ``--help``."""
    if field.choices:
        return "CHOICE"
    inner = without_none(field.type)
    if field.is_mapping or get_origin(inner) is list:
        return "YAML"
    return {int: "INT", float: "FLOAT", str: "TEXT", bool: "BOOL"}[inner]
