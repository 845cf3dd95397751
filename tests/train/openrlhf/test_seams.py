"""Each place where the engine takes hold of OpenRLHF, DeepSpeed or vLLM: a version that moves one fails here first."""

from __future__ import annotations

import argparse
import importlib
import inspect
import runpy
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from transformers import Qwen2Config, Qwen2ForCausalLM

from sorl_env.registry import load_task
from sorl_train.config.files import load_config
from sorl_train.config.settings import OptimConfig
from sorl_train.learner.optimizer_step import adamw
from sorl_train.models.critic import load_critic
from sorl_train.models.policy import load_policy
from sorl_train.openrlhf.flags import ALLOWED, as_arguments, openrlhf_flags
from sorl_train.rollout.environments import make_env
from sorl_train.run.display import Display
from sorl_train.run.folder import RunDir
from sorl_train.run.recorder import Recorder

from .conftest import SHORT

pytestmark = [pytest.mark.openrlhf, pytest.mark.usefixtures("importable")]


def plain(remote_class: Any) -> Any:
    """The class behind ``@ray.remote``."""
    return remote_class.__ray_metadata__.modified_class


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "_ray_trace_ctx"]


def test_versions_are_those_tested_with() -> None:
    from sorl_train.openrlhf.checks import check_versions

    check_versions()


def test_policy_and_critic_workers() -> None:
    from openrlhf.trainer.ray import ppo_actor, ppo_critic

    for module, name in ((ppo_actor, "PolicyModelActor"), (ppo_critic, "CriticModelActor")):
        worker = plain(getattr(module, name))
        assert hasattr(module, "NaiveReplayBuffer"), f"{module.__name__} builds no NaiveReplayBuffer any more"
        assert "NaiveReplayBuffer(" in inspect.getsource(module)
        for method in ("init_model_from_pretrained", "reload_states", "offload_states"):
            assert hasattr(worker, method), f"{name}.{method} is gone"
    source = inspect.getsource(plain(ppo_actor.PolicyModelActor).init_model_from_pretrained)
    assert "self.actor, self.actor_optim, self.actor_scheduler = strategy.prepare" in source
    assert "self.tokenizer" in source
    assert "self.critic, self.critic_optim, self.critic_scheduler = strategy.prepare" in inspect.getsource(
        plain(ppo_critic.CriticModelActor).init_model_from_pretrained
    )


def test_what_stands_in_for_flash_attn_is_no_attention_kernel() -> None:
    """OpenRLHF imports it; transformers and vLLM, which looks for a module in it, must not take it for the package."""
    from openrlhf.models import ring_attn_utils
    from transformers.utils import is_flash_attn_2_available

    assert "without_flash_attn" in inspect.getfile(ring_attn_utils.pad_input)
    assert not is_flash_attn_2_available()
    with pytest.raises(ModuleNotFoundError, match="flash-attn is not installed"):
        ring_attn_utils.pad_input()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn.ops.triton.rotary")


def test_the_extra_has_all_that_openrlhf_asks_for_but_flash_attn() -> None:
    """OpenRLHF is installed without what it asks for, and its next version may ask for something else."""
    ours = {r.name: r.specifier for r in map(Requirement, metadata.requires("sorl") or [])}
    theirs = [Requirement(text) for text in metadata.requires("openrlhf") or []]
    wanted = {r.name: r.specifier for r in theirs if r.marker is None or r.marker.evaluate({"extra": "vllm"})}
    assert str(wanted.pop("flash-attn")) == "==2.8.3"
    assert len(wanted) > 20 and wanted.keys() <= ours.keys()
    assert all(ours[name] == wanted[name] for name in wanted if "==" in str(wanted[name]))


def test_trainers() -> None:
    from openrlhf.trainer import ppo_trainer, ppo_trainer_async

    base = ppo_trainer.BasePPOTrainer
    assert parameters(base.train_step) == ["self", "rollout_samples", "global_step"]
    saved = ["self", "global_step", "logs_dict", "client_states"]
    assert parameters(base.save_logs_and_checkpoints) == saved
    for trainer in (plain(ppo_trainer.PPOTrainer), plain(ppo_trainer_async.TrainingActor)):
        assert issubclass(trainer, base)
        source = inspect.getsource(trainer.fit)
        assert "self.train_step(rollout_samples, global_step)" in source
        assert "self.save_logs_and_checkpoints(global_step" in source and "timing/generation" in source
    for module in (ppo_trainer, ppo_trainer_async):
        assert hasattr(module, "prepare_datasets") and hasattr(module, "SamplesGenerator")
    assert "vllm_lock" in parameters(plain(ppo_trainer_async.TrainingActor).__init__)
    started = inspect.getsource(plain(ppo_trainer_async.PPOTrainerAsync).__init__)
    assert "GenerateSamplesActor.remote(" in started and "TrainingActor.remote(" in started


