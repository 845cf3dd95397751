"""Config files, layers, overrides, checks."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from sorl_env.errors import UserError
from sorl_train.algorithms import ALGORITHMS
from sorl_train.config.config_rules import remarks, validate
from sorl_train.config.files import (
    config_hash,
    load_config,
    nest,
    packaged_configs,
    parse_yaml,
    to_yaml,
    value_from_text,
)
from sorl_train.config.schema import NAMES_ELSEWHERE, build, fields, flatten, suggest_key, unread
from sorl_train.config.settings import OptimConfig, TrainConfig


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def checked(**dotted: Any) -> TrainConfig:
    """The defaults with some values over them, ``__`` for the dot."""
    config = build(nest({name.replace("__", "."): value for name, value in dotted.items()}))
    validate(config)
    return config


# -- the fields ------------------------------------------------------------------------------------------------
def test_every_field_is_documented() -> None:
    assert all(field.help for field in fields())
    assert len({field.name for field in fields()}) == len(list(fields())) > 80


def test_defaults_are_valid_and_the_papers() -> None:
    config = TrainConfig()
    validate(config)
    assert (config.optim.lr, config.optim.critic_lr, config.rollout.batch_size) == (1e-6, 1e-5, 512)
    assert (config.update.mini_batch_size, config.loss.clip_eps) == (256, 0.2)
    # the paper's delta of 1 on the token norm, at its mini-batch of 256 trajectories of 500 tokens
    assert config.loss.clip_bias_norm == "rms"
    assert config.loss.clip_bias_delta == pytest.approx(1 / math.sqrt(256 * 500), abs=0.0003)


# -- packaged configs ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("name", sorted(packaged_configs()))
def test_every_packaged_config_runs_every_algorithm(name: str, algo: str) -> None:
    config = load_config(name, {"algo": algo})
    assert config.algo == algo
    assert (config.rollout.group_size >= 2) is ALGORITHMS[algo].needs_groups


# -- layers ----------------------------------------------------------------------------------------------------
def test_each_layer_wins_over_the_one_below(tmp_path: Path) -> None:
    write(
        tmp_path / "base.yaml",
        "optim: {lr: 1e-3, critic_lr: 2e-3, weight_decay: 0.1}\nupdate: {steps: 7}\n"
        "algos: {so_grpo: {rollout: {group_size: 4}, optim: {critic_lr: 9e-3}}}\n",
    )
    top = write(
        tmp_path / "top.yaml",
        "base: base.yaml\nalgo: so_grpo\noptim: {lr: 5e-4}\nalgos: {so_grpo: {update: {steps: 8}}}\n",
    )
    config = load_config(top, {"optim.weight_decay": 0.2})
    assert config.optim == OptimConfig(lr=5e-4, critic_lr=9e-3, weight_decay=0.2)
    assert (config.rollout.group_size, config.update.steps) == (4, 8)
    assert load_config(top, {"rollout.group_size": 2}).rollout.group_size == 2
    other = load_config(top, {"algo": "ppo"})
    assert (other.optim.critic_lr, other.rollout.group_size, other.update.steps) == (2e-3, 1, 7)


def test_another_task_drops_what_belongs_to_the_old_one(tmp_path: Path) -> None:
    path = write(
        tmp_path / "c.yaml", "task: minihop\ntask_args: {hops: [1]}\ndata: a.jsonl\neval_data: b.jsonl\n"
    )
    assert load_config(path).task_args == {"hops": [1]}
    assert load_config(path, {"task": "minihop", "task_args.top_k": 2}).task_args == {"hops": [1], "top_k": 2}
    config = load_config(path, {"task": "hotpotqa", "eval_data": "c.jsonl"})
    assert (config.task_args, config.data, config.eval_data) == ({}, None, "c.jsonl")


def test_an_algorithms_own_settings_are_the_lowest_layer(tmp_path: Path) -> None:
    """Above the defaults of the settings, below every file and the command line, null included."""
    loss = load_config("minihop", {"algo": "cispo"}).loss
    assert (loss.clip_eps, loss.clip_eps_high, loss.aggregation) == (0.2, 4.0, "token_mean")
    base = write(tmp_path / "base.yaml", "loss: {clip_eps_high: 2.0}\n")
    top = write(tmp_path / "top.yaml", "base: base.yaml\nalgo: cispo\nrollout: {group_size: 4}\n")
    loss = load_config(top).loss
    assert (loss.clip_eps_high, loss.aggregation) == (2.0, "token_mean")
    write(base, "algos: {cispo: {loss: {clip_eps_high: 3.0}}}\n")
    assert load_config(top).loss.clip_eps_high == 3.0
    given = {"loss.clip_eps_high": None, "loss.aggregation": "trajectory_mean"}
    loss = load_config(top, given).loss
    assert (loss.clip_eps_high, loss.aggregation) == (None, "trajectory_mean")


def test_what_an_algorithm_brings_and_a_saved_config_has_otherwise_is_named(tmp_path: Path) -> None:
    vain = "no effect on cispo: optim.critic_lr and optim.critic_warmup_ratio (for want of a critic)"
    assert remarks(load_config("minihop", {"algo": "cispo"})) == [vain]
    saved = write(tmp_path / "config.yaml", to_yaml(load_config("minihop", {"algo": "grpo"})))
    assert remarks(load_config(saved, {"algo": "cispo"})) == [
        "loss.clip_eps_high is none; cispo comes with 4.0",
        "loss.aggregation is trajectory_mean; cispo comes with token_mean",
        vain,
    ]
    assert remarks(load_config(saved, {"algo": "cispo", "stage": "sft"})) == []


@pytest.mark.parametrize("algo", ["ppo", "turn_ppo", "s_ppo", "so_ppo", "grpo", "gspo", "so_grpo"])
def test_the_papers_algorithms_bring_no_settings(algo: str) -> None:
    """What gspo's own paper publishes is documented and not applied, so recorded runs stay comparable."""
    assert not ALGORITHMS[algo].defaults
    chosen = load_config("minihop", {"algo": algo})
    group = {"rollout.group_size": 8} if ALGORITHMS[algo].advantage == "group" else {}
    other = load_config("minihop", {"algo": "ppo", **group})
    assert dataclasses.replace(chosen, algo="ppo") == other
    if algo == "gspo":
        assert ALGORITHMS[algo].published == {"loss.clip_eps": 3e-4, "loss.clip_eps_high": 4e-4}


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_what_an_algorithm_brings_and_publishes_are_settings(algo: str) -> None:
    known = {field.name for field in fields()}
    row = ALGORITHMS[algo]
    assert {*row.defaults, *row.published} <= known
    load_config("minihop", {"algo": algo, **row.published})
    flat = flatten(load_config("minihop", {"algo": algo}))
    assert not {*row.defaults, *row.published} & set(unread(row, flat))
    assert {name: flat[name] for name in row.defaults} == dict(row.defaults)


