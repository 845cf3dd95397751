"""From YAML files and the command line to a checked ``TrainConfig``, and back to YAML.

The layers of a config, each over the one before: the defaults of the dataclasses, what the chosen algorithm brings
(``Algorithm.defaults``), the files that ``base:`` names, the file itself, the ``algos:`` sections of the algorithm in
these files, and overrides. Files hold the differences alone::

    base: quickstart              # optional: another packaged config, or a file next to this one
    optim: {lr: 1e-4}
    algos:                        # optional: what some algorithms need changed
      group: {rollout: {group_size: 8}}   # all that compare the rollouts of a prompt; gae: all with a critic
      turn_group: {loss: {turn_weight: 0.5}} # all with this kind of advantage
      gspo: {loss: {clip_eps: 3e-4}}      # one, over the settings of its kind

A task's arguments and data belong to it, so a layer that changes ``task`` drops those of the layers below.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml

from sorl_env.commands.command import shortened
from sorl_env.errors import UserError, did_you_mean
from sorl_train.algorithms import ALGORITHMS, AdvantageKind
from sorl_train.config.config_rules import validate
from sorl_train.config.find_algorithm import find_algorithm, installed_algorithms
from sorl_train.config.schema import build, fields, flatten
from sorl_train.config.settings import TrainConfig

DEFAULT_CONFIG = "quickstart"
STUDIES = "studies"  # the folder of sorl-lab's studies among the packaged configs
CLUSTER = "cluster"  # the folder of the pins for GPUs and of jobs for clusters, which are not configs
_OF_A_TASK = ("task_args", "data", "eval_data")  # dropped when a layer changes the task


def load_config(
    name_or_path: str | Path = DEFAULT_CONFIG,
    overrides: Mapping[str, Any] | None = None,
    *,
    shared: Mapping[str, Any] | None = None,
) -> TrainConfig:
    """Load and check a config by its packaged name or the path of a YAML file.

    ``overrides`` maps dotted names to values: ``{"optim.lr": 1e-4, "task_args.hops": [1, 2]}``, and each has to have an
    effect. ``shared`` are likewise settings over those of the file; as there, some may be for other algorithms.
    Raises ``UserError`` for an unknown config or name, a wrong type, or settings that do not fit together.
    """
    path = find_config(name_or_path)
    common, top = nest(shared or {}), nest(overrides or {})
    build(common)  # so that a mistake in an override is not reported as one of the file
    build(top)
    settings, algos = _read_layers(path, above=())
    algo = {**settings, **common, **top}.get("algo", TrainConfig.algo)
    try:
        algorithm = find_algorithm(algo)
    except UserError as error:
        raise UserError(f"{'' if 'algo' in top else f'{path}: '}algo: {error}") from error
    defaults = nest(algorithm.defaults)
    build(defaults, source=f"algo {algo}, its defaults")
    settings = merge(defaults, settings)
    family = "group" if algorithm.needs_groups else "gae"
    for section in dict.fromkeys((family, algorithm.advantage, algo)):
        settings = merge(settings, algos.get(section))
    config = build(merge(merge(settings, common), top), source=str(path))
    validate(config, set(_names(top)))
    return config


def read_resolved(
    path: Path, overrides: Mapping[str, Any] | None = None, *, check: bool = True
) -> TrainConfig:
    """The config that a run folder has saved, with overrides on top. Raises as ``load_config`` does.

    ``check`` sees that the settings fit together, which imports an algorithm of the user's own. Those who only read
    what the settings were turn it off: that algorithm may be gone by now.
    """
    top = nest(overrides or {})
    build(top)
    config = build(merge(_read_yaml(path), top), source=str(path))
    if check:
        validate(config, set(_names(top)))
    return config


def with_overrides(config: TrainConfig, overrides: Mapping[str, Any]) -> TrainConfig:
    """A config with some settings changed. Raises as ``load_config`` does."""
    changed = build(merge(dataclasses.asdict(config), nest(overrides)))
    validate(changed)
    return changed


def config_folder() -> Path:
    """The folder of the packaged configs: in the installed package, or ``configs/`` of a checkout."""
    package = Path(__file__).resolve().parents[1]
    return package / "configs" if (package / "configs").is_dir() else package.parent / "configs"


def packaged_configs() -> dict[str, str]:
    """The packaged configs by name (``quickstart``, ``paper/NAME``), each with the first line of its comment."""
    folder = config_folder()
    others = folder / STUDIES, folder / CLUSTER
    paths = [path for path in folder.rglob("*.yaml") if path.parent not in others]
    return {
        path.relative_to(folder).with_suffix("").as_posix(): (
            path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        )
        for path in sorted(paths, key=lambda path: (len(path.parts), path))
    }


def find_config(name_or_path: str | Path, beside: Path | None = None) -> Path:
    """The file of a path (relative to ``beside`` or the working folder), or of a packaged name."""
    text = str(name_or_path)
    path = (beside or Path()) / text
    if path.is_file():
        return path
    known = packaged_configs()
    if (name := text.removesuffix(".yaml")) in known:
        return config_folder() / f"{name}.yaml"
    if not text.endswith((".yaml", ".yml")):
        raise UserError(
            f"unknown config {text!r}. {did_you_mean(text, known)} "
            "(sorl-train --list_configs describes them; a path to a .yaml works too)"
        )
    siblings = [sibling.name for sibling in path.parent.glob("*.y*ml")]
    hint = did_you_mean(path.name, siblings) if siblings else "See sorl-train --list_configs."
    raise UserError(f"no config file {str(path)!r}. {hint}")


def _read_layers(path: Path, above: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a file over those of its bases, and its ``algos`` sections over theirs. Checks each layer."""
    if path.resolve() in above:
        raise UserError(f"{path}: 'base' comes back to itself: {' -> '.join(p.name for p in (*above, path))}")
    settings = _read_yaml(path)
    base, algos = settings.pop("base", None), settings.pop("algos", None)
    build(settings, source=str(path))
    algos = _checked_algos(algos, path)
    if base is None:
        return settings, algos
    if not isinstance(base, str):
        raise UserError(f"{path}: 'base' is the name or the path of one config, it is {base!r}")
    below = find_config(base, beside=path.parent)
    base_settings, base_algos = _read_layers(below, above=(*above, path.resolve()))
    merged = {name: merge(base_algos.get(name, {}), algos.get(name)) for name in {**base_algos, **algos}}
    return merge(base_settings, settings), merged


