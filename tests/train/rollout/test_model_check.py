"""Which models are exact: sampler, trainer and the model itself agree, or the model is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel

from sorl_env.errors import UserError
from sorl_train import cli
from sorl_train.evaluate import ask
from sorl_train.evaluate import cli as evaluate
from sorl_train.models.attention import AttentionMasks
from sorl_train.models.forward import action_stats, disable_dropout
from sorl_train.models.policy import Critic, load_policy, load_tokenizer
from sorl_train.rollout import model_check
from sorl_train.rollout.model_check import check_critic, check_policy
from sorl_train.serve_agent import cli as serve

from ..conftest import WORLD
from .architectures import EXACT, MORE_EXACT, NEW, OLD, REFUSED, WINDOW, build, talk, three_ways

# Prompts, sampled tokens and replies: far beyond windows of 8, rows of different lengths that come and go.
LENGTHS = [(21, 5, 9), (4, 12, 1), (11, 2, 17), (1, 7, 3)]


def assert_exact(model_type: str, settings: dict[str, Any]) -> None:
    model = build(model_type, settings)
    sampled, trained, own = three_ways(model, talk(model, LENGTHS))
    assert len(own) == 3 * sum(new for _, new, _ in LENGTHS) and own.std() > 0.1
    torch.testing.assert_close(trained, own, atol=1e-4, rtol=0)
    torch.testing.assert_close(sampled, own, atol=1e-4, rtol=0)
    disable_dropout(model)
    check_policy(model, 256, sampled=True, trained=True)


@pytest.mark.parametrize("name", EXACT)
def test_sampler_and_trainer_compute_what_the_model_does(name: str) -> None:
    assert_exact(*EXACT[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_EXACT)
def test_sampler_and_trainer_compute_what_other_models_do(name: str) -> None:
    assert_exact(*MORE_EXACT[name])


SLOW_TO_IMPORT = ("jamba", "qwen3_next", "granitemoehybrid")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW_TO_IMPORT)) for n in REFUSED]
)
def test_a_model_that_would_not_be_exact_is_refused_by_name(name: str) -> None:
    model_type, settings, reason = REFUSED[name]
    with pytest.raises(UserError, match=reason):
        check_policy(build(model_type, settings), 256, sampled=True, trained=False)


def test_recurrent_models_are_refused_for_our_sampler_only() -> None:
    check_policy(build("mamba", OLD), 256, sampled=False, trained=False)


@pytest.mark.parametrize("name", ["gemma2", "phi3, window"])
def test_critics_of_exact_models_pass(name: str) -> None:
    model_type, settings = EXACT[name]
    critic = Critic(AutoModel.from_config(build(model_type, settings).config, dtype=torch.float32))
    check_critic(critic, 256)


def test_a_critic_that_reads_what_comes_later_is_refused() -> None:
    critic = Critic(AutoModel.from_config(build("bert", OLD).config, dtype=torch.float32))
    with pytest.raises(UserError, match=r"the critic BertModel .* critic=FOLDER"):
        check_critic(critic, 256)


# --- faults that the check has to find, each planted ----------------------------------------------------------
def test_a_window_of_any_size_that_the_masks_ignore_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """4,096 tokens see no window; the check makes it shorter than its sequences."""
    model = build("mistral", NEW | {"sliding_window": 4096})
    check_policy(model, 8192, sampled=True, trained=False)
    assert model.config.sliding_window == 4096
    monkeypatch.setattr(AttentionMasks, "of", lambda model: AttentionMasks({"full_attention": None}, False))
    with pytest.raises(
        UserError, match=r"MistralForCausalLM .* is not exact with sampler.*differ .* by up to"
    ):
        check_policy(model, 8192, sampled=True, trained=False)


@pytest.mark.parametrize("name", ["granite", "gemma2", "cohere"])
def test_logits_that_leave_out_a_models_own_scale_are_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def base_model_and_head(model: Any, pick: Any, inputs: dict[str, Any]) -> Tensor:
        hidden = model.base_model(**inputs).last_hidden_state
        logits: Tensor = model.get_output_embeddings()(pick(hidden))
        return logits

    monkeypatch.setattr("sorl_train.models.forward.logits_at", base_model_and_head)
    with pytest.raises(UserError, match="is not exact with the trainer"):
        check_policy(build(*EXACT[name]), 256, sampled=False, trained=False)


def test_positions_that_are_off_by_one_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of a second turn: rotary positions that are all shifted change nothing."""
    select = model_check.RowCache.select

    def shifted(self: Any, rows: slice, new_tokens: int) -> Any:
        positions, mask = select(self, rows, new_tokens)
        return positions + (positions > 0), mask

    monkeypatch.setattr(model_check.RowCache, "select", shifted)
    with pytest.raises(UserError, match=r"LlamaForCausalLM .* is not exact with sampler"):
        check_policy(build("llama", NEW), 256, sampled=True, trained=False)


