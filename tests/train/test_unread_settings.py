"""Which settings an algorithm reads: what the table says, what an update does, and what the user is told."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from sorl_env.errors import UserError
from sorl_train.algorithms import ALGORITHMS, Algorithm
from sorl_train.cli import main
from sorl_train.config.config_rules import remarks
from sorl_train.config.files import load_config, packaged_configs, read_resolved, to_yaml, with_overrides
from sorl_train.config.schema import fields, flatten, unread
from sorl_train.config.settings import TrainConfig
from sorl_train.engine import LocalEngine
from sorl_train.learner.advantages import correct, estimate_advantages
from sorl_train.learner.backend import TorchBackend
from sorl_train.learner.batch import collate
from sorl_train.learner.dapo import drop_rows_without_loss
from sorl_train.learner.update import CriticUpdate, PolicyUpdate
from sorl_train.models.forward import action_stats
from sorl_train.models.policy import Critic

from .learner.test_advantages import made

# What an update changes is tried by other values of each of its settings: these, or another choice.
OTHER: dict[str, Any] = {
    "loss.ratio": "sequence",
    "loss.clip_eps": 0.02,
    "loss.clip_eps_high": 0.9,
    "loss.dual_clip": 1.01,
    "loss.sapo_tau_pos": 3.0,
    "loss.sapo_tau_neg": 3.0,
    "loss.clip_bias_delta": 0.002,
    "loss.gamma": 0.5,
    "loss.gae_lambda": 0.5,
    "loss.turn_weight": 0.3,
    "loss.kl_coef": 0.5,
    "loss.entropy_coef": 0.1,
    "loss.value_clip": 0.01,
    "optim.lr": 0.02,
    "optim.critic_lr": 0.02,
    "optim.warmup_ratio": 0.5,
    "optim.critic_warmup_ratio": 0.5,
    "optim.max_grad_norm": None,
    "update.steps": 3,
    "update.mini_batch_size": 4,
    "update.epochs": 2,
    "update.target_kl": 1e-9,
    "update.trust_kl": 1e-9,
    "update.critic_warmup_steps": 1,
}
# Settings of an update that this small one does not show, and why.
ELSEWHERE = {
    "optim.weight_decay optim.beta1 optim.beta2 optim.adam_eps": "of AdamW, which every actor has",
    "update.micro_batch_size update.critic_micro_batch_size update.log_prob_micro_batch_size": "speed alone",
    "update.skip_without_signal": "needs a mini-batch without a signal; the policy of every algorithm reads it",
    "loss.kl_model": "the engine loads it, whatever the algorithm",
    "loss.entropy_target": "needs loss.entropy_coef; the policy of every algorithm reads it",
    "update.trust_max_scale": "needs a batch that stays far inside the region",
}
# Settings that let each of the others show.
SHOWN = {
    "rollout.batch_size": 8,
    "rollout.group_size": 2,
    "update.mini_batch_size": 2,
    "update.steps": 2,
    "optim.lr": 0.01,
    "optim.warmup_ratio": 0.1,
    "optim.critic_warmup_ratio": 0.1,
    "optim.adam_eps": 1e-2,
    "optim.max_grad_norm": 0.05,
    "loss.kl_coef": 0.05,
    "loss.clip_bias_target": "gradient",
    "loss.clip_bias_delta": 0.02,
}
ROOT = Path(__file__).resolve().parents[2]
ALGOS = ("so_ppo", "grpo", "mt_grpo", "gigpo", "sapo", "topr")  # every kind of row


def update(config: TrainConfig) -> tuple[Tensor, dict[str, float]]:
    """The weights of policy and critic after the first training step on the same trajectories, and its metrics."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    policy, backbone = (
        LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes)) for _ in range(2)
    )
    batch = collate(made(), anchor_state=config.anchor_state)
    mask = batch.action_mask
    old = (-4.2 + torch.randn(mask.shape)) * mask
    noise, values = 0.2 * torch.randn(mask.shape) * mask, torch.randn(mask.shape) * mask
    # of turns, too, none are equal
    rewards = batch.token_rewards * torch.linspace(1.0, 2.0, len(batch))[:, None]
    batch = batch.with_fields(
        token_rewards=rewards,
        old_log_probs=old,
        ref_log_probs=0.9 * old,
        rollout_log_probs=old + noise,
        values=values,
    )
    batch = estimate_advantages(batch, config.algorithm.advantage, config.loss)
    batch, _ = correct(drop_rows_without_loss(batch), config.correction, config.algorithm.ratio)
    with torch.no_grad():  # older weights sampled the batch
        began = action_stats(policy, batch.token_ids, batch.action_mask, temperature=1.0).log_probs
    batch = batch.with_fields(start_log_probs=began)
    engine = object.__new__(LocalEngine)

    def adamw(model: Any) -> Any:
        return torch.optim.AdamW(model.parameters(), eps=config.optim.adam_eps)

    engine.config, engine.policy, engine.recorder = config, policy, MagicMock()
    engine.recorder.is_saved.return_value = False
    engine.step = 0
    engine.policy_update = PolicyUpdate(TorchBackend(policy, adamw(policy)), config)
    critic = Critic(backbone.model) if config.algorithm.needs_critic else None
    engine.critic_update = (
        None if critic is None else CriticUpdate(TorchBackend(critic, adamw(critic)), config)
    )
    metrics = engine.update(batch, 1)
    models = [policy, *([] if critic is None else [critic])]
    return torch.cat([p.detach().flatten() for m in models for p in m.parameters()]), metrics


