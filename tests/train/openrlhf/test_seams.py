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

from sorl_env.task.registry import load_task
from sorl_train.config.files import load_config
from sorl_train.config.settings import OptimConfig
from sorl_train.learner.optimizer_step import adamw
from sorl_train.models.policy import load_critic, load_policy
from sorl_train.openrlhf.flags import ALLOWED, as_arguments, openrlhf_flags
from sorl_train.preflight.duration import SEATS
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
    from sorl_train.openrlhf.engine_limits import check_versions

    check_versions()


def test_vllm_samples_as_many_trajectories_at_once_as_the_plan_says() -> None:
    """OpenRLHF makes its engines without a number of their own, and in a context without another default."""
    from openrlhf.trainer.ray import vllm_engine
    from vllm.config import SchedulerConfig

    assert SchedulerConfig.DEFAULT_MAX_NUM_SEQS == SEATS
    assert "max_num_seqs" not in inspect.getsource(vllm_engine)


WORKER, TRAINER = "openrlhf.trainer.ray.", "openrlhf.trainer."
ACTOR_MODEL = WORKER + "ppo_actor:PolicyModelActor"
CRITIC_MODEL = WORKER + "ppo_critic:CriticModelActor"
ZERO_2 = "deepspeed.runtime.zero.stage_1_and_2"
ZERO_3 = "deepspeed.runtime.zero.stage3"
TRAIN = ["self.train_step(rollout_samples, global_step)", "self.save_logs_and_checkpoints(global_step"]
TRAIN += ["timing/generation"]

# Where: what has to stand in its source.
SOURCES = {
    WORKER + "ppo_actor:": ["NaiveReplayBuffer("],
    WORKER + "ppo_critic:": ["NaiveReplayBuffer("],
    WORKER + "launcher:BaseDistributedActor.__init__": ["master_port else self._get_free_port()"],
    ACTOR_MODEL + ".init_model_from_pretrained": [
        "self.actor, self.actor_optim, self.actor_scheduler = strategy.prepare",
        "self.tokenizer",
        'os.path.join(args.ckpt.path, "_actor")',
    ],
    CRITIC_MODEL + ".init_model_from_pretrained": [
        "self.critic, self.critic_optim, self.critic_scheduler = strategy.prepare",
        'os.path.join(args.ckpt.path, "_critic")',
    ],
    WORKER + "launcher:ReferenceModelActor.init_model_from_pretrained": [
        "self.model = self.strategy.prepare(model)"
    ],
    TRAINER + "ppo_trainer:BasePPOTrainer.init_checkpoint_states": [
        'os.path.join(self.args.ckpt.path, "_actor")'
    ],
    TRAINER + "ppo_trainer:PPOTrainer.fit": TRAIN,
    TRAINER + "ppo_trainer_async:TrainingActor.fit": TRAIN,
    TRAINER + "ppo_trainer_async:PPOTrainerAsync.__init__": [
        "GenerateSamplesActor.remote(",
        "TrainingActor.remote(",
    ],
    TRAINER + "ppo_utils.samples_generator:SamplesGenerator._generate_vllm": [
        "self._process_response_into_experience(response"
    ],
    TRAINER + "ppo_utils.samples_generator:SamplesGenerator.generate_eval_samples": [
        "self.eval_dataloader",
        "num_prompts=self.args.rollout.batch_size",
    ],
    WORKER + "vllm_engine:RolloutRayActor.generate_responses": ["llm_engine=self"],
    WORKER + "vllm_engine:create_vllm_engines": ["RolloutRayActor.options("],
    # the value head: its norm joins the gradient's, and the critic's outputs come without OpenRLHF's own head
    ZERO_2 + ":DeepSpeedZeroOptimizer.step": [
        "scaled_global_grad_norm = self.scaled_global_norm()",
        "if self.overflow:",  # ZeRO-2 looks for what is not finite and steps aside
    ],
    ZERO_2 + ":": ["combined_scale = clip * self.loss_scale"],  # divided before it is clipped
    ZERO_3 + ":": [
        "norm_groups = self._get_norm_groups()",
        "combined_scale = clip * self.loss_scale",
        "isnan(self.grad_partitions_flat_buffer)",  # all gradients of a rank in one buffer
    ],
    "deepspeed.runtime.engine:DeepSpeedEngine.__init__": ["loaded_checkpoint_dp_world_size = None"],
    "openrlhf.models.model:_get_critic_model": ["if action_mask is None:", "return outputs"],
}