def test_a_wrong_setting_of_an_algorithm_from_outside_is_named(tmp_path: Path) -> None:
    file = write(
        tmp_path / "mine.py",
        "from sorl_train.algorithms import Algorithm\n"
        "ALGORITHM = Algorithm('turn', 'gae', surrogate='cispo', defaults={'loss.clip_epss': 0.1})\n",
    )
    with pytest.raises(UserError, match=r"mine\.py, its defaults: unknown key 'loss\.clip_epss'.*clip_eps"):
        load_config("minihop", {"algo": str(file)})


def test_an_empty_file_and_an_empty_section_change_nothing(tmp_path: Path) -> None:
    assert load_config(write(tmp_path / "empty.yaml", "")) == TrainConfig()
    assert load_config(write(tmp_path / "section.yaml", "optim:\n# lr: 1\nalgos:\n")) == TrainConfig()
    child = write(tmp_path / "child.yaml", "base: some.yaml\noptim:\n")
    write(tmp_path / "some.yaml", "optim: {lr: 0.5}")
    assert load_config(child).optim.lr == 0.5


def test_loading_leaves_its_input_alone() -> None:
    overrides = {"task_args": {"hops": [1]}, "task_args.top_k": 2}
    assert load_config("minihop", overrides).task_args == {"hasty": 0.75, "hops": [1], "top_k": 2}
    assert overrides == {"task_args": {"hops": [1]}, "task_args.top_k": 2}