def test_noise_in_training_mode_is_found() -> None:
    model = build("llama", NEW | {"attention_dropout": 0.1})
    with pytest.raises(UserError, match="is not exact with the trainer"):
        check_policy(model, 256, sampled=False, trained=True)
    disable_dropout(model)
    check_policy(model, 256, sampled=False, trained=True)
    noisy = build("phimoe", NEW | {"router_jitter_noise": 0.3, "input_jitter_noise": 0.3})
    disable_dropout(noisy)
    check_policy(noisy, 256, sampled=False, trained=True)


# --- lengths --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("model_type", "settings", "limit"),
    [
        ("gpt2", OLD, 512),
        ("opt", OLD, 512),
        ("phi3", EXACT["phi3, longrope"][1], 256),
        ("llama4_text", EXACT["llama4, chunks"][1] | {"floor_scale": 128}, 64),
        ("llama", NEW | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, 512),
    ],
)
def test_trajectories_longer_than_a_models_positions_are_refused(
    model_type: str, settings: dict[str, Any], limit: int
) -> None:
    model = build(model_type, settings)
    check_policy(model, limit, sampled=True, trained=False)
    with pytest.raises(UserError, match=rf"{limit}.*{limit + 1} tokens: set limits.max_trajectory_tokens"):
        check_policy(model, limit + 1, sampled=True, trained=False)


@pytest.mark.parametrize("name", ["gpt2", "phi3, longrope"])
def test_a_long_row_does_not_push_a_longer_one_past_its_last_position(name: str) -> None:
    """A row near the last position is read together with one that has much to read: padding has no position."""
    model_type, settings = EXACT[name]
    if model_type == "gpt2":
        settings = settings | {"max_position_embeddings": 64}
    else:
        rope = settings["rope_parameters"] | {"original_max_position_embeddings": 64}
        settings = settings | {"rope_parameters": rope, "original_max_position_embeddings": 64}
    model = build(model_type, settings)
    sampled, trained, own = three_ways(model, talk(model, [(49, 2, 3), (1, 2, 25), (2, 1, 25)], turns=2))
    torch.testing.assert_close(trained, own, atol=1e-4, rtol=0)
    torch.testing.assert_close(sampled, own, atol=1e-4, rtol=0)


# --- what the check leaves as it was --------------------------------------------------------------------------
@pytest.mark.parametrize("training", [True, False])
def test_the_check_changes_nothing(training: bool) -> None:
    model = build("gemma2", NEW | {"sliding_window": 300}).train(training)
    before, config = torch.get_rng_state(), model.config.to_dict()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    disable_dropout(model)
    check_policy(model, 256, sampled=True, trained=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training is training and model.config.to_dict() == config
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_memory_that_runs_out_is_no_fault_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model_check, "feed", full)
    with pytest.raises(torch.OutOfMemoryError):
        check_policy(build("llama", NEW), 256, sampled=True, trained=False)


def test_only_the_asked_positions_go_through_the_output_layer() -> None:
    model = build("granite", EXACT["granite"][1])
    seen: list[int] = []
    head: nn.Module = model.get_output_embeddings()
    head.register_forward_hook(lambda module, args, logits: seen.append(logits.shape[:-1].numel()))
    mask = torch.zeros(3, 29, dtype=torch.bool)
    mask[0, 4:7] = mask[2, 20] = True
    action_stats(model, torch.randint(3, 90, (3, 30)), mask)
    assert seen == [4]


# --- every command that loads a policy ------------------------------------------------------------------------
@pytest.fixture(scope="module")
def mamba_folder(tiny_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("mamba")
    tokenizer = load_tokenizer(tiny_folder)
    build("mamba", OLD | {"vocab_size": len(tokenizer)}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_models_without_fast_attention_are_loaded(tmp_path: Path) -> None:
    """Gemma 2 caps its attention scores, which torch's own attention cannot."""
    build("gemma2", NEW | WINDOW).save_pretrained(tmp_path)
    assert load_policy(str(tmp_path), "cpu").config._attn_implementation == "eager"
    with pytest.raises(UserError, match=r"there is no model at .*absent"):
        load_policy(str(tmp_path / "absent"), "cpu")


def test_each_command_refuses_before_anything_starts(
    mamba_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    task = ["--task", "minihop"]
    knobs = [f"--task_args.{name}={value}" for name, value in WORLD.items()]
    training = ["--model", mamba_folder, "--task_args", str(WORLD), "--run_dir", str(run), "--algo", "grpo"]
    training += ["--rollout.group_size", "2", "--hardware.device", "cpu"]
    asking = ["--hardware.device", "cpu", *task, *knobs]
    commands = {
        "train": lambda: cli.main(training),
        "eval": lambda: evaluate.main(
            [mamba_folder, *asking, "--out", str(tmp_path / "out"), "--limit", "1"]
        ),
        "ask": lambda: ask.main(["--index", "0", "--model", mamba_folder, *asking]),
        "serve": lambda: serve.main(["--model", mamba_folder, *asking, "--port", "0"]),
    }
    for name, command in commands.items():
        assert command() not in (0, None), name
        assert "MambaForCausalLM (model type mamba) has layers" in capsys.readouterr().err, name
    assert not list(run.glob("trajectories/*")) and not list(run.glob("checkpoints/*"))
