"""Configs from YAML and the command line to a checked ``TrainConfig`` and back.

Layers, each over the one before: the dataclass defaults, ``base:`` files, the file, the file's ``algos:`` section of
the chosen algorithm, overrides. Files hold differences only::

    base: quickstart              # optional: another packaged config, or a file next to this one
    optim: {lr: 1e-4}
    algos:                        # optional: what one algorithm needs changed
      so_grpo: {rollout: {group_size: 8}}

Knobs and data belong to a task, so a layer that changes ``task`` drops those of the layers below it.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import re
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from sorl_env.errors import UserError, did_you_mean
from sorl_train.config import ALGOS, TrainConfig
from sorl_train.config_check import validate

DEFAULT_CONFIG = "quickstart"
_OF_A_TASK = ("task_args", "data", "eval_data")  # dropped when a layer changes the task


# --- reading ----------------------------------------------------------------------------------------------------------
def load_config(
    name_or_path: str | Path = DEFAULT_CONFIG, overrides: Mapping[str, Any] | None = None
) -> TrainConfig:
    """The validated config of a packaged name or a YAML path.

    ``overrides`` maps dotted names to values (``{"optim.lr": 1e-4, "task_args.hops": [1, 2]}``).
    Raises ``UserError`` for an unknown config, key or name, a wrong type, or settings that do not fit together.
    """
    path = find_config(name_or_path)
    top = _nest(overrides or {})
    build(TrainConfig, top, source="overrides")
    merged, algos = _read_layers(path, seen=())
    algo = top.get("algo", merged.get("algo", TrainConfig.algo))
    for layer in (algos.get(algo, {}), top):
        merged = _merge(merged, layer)
    config = build(TrainConfig, merged, source=str(path))
    validate(config)
    return config


def read_resolved(path: Path, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
    """The config that a run folder saved, with overrides; no algorithm section is applied a second time."""
    config = build(TrainConfig, _merge(_read_yaml(path), _nest(overrides or {})), source=str(path))
    validate(config)
    return config


def config_folder() -> Path:
    """The packaged configs: inside the installed package, or ``configs/`` of a checkout."""
    installed = Path(__file__).resolve().parent / "configs"
    return installed if installed.is_dir() else Path(__file__).resolve().parent.parent / "configs"


def packaged_configs() -> dict[str, str]:
    """Names of the packaged configs and the first comment line of each, which says what it is."""
    found = {}
    for path in sorted(config_folder().glob("*.yaml")):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        found[path.stem] = first.lstrip("# ") if first.startswith("#") else ""
    return found


def find_config(name_or_path: str | Path, beside: Path | None = None) -> Path:
    """The file of a packaged name or a path (relative to the working folder, or to ``beside`` for ``base:``)."""
    text = str(name_or_path)
    path = (beside / text) if beside else Path(text)
    if path.is_file():
        return path
    if not text.endswith((".yaml", ".yml")) and "/" not in text:
        packaged = config_folder() / f"{text}.yaml"
        if packaged.is_file():
            return packaged
        raise UserError(
            f"unknown config {text!r}. {did_you_mean(text, packaged_configs())} "
            "(sorl-train --list_configs shows all; a path works too)"
        )
    siblings = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    hint = f" {did_you_mean(path.name, siblings)}" if siblings else ""
    raise UserError(f"no config file {text!r}.{hint}")


def _read_layers(path: Path, seen: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A file merged over its bases, and its ``algos`` sections merged likewise."""
    if path.resolve() in seen:
        raise UserError(f"{path}: 'base' leads back to itself: {' -> '.join(p.name for p in (*seen, path))}")
    layer = _read_yaml(path)
    base, algos = layer.pop("base", None), layer.pop("algos", None) or {}
    build(TrainConfig, layer, source=str(path))
    if not isinstance(algos, dict):
        raise UserError(f"{path}: 'algos' maps an algorithm to settings, it is {algos!r}")
    for name, section in algos.items():
        if name not in ALGOS:
            raise UserError(f"{path}: unknown algorithm {name!r} under 'algos'. {did_you_mean(str(name), ALGOS)}")
        if "algo" in (section or {}):
            raise UserError(f"{path}: 'algos.{name}' cannot set 'algo'")
        build(TrainConfig, section, source=f"{path}, algos.{name}")
    if base is None:
        return layer, algos
    if not isinstance(base, str):
        raise UserError(f"{path}: 'base' is the name or path of one config, it is {base!r}")
    base_layer, base_algos = _read_layers(find_config(base, beside=path.parent), (*seen, path.resolve()))
    both = {name: _merge(base_algos.get(name) or {}, algos.get(name) or {}) for name in {**base_algos, **algos}}
    return _merge(base_layer, layer), both


class _Loader(yaml.SafeLoader):
    """YAML that reads ``1e-4`` as a number (YAML 1.1 wants ``1.0e-4``) and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789"))


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML text; ``UserError`` names the source and the line of a syntax error."""
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{source}{line}: not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{source}: not valid YAML: {error}") from error


def _read_yaml(path: Path) -> dict[str, Any]:
    content = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: a config is a mapping of keys to values, this is a {type(content).__name__}")
    return content