def _checked_algos(algos: Any, path: Path) -> dict[str, Any]:
    if algos is None:
        return {}
    if not isinstance(algos, dict):
        raise UserError(f"{path}: 'algos' maps algorithms to settings, it is {algos!r}")
    known = {*ALGORITHMS, *get_args(AdvantageKind), *installed_algorithms()}
    for name, settings in algos.items():
        if name not in known and ":" not in str(name) and not str(name).endswith(".py"):
            raise UserError(
                f"{path}: unknown algorithm {name!r} in 'algos'. {did_you_mean(str(name), known)}"
            )
        build(settings, source=f"{path}, algos.{name}")
        if settings and "algo" in settings:
            raise UserError(f"{path}: 'algos.{name}' cannot change 'algo'")
    return algos


def merge(below: Mapping[str, Any], above: Mapping[str, Any] | None) -> dict[str, Any]:
    """``above`` over ``below``, section by section."""
    above = above or {}
    merged = dict(below)
    if "task" in above and above["task"] != below.get("task", TrainConfig.task):
        merged = {key: value for key, value in merged.items() if key not in _OF_A_TASK}
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            merged[key] = merge(old, value)
        elif not (value is None and isinstance(old, Mapping)):  # an empty section changes nothing
            merged[key] = value
    return merged


def nest(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """Turn ``{"optim.lr": 1}`` into ``{"optim": {"lr": 1}}``."""
    nested: dict[str, Any] = {}
    for name, value in dotted.items():
        *parents, leaf = str(name).split(".")  # a file may have a number
        level = nested
        for parent in parents:
            level = level.setdefault(parent, {})
            if not isinstance(level, dict):
                raise UserError(f"{name} cannot be set: {parent} is set to {level!r} as a whole")
        if isinstance(value, Mapping) and isinstance(level.get(leaf), dict):
            value = merge(value, level[leaf])  # task_args as a whole, and a key of it by name
        level[leaf] = dict(value) if isinstance(value, Mapping) else value
    return nested


def _names(nested: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in nested.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _names(value, f"{prefix}{key}.")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with ``1e-4`` as a number, and an error for a key given twice and for aliases that could explode."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._anchors_around = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """An alias inside a value that has an anchor itself may double at each level, or stand for that value."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) and self._anchors_around:
            problem = "an alias stands inside a value that has an anchor itself: write the value out there"
            raise yaml.composer.ComposerError(problem=problem, problem_mark=self.get_mark())
        has_anchor = isinstance(event, yaml.NodeEvent) and event.anchor is not None
        self._anchors_around += has_anchor
        node = super().compose_node(parent, index)
        self._anchors_around -= has_anchor
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value]
        for index, (key, _) in enumerate(node.value):
            if key.value in keys[:index]:
                problem = f"the key {key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
        return super().construct_mapping(node, deep)


# Dates stay text: the run's manifest is JSON, which has no dates.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML text. Raises ``UserError`` with ``source`` and the line of a syntax error."""
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, RecursionError, ValueError, KeyError, IndexError, AttributeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or f"a value cannot be read ({shortened(str(error))})"
        if isinstance(error, RecursionError):
            reason = "it is nested too deeply"
        raise UserError(f"{source}{line}: not valid YAML: {reason}") from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file: {error}") from error
    if not isinstance(content, dict | None):
        raise UserError(
            f"{path}: a config maps keys to values, this is {type(content).__name__} {content!r:.40}"
        )
    return content or {}


def value_from_text(name: str, text: str) -> Any:
    """The value of a command-line option: text fields take the words themselves, all others are read as YAML."""
    field = next((field for field in fields() if field.name == name), None)
    if field is not None and field.optional and text.lower() in ("none", "null"):
        return None
    if field is not None and (field.type is str or field.choices):
        return text
    return parse_yaml(text, f"--{name}")


def to_yaml(config: TrainConfig) -> str:
    """The whole config as YAML; ``read_resolved`` reads an equal config from it."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)


def config_hash(config: TrainConfig) -> str:
    """SHA-256 over all settings but the run folder. Configs with equal hashes ask for the same training."""
    settings = {name: value for name, value in flatten(config).items() if name != "run_dir"}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