# -- errors name the place, the value and the next move --------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("optim: {lrr: 1}", ["unknown key 'optim.lrr'", "Did you mean 'optim.lr'?"]),
        ("lr: 1e-4", ["unknown key 'lr'", "'optim.lr'"]),
        ("optim.lr: 1", ["unknown key 'optim.lr'", "Write it nested: optim: {lr: ...}"]),
        ("optim: {lr: .nan}", ["optim.lr should be a finite number, it is nan"]),
        ("update: {epochs: true}", ["update.epochs should be a valid integer, it is True"]),
        ("update: {epochs: null}", ["update.epochs should be a valid integer, it is None"]),
        ("hardware: {gradient_checkpointing: 1}", ["should be a valid boolean, it is 1"]),
        ("task_args: [1]", ["task_args should be a valid dictionary, it is [1]"]),
        ("algo: so_pppo", ["c.yaml: algo: unknown algorithm 'so_pppo'", "Did you mean 'so_ppo'"]),
        ("loss: {kl_type: k9}", ["loss.kl_type should be 'k1', 'k2', 'k3' or 'k3_unbiased', it is 'k9'"]),
        ("algos: {grpo: {rolout: {}}}", ["algos.grpo: unknown key 'rolout'", "'rollout"]),
        (
            "algos: {grpo: {rollout: {group_size: x}}}",
            ["algos.grpo: rollout.group_size should be a valid integer"],
        ),
        ("algos: {grpo: {algo: ppo}}", ["'algos.grpo' cannot change 'algo'"]),
        ("seed: 1\noptim: {lr: 1\n", ["line 3: not valid YAML"]),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = write(tmp_path / "c.yaml", text)
    with pytest.raises(UserError) as error:
        load_config(path)
    for part in (*parts, "c.yaml"):
        assert part in str(error.value)


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path / "mine.yaml", "")
    with pytest.raises(UserError, match=r"no config file .*min\.yaml.*Did you mean 'mine\.yaml'"):
        load_config(tmp_path / "min.yaml")
    with pytest.raises(UserError, match="Did you mean 'quickstart'"):
        load_config("quikstart")


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("batch_size", "'rollout.batch_size' or 'sft.batch_size'"),
        ("update.batch_size", "batch_size'"),
        ("clip_bias_norms", "'loss.clip_bias_norm'"),
        ("rollout.groupsize", "'rollout.group_size'"),
        ("lora", "It is a section: set its fields, lora.rank, lora.alpha."),
        ("zzz", "sorl-train --help all"),
        ("learning_rate", "'optim.lr' or 'sft.lr'"),
        ("optim.learning-rate", "'optim.lr' or 'sft.lr'"),
        ("max_steps", "'update.steps' or 'sft.steps'"),
        ("beta", "'loss.kl_coef'?"),
    ],
)
def test_suggestions(name: str, suggestion: str) -> None:
    assert suggestion in suggest_key(name)


def test_names_of_other_trainers_lead_to_settings_that_exist() -> None:
    known = {field.name for field in fields()}
    assert {name for names in NAMES_ELSEWHERE.values() for name in names} <= known
    assert not known & NAMES_ELSEWHERE.keys()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"search.corpus": "a", "search.url": "b"},
            r"search.corpus \(a\) and search.url \(b\) exclude each other",
        ),
        (
            {"algo": "so_grpo", "replay.size": 4, "replay.mode": "recent", "replay.per_group": 5},
            r"replay.per_group 5 is more than the buffer holds \(replay.size 4\)",
        ),
        ({"optim": 3, "optim.lr": 1}, "optim is set to 3 as a whole"),
        ({"search.corpus": "a", "search.cache": "b"}, r"search.cache \(b\) keeps .* give search.url"),
    ],
)
def test_settings_that_do_not_fit_together(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config("minihop", overrides)


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(UserError) as error:
        checked(seed=-1, optim__lr=-1.0)
    assert "seed" in str(error.value) and "optim.lr" in str(error.value)
    with pytest.raises(UserError, match="2 settings do not fit"):
        checked(search__corpus="a", search__url="b", rollout__group_size=3)


# -- values ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "value"), [("1e-4", 1e-4), ("-2E3", -2000.0), ("1e4x", "1e4x"), ("2020-01-02", "2020-01-02")]
)
def test_yaml_numbers_and_dates(text: str, value: object) -> None:
    assert parse_yaml(text, "here") == value


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("optim.lr", "1e-4", 1e-4),
        ("model", "2024", "2024"),
        ("model", "a: b", "a: b"),
        ("data", "none", None),
        ("optim.max_grad_norm", "none", None),
        ("log.tensorboard", "false", False),
        ("task_args.hops", "[1, 2]", [1, 2]),
        ("task_args", "{hops: [1]}", {"hops": [1]}),
    ],
)
def test_values_from_the_command_line(name: str, text: str, value: object) -> None:
    assert value_from_text(name, text) == value


def test_a_whole_number_becomes_a_float_where_one_is_wanted() -> None:
    rate = build({"optim": {"lr": 1}}).optim.lr
    assert rate == 1.0 and type(rate) is float


# -- saving ----------------------------------------------------------------------------------------------------
def test_the_hash_sees_every_setting_but_the_run_folder() -> None:
    config = TrainConfig()
    assert config_hash(dataclasses.replace(config, run_dir="elsewhere")) == config_hash(config)
    assert config_hash(checked(optim__lr=2e-6)) != config_hash(config)
    assert config_hash(dataclasses.replace(config, task_args={"a": 1})) != config_hash(config)