def made_config(algo: str, **changes: Any) -> TrainConfig:
    return load_config("minihop", {"algo": algo}, shared=SHOWN | changes)


def others(values: dict[str, Any]) -> dict[str, Any]:
    """Another value of each setting of an update. A number whose declaration does not tell one has to be in a table."""
    elsewhere = {name for group in ELSEWHERE for name in group.split()}
    found = {}
    for field in fields():
        if field.name.startswith(("loss.", "optim.", "update.")) and field.name not in elsewhere:
            choices = (True, False) if field.type is bool else field.choices
            other = [choice for choice in choices if choice != values[field.name]]
            found[field.name] = OTHER[field.name] if field.name in OTHER else other[0]
    return found


def modules_of(*roots: str) -> dict[str, str]:
    """The source of the modules that these ones import, themselves included."""
    found: dict[str, str] = {}
    names = list(roots)
    while names:
        name = names.pop()
        path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
        if name not in found and path.is_file():
            found[name] = path.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(found[name])):
                if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("sorl"):
                    names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


OPENRLHF = [f"sorl_train.openrlhf.{path.stem}" for path in ROOT.glob("sorl_train/openrlhf/*.py")]


@pytest.mark.parametrize(("engine", "roots"), [("local", ["sorl_train.train_rl"]), ("openrlhf", OPENRLHF)])
def test_every_setting_is_read_by_each_engine_or_refused(engine: str, roots: list[str]) -> None:
    """``Needs`` beside a setting says that an engine does not read it, ``LocalOnly`` that OpenRLHF refuses it."""
    given = flatten(TrainConfig()) | {"engine": engine}
    modules = modules_of(*roots)
    known = {name for name in modules if name.startswith("sorl_train.config.")} - {
        "sorl_train.config.settings"
    }
    source = "".join(text for name, text in modules.items() if name not in known)
    missing = []
    for field in fields():
        of_engines = [need for need in field.needs if need.text.startswith("engine=")]
        section, _, leaf = field.name.rpartition(".")
        is_read = section == "alarm" or re.search(  # which reads its limits by name
            rf"\.{leaf}\b|\b{leaf}=|asdict\(config\.{section}\)", source
        )
        refused = engine == "openrlhf" and (field.local_only or section == "replay")
        if not is_read and not refused and all(need.is_met(ALGORITHMS["ppo"], given) for need in of_engines):
            missing.append(field.name)
    assert not missing