def test_new_weights_are_announced_inside_the_lock() -> None:
    """``Announcing`` comes after OpenRLHF's asynchronous trainer and before its base, whose method that calls."""
    from openrlhf.trainer import ppo_trainer, ppo_trainer_async
    from openrlhf.trainer.ray import vllm_engine

    from sorl_train.openrlhf import trainers

    order = list(trainers.AsyncTrainingActor.__mro__)
    base = order.index(ppo_trainer.BasePPOTrainer)
    theirs = order.index(plain(ppo_trainer_async.TrainingActor))
    assert theirs < order.index(trainers.Announcing) == base - 1
    source = inspect.getsource(plain(ppo_trainer_async.TrainingActor).broadcast_to_vllm)
    inside = source.partition("try:")[2].partition("finally:")[0]
    # Ray copies inherited methods into its class: the synchronous trainer must have its own
    assert trainers.Trainer.broadcast_to_vllm is trainers.Trainer.__dict__["broadcast_to_vllm"]
    assert "self.announce_version()" in inspect.getsource(trainers.Trainer.broadcast_to_vllm)
    assert "vllm_lock.acquire" in source.partition("try:")[0] and "super().broadcast_to_vllm()" in inside
    actor = plain(vllm_engine.RolloutRayActor)
    assert all(
        inspect.iscoroutinefunction(method) for method in (actor.pause_generation, actor.resume_generation)
    )


def test_a_checkpoint_is_loaded_from_the_folder_it_is_given() -> None:
    from openrlhf.trainer import ppo_trainer
    from openrlhf.trainer.ray import ppo_actor, ppo_critic

    from sorl_train.openrlhf.workers import ACTOR, CRITIC

    policy = inspect.getsource(plain(ppo_actor.PolicyModelActor).init_model_from_pretrained)
    critic = inspect.getsource(plain(ppo_critic.CriticModelActor).init_model_from_pretrained)
    assert f'os.path.join(args.ckpt.path, "{ACTOR}")' in policy
    assert f'os.path.join(args.ckpt.path, "{CRITIC}")' in critic
    states = inspect.getsource(ppo_trainer.BasePPOTrainer.init_checkpoint_states)
    assert f'os.path.join(self.args.ckpt.path, "{ACTOR}")' in states


def test_where_the_value_head_takes_hold() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    from openrlhf.models import model

    zero_2 = inspect.getsource(DeepSpeedZeroOptimizer.step)
    assert "scaled_global_grad_norm = self.scaled_global_norm()" in zero_2
    zero_3 = inspect.getsource(sys.modules[DeepSpeedZeroOptimizer_Stage3.__module__])  # the method is wrapped
    assert "norm_groups = self._get_norm_groups()" in zero_3
    assert "loaded_checkpoint_dp_world_size = None" in inspect.getsource(DeepSpeedEngine.__init__)
    critic = inspect.getsource(model._get_critic_model)
    assert "if action_mask is None:" in critic and "return outputs" in critic


def test_sampling() -> None:
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
    from openrlhf.trainer.ray import vllm_engine
    from openrlhf.utils.agent import AgentExecutorBase

    assert "self._process_response_into_experience(response" in inspect.getsource(
        SamplesGenerator._generate_vllm
    )
    assert "self.eval_dataloader" in inspect.getsource(SamplesGenerator.generate_eval_samples)
    expected = [
        "self",
        "prompt",
        "label",
        "sampling_params",
        "max_length",
        "hf_tokenizer",
        "llm_engine",
        "images",
    ]
    assert parameters(AgentExecutorBase.execute) == expected
    actor = plain(vllm_engine.RolloutRayActor)
    assert parameters(actor.generate)[:3] == ["self", "prompt_token_ids", "sampling_params"]
    assert "llm_engine=self" in inspect.getsource(actor.generate_responses)
    assert "RolloutRayActor.options(" in inspect.getsource(vllm_engine.create_vllm_engines)


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (0.7, 0.9)])
def test_an_evaluation_draws_as_the_local_engines(temperature: float, top_p: float, tmp_path: Path) -> None:
    from sorl_train.openrlhf.train_step import TrainStep

    asked: list[dict[str, Any]] = []

    class Evaluator:
        def generate_eval_samples(self, **how: Any) -> list[Any]:
            asked.append(how)
            return []

    step = TrainStep()
    step.config = load_config(
        "quickstart", {"eval.temperature": temperature, "sampler.top_p": 0.9}, shared=SHORT
    )
    step.eval_env, step.evaluator = make_env(step.config, evaluation=True), Evaluator()
    run_dir = RunDir.create(tmp_path / "run", step.config)
    step.recorder = Recorder(step.config, run_dir, step.eval_env.task, Display(sys.stdout))
    assert step.evaluate_policy(4, search_off=True) == {}
    assert [(how["temperature"], how["top_p"]) for how in asked] == [(temperature, top_p)]