# Where: its parameters, or the first of them.
PARAMETERS = {
    TRAINER + "ppo_trainer:BasePPOTrainer.train_step": "self rollout_samples global_step",
    TRAINER
    + "ppo_trainer:BasePPOTrainer.save_logs_and_checkpoints": "self global_step logs_dict client_states",
    "openrlhf.utils.agent:AgentExecutorBase.execute": "self prompt label sampling_params max_length hf_tokenizer "
    "llm_engine images",
    WORKER + "vllm_engine:RolloutRayActor.generate": "self prompt_token_ids sampling_params",
    ZERO_2 + ":DeepSpeedZeroOptimizer.override_loss_scale": "self loss_scale",
    ZERO_3 + ":DeepSpeedZeroOptimizer_Stage3.override_loss_scale": "self loss_scale",
}


def found_at(place: str) -> Any:
    """The module, class or function at ``module:path``; classes without their ``@ray.remote``."""
    module, _, path = place.partition(":")
    found: Any = importlib.import_module(module)
    for name in filter(None, path.split(".")):
        found = getattr(found, name)
        found = plain(found) if hasattr(found, "__ray_metadata__") else found
    return found


@pytest.mark.parametrize("place", SOURCES)
def test_what_the_source_has_to_say(place: str) -> None:
    source = inspect.getsource(found_at(place))
    assert [text for text in SOURCES[place] if text not in source] == []


@pytest.mark.parametrize("place", PARAMETERS)
def test_parameters(place: str) -> None:
    wanted = PARAMETERS[place].split()
    assert parameters(found_at(place))[: len(wanted)] == wanted


def test_names_that_are_replaced_or_called() -> None:
    from openrlhf.trainer import ppo_trainer, ppo_trainer_async

    from sorl_train.openrlhf.rendezvous import rendezvous_port
    from sorl_train.openrlhf.workers import ACTOR, CRITIC, CriticWorker, PolicyWorker, ReferenceWorker

    assert (ACTOR, CRITIC) == ("_actor", "_critic")  # as in ``SOURCES``
    for worker in (found_at(ACTOR_MODEL), found_at(CRITIC_MODEL)):
        for method in ("init_model_from_pretrained", "reload_states", "offload_states"):
            assert hasattr(worker, method), f"{worker}.{method} is gone"
    for worker in (PolicyWorker, CriticWorker, ReferenceWorker):
        assert worker._get_free_port is rendezvous_port
    for module in (ppo_trainer, ppo_trainer_async):
        assert hasattr(module, "prepare_datasets") and hasattr(module, "SamplesGenerator")
    for trainer in (plain(ppo_trainer.PPOTrainer), plain(ppo_trainer_async.TrainingActor)):
        assert issubclass(trainer, ppo_trainer.BasePPOTrainer)
    assert "vllm_lock" in parameters(plain(ppo_trainer_async.TrainingActor).__init__)


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


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (0.7, 0.9)])
def test_an_evaluation_draws_as_the_local_engines(temperature: float, top_p: float, tmp_path: Path) -> None:
    from sorl_train.openrlhf.train_step import TrainStep

    asked: list[dict[str, Any]] = []

    class Evaluator:
        args = argparse.Namespace(rollout=argparse.Namespace(batch_size=2))

        def generate_eval_samples(self, **how: Any) -> list[Any]:
            asked.append(how)
            return []

    step = TrainStep()
    step.config = load_config(
        "minihop", {"eval.temperature": temperature, "sampler.top_p": 0.9}, shared=SHORT
    )
    step.eval_env, step.evaluator = make_env(step.config, evaluation=True), Evaluator()
    run_dir = RunDir.create(tmp_path / "run", step.config)
    step.recorder = Recorder(step.config, run_dir, step.eval_env.task, Display(sys.stdout))
    assert step.evaluate_policy(4, search_off=True) == {}
    assert [(how["temperature"], how["top_p"]) for how in asked] == [(temperature, top_p)]
    assert Evaluator.args.rollout.batch_size == 4  # all at once, not batch after batch


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
    config = load_config("minihop", group | {"algo": algo, "optim.max_grad_norm": None}, shared=SHORT)
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