@pytest.mark.parametrize("algo", ALGOS)
def test_the_settings_that_change_an_update_are_those_that_the_algorithm_reads(algo: str) -> None:
    config = made_config(algo)
    plain, metrics = update(config)
    values = flatten(config)
    wrong = []
    for name, other in others(values).items():
        if name == "loss.ratio" and config.algorithm.ratio == other:
            other = "token"
        assert other != values[name], name
        weights, found = update(with_overrides(config, {name: other}))
        moved = not torch.equal(weights, plain)
        shows = moved or found != metrics
        # the clip range moves no weight of topr, but its metrics; the norm of ppo that is named apart is logged anyway
        if moved if name in unread(config.algorithm, values) else not shows:
            wrong.append((name, other, moved))
    assert not wrong


def test_what_is_not_known_of_a_surrogate_from_outside_is_accepted() -> None:
    outside = Algorithm("token", "group", surrogate=lambda ratio, advantage, clip: ratio * advantage)
    values = flatten(TrainConfig(algo="so_grpo"))
    assert {"loss.dual_clip", "loss.sapo_tau_pos"} & set(unread(outside, values)) == set()
    assert {"loss.gae_lambda", "loss.clip_bias_delta"} <= set(unread(outside, values))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"algo": "so_grpo", "loss.gae_lambda": 1.0},
            "gae_lambda 1.0 has no effect on algo so_grpo: it needs a critic. Leave it out, or use --algo ppo",
        ),
        ({"loss": {"turn_weight": 0.5}}, "loss.turn_weight 0.5 has no effect"),
    ],
)
def test_what_is_given_for_a_run_has_an_effect_on_it(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_config("minihop", given)
    load_config("minihop", {"algo": given.get("algo", "so_ppo")}, shared=given)  # as if from a file
    load_config("minihop", {**given, "stage": "sft"})


def test_a_value_that_switches_nothing_on_may_be_given_in_vain() -> None:
    given = {"critic": None, "loss.value_clip": None, "cluster.flags": {}}
    assert load_config("minihop", {"algo": "so_grpo", **given}).cluster.flags == {}
    with pytest.raises(UserError, match=r"cluster\.flags .* has no effect"):
        load_config("minihop", {"cluster.flags": {"train.seed": 1}})


@pytest.mark.parametrize("name", sorted(packaged_configs()))
def test_every_packaged_config_comes_back_with_every_kind_of_algorithm(name: str, tmp_path: Path) -> None:
    """A saved config lists all settings, also those without effect: reading it, or resuming, refuses none of them."""
    for algo in ("ppo", "so_grpo", "gigpo"):
        config = load_config(name, {"algo": algo, "task_args.note": "yes: no # ü", "tiny.num_heads": 2})
        path = tmp_path / f"{algo}.yaml"
        path.write_text(to_yaml(config), encoding="utf-8")
        assert read_resolved(path) == config
    assert load_config(path) == config
    assert read_resolved(path, {"update.steps": 3}).update.steps == 3
    with pytest.raises(UserError, match="has no effect"):
        read_resolved(path, {"loss.gae_lambda": 1.0})


def test_what_a_shared_config_holds_in_vain_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = "no effect on so_grpo: optim.critic_lr and optim.critic_warmup_ratio (for want of a critic)"
    assert remarks(load_config("minihop", {"algo": "so_grpo"})) == [line]
    assert remarks(load_config("minihop")) == []
    assert main(["--algo", "so_grpo", "--dry_run"]) == 0
    assert line in capsys.readouterr().out
    shared = {"cluster.nodes": 2, "loss.kl_in": "reward", "loss.kl_coef": 0.1}
    assert remarks(load_config("minihop", shared=shared)) == [
        "no effect on so_ppo: cluster.nodes (for want of engine=openrlhf)",
        "loss.kl_type k2 in the reward is another penalty than the KL: use k1 with loss.kl_in=reward",
    ]


def test_a_warm_up_of_the_critic_trains_the_policy_where_there_is_none() -> None:
    """Such steps would train nothing at all."""
    waiting = made_config("so_grpo", **{"update.critic_warmup_steps": 1})
    assert (waiting.update.critic_warmup_steps, waiting.critic_warmup_steps) == (1, 0)
    weights, metrics = update(waiting)
    assert metrics["loss/policy_updates"] == 3.0
    assert torch.equal(weights, update(made_config("so_grpo"))[0])
    assert "loss/policy_updates" not in update(made_config("so_ppo", **{"update.critic_warmup_steps": 1}))[1]