def test_the_gradient_is_divided_by_the_loss_scale_before_it_is_clipped() -> None:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    for optimizer in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
        assert parameters(optimizer.override_loss_scale) == ["self", "loss_scale"]
        assert "combined_scale = clip * self.loss_scale" in inspect.getsource(
            sys.modules[optimizer.__module__]
        )


def test_what_tells_that_a_gradient_is_not_finite() -> None:
    """ZeRO-2 looks for it and steps aside, ZeRO-3 does not but has all gradients of a rank in one buffer."""
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    assert "if self.overflow:" in inspect.getsource(stage_1_and_2.DeepSpeedZeroOptimizer.step)
    assert "isnan(self.grad_partitions_flat_buffer)" in inspect.getsource(stage3)


def parser_of_openrlhf() -> argparse.ArgumentParser:
    """The parser that OpenRLHF's command line builds; it stands in its ``__main__`` part."""
    found: list[argparse.ArgumentParser] = []

    class Built(Exception):
        pass

    def parse_args(self: argparse.ArgumentParser, *_: Any) -> None:
        found.append(self)
        raise Built

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        with pytest.raises(Built):
            runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
    return found[0]


def test_a_user_may_set_flags_that_openrlhf_has() -> None:
    names = {
        option.removeprefix("--")
        for action in parser_of_openrlhf()._actions
        for option in action.option_strings
    }
    assert set(ALLOWED) <= names


@pytest.mark.parametrize("algo", ["so_ppo", "so_grpo"])
def test_openrlhf_parses_what_is_set(algo: str, tmp_path: Path) -> None:
    group = {"rollout.group_size": 4} if algo == "so_grpo" else {}
    config = load_config("quickstart", group | {"algo": algo, "optim.max_grad_norm": None}, shared=SHORT)
    flags = openrlhf_flags(config, RunDir(tmp_path), "model", load_task("minihop").limits, resume=None)
    parsed = vars(parser_of_openrlhf().parse_args(as_arguments(flags)))
    for name, value in flags.items():
        assert parsed[name] == (value if not isinstance(value, tuple) else list(value)), name


def test_the_same_parameters_decay_on_both_engines(tiny_folder: str) -> None:
    """OpenRLHF exempts biases and norms; the value head, which is sorl's own on both engines, follows its rule."""
    from openrlhf.models import get_llm_for_sequence_regression
    from openrlhf.utils.deepspeed.deepspeed_utils import get_optimizer_grouped_parameters

    optim = OptimConfig(weight_decay=0.1)
    with_biases = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )
    for model in (load_policy(tiny_folder, "cpu"), with_biases):
        theirs = get_optimizer_grouped_parameters(model, optim.weight_decay)
        ours = adamw(model, optim).param_groups
        assert (
            [group["weight_decay"] for group in ours]
            == [group["weight_decay"] for group in theirs]
            == [0.1, 0.0]
        )
        for one, other in zip(ours, theirs, strict=True):
            assert [id(p) for p in one["params"]] == [id(p) for p in other["params"]] != []
    critic = get_llm_for_sequence_regression(tiny_folder, "critic", attn_implementation="sdpa")
    names = {id(p): name.removeprefix("model.") for name, p in critic.named_parameters()}
    theirs = {names[id(p)] for p in get_optimizer_grouped_parameters(critic, 0.1)[1]["params"]}
    local = load_critic(tiny_folder, "cpu")
    names = {id(p): name.removeprefix("backbone.") for name, p in local.named_parameters()}
    assert {names[id(p)] for p in adamw(local, optim).param_groups[1]["params"]} == theirs | {"head.bias"}