# --- layers -----------------------------------------------------------------------------------------------------------
def _nest(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """``{"optim.lr": 1}`` to ``{"optim": {"lr": 1}}``."""
    nested: dict[str, Any] = {}
    for name, value in dotted.items():
        *sections, leaf = name.split(".")
        level = nested
        for section in sections:
            level = level.setdefault(section, {})
            if not isinstance(level, dict):
                raise UserError(f"overrides give both {section!r} and {name!r}")
        level[leaf] = value
    return nested


def _merge(below: Mapping[str, Any], above: Mapping[str, Any] | None) -> dict[str, Any]:
    """``above`` over ``below``, section by section."""
    above = above or {}
    merged = dict(below)
    if "task" in above and above["task"] != below.get("task", TrainConfig.task):
        merged = {key: value for key, value in merged.items() if key not in _OF_A_TASK}
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and (old is None or isinstance(old, Mapping)):
            merged[key] = _merge(old or {}, value)
        elif not (value is None and isinstance(old, Mapping)):  # a section with nothing in it changes nothing
            merged[key] = value
    return merged


# --- building and checking types --------------------------------------------------------------------------------------
def build(cls: Any, values: Mapping[str, Any] | None, *, source: str, prefix: str = "") -> Any:
    """An instance of the config dataclass ``cls``; ``UserError`` names source, dotted key, value and expected type."""
    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        raise UserError(f"{source}: {prefix.rstrip('.')!r} is a section of settings, it cannot be {values!r}")
    hints = get_type_hints(cls)
    for key in values:
        if key not in hints:
            raise UserError(f"{source}: unknown key '{prefix}{key}'. {suggest_key(f'{prefix}{key}')}")
    arguments = {}
    for key, value in values.items():
        if dataclasses.is_dataclass(hints[key]):
            arguments[key] = build(hints[key], value, source=source, prefix=f"{prefix}{key}.")
        else:
            arguments[key] = _check(value, hints[key], f"{source}: {prefix}{key}")
    return cls(**arguments)


def _check(value: Any, hint: Any, where: str) -> Any:
    """``value`` if it has the type ``hint``, an int where a float is wanted made one."""
    if hint is Any:
        return value
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (hint,) = (member for member in get_args(hint) if member is not type(None))
        origin = get_origin(hint)
    if origin is Literal:
        choices = [str(choice) for choice in get_args(hint)]
        if value not in choices:
            raise UserError(f"{where}: {value!r} is not one of {', '.join(choices)}. {_close(str(value), choices)}".rstrip())
        return value
    if hint is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    expected = dict if origin is dict else hint
    if type(value) is not expected or (expected is float):
        raise UserError(f"{where}: expected {type_name(hint)}, got {value!r} ({type(value).__name__})")
    if expected is dict:
        return {str(key): item for key, item in value.items()}
    return value


def _close(name: str, known: list[str]) -> str:
    return f"Did you mean {difflib.get_close_matches(name, known, 1)[0]!r}?" if difflib.get_close_matches(name, known, 1) else ""


def type_name(hint: Any) -> str:
    """A type hint in words: ``a number``, ``a whole number or null``."""
    if get_origin(hint) in (Union, types.UnionType):
        inner = next(member for member in get_args(hint) if member is not type(None))
        return f"{type_name(inner)} or null"
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) is dict:
        return "a mapping"
    return {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}[hint]


def fields(cls: Any = TrainConfig, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """(dotted name, dataclass field, type) of every leaf field, in order."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from fields(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", field, hints[field.name]


def suggest_key(name: str) -> str:
    """The nearest dotted field names: same last part first, then a similar spelling of all or of the last part."""
    known = [dotted for dotted, _, _ in fields()]
    if name in known:
        section, _, leaf = name.rpartition(".")
        return f"Write it nested: {section}: {{{leaf}: ...}}"
    leaf = name.rpartition(".")[2]
    same = [dotted for dotted in known if dotted.rpartition(".")[2] == leaf]
    similar = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    leaves = sorted({dotted.rpartition(".")[2] for dotted in known})
    close_leaf = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)
    found = same or similar or [d for d in known if close_leaf and d.rpartition(".")[2] == close_leaf[0]]
    if found:
        return f"Did you mean {' or '.join(repr(dotted) for dotted in found[:3])}?"
    return "sorl-train --help lists all."


def value_from_text(name: str, text: str) -> Any:
    """A command-line value: text fields take it as it stands, the others read it as YAML."""
    hints = {dotted: hint for dotted, _, hint in fields()}
    hint = hints.get(name)
    if hint is str or get_origin(hint) is Literal:
        return text
    if get_origin(hint) in (Union, types.UnionType) and str in get_args(hint):
        return None if text.lower() in ("null", "none") else text
    value = parse_yaml(text, f"--{name}")
    return None if value == "None" else value


# --- writing ----------------------------------------------------------------------------------------------------------
def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Every field as plain nested values."""
    return dataclasses.asdict(config)


def flatten(config: TrainConfig) -> dict[str, Any]:
    """Dotted name to value of every leaf field."""
    flat = {}
    for name, _, _ in fields():
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        flat[name] = value
    return flat


def to_yaml(config: TrainConfig) -> str:
    """Every field, in the order of the dataclass; ``read_resolved`` gives the same config back."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def config_hash(config: TrainConfig) -> str:
    """SHA-256 over all settings but the run folder: equal hashes ask for the same training."""
    settings = {name: value for name, value in flatten(config).items() if name != "run_dir"}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
