"""vLLM as the local engine's sampler, for real on a CPU; and what is said where there is none."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.rollout import RolloutSettings, SamplingParams, collect
from sorl_env.task.registry import load_task
from sorl_env.trajectory import Trajectory
from sorl_train.models.policy import load_policy, load_tokenizer
from sorl_train.models.tiny import build_tiny_policy
from sorl_train.rollout.vllm_sampler import VllmSampler, vllm_params
from sorl_train.run.files import read_jsonl as read_metrics

from ..conftest import WORLD, short_config, train_short
from .test_sampler import Recorder, assert_exact, assert_truncated, jobs

SIZES = {"hidden_size": 64, "num_layers": 2, "num_heads": 2}  # vLLM on a CPU has no heads narrower than 32


@pytest.fixture(scope="module")
def vllm_on_cpu() -> Any:
    """What a weight sync needs on a CPU, where vLLM would pack the weights and throw the originals away."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }.items():
            patch.setenv(name, value)
        from vllm.model_executor.layers import utils

        def keep_weights(layer: Any, remove_weight: bool) -> None:
            layer.cpu_linear = torch.nn.functional.linear

        patch.setattr(utils, "dispatch_cpu_unquantized_gemm", keep_weights)
        yield


def sample(
    sampler: VllmSampler, env: ToolUseEnv, tokenizer: Any, count: int, **how: float
) -> tuple[list[Trajectory], dict[str, list[int]]]:
    recorder, settings = Recorder(sampler), RolloutSettings(**how)  # type: ignore[arg-type]
    with sampler.session():
        trajectories = asyncio.run(collect(env, tokenizer, recorder, jobs(count), settings))
    return trajectories, recorder.seen


@pytest.mark.openrlhf
def test_tokens_are_exact_and_the_newest_weights_are_sampled(vllm_on_cpu: None, tmp_path: Path) -> None:
    folder = str(tmp_path / "policy")
    task = load_task("minihop", **WORLD)
    build_tiny_policy(task, Path(folder), **SIZES)
    env, tokenizer, model = ToolUseEnv(task), load_tokenizer(folder), load_policy(folder)
    sampler = VllmSampler(model, folder, 512, short_config().sampler, dtype="auto", seed=0)
    trajectories, seen = sample(sampler, env, tokenizer, 12)
    assert_exact(trajectories, seen, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    with pytest.raises(AssertionError):  # those are the old weights' log-probabilities
        assert_exact(trajectories, seen, model)
    assert_exact(*sample(sampler, env, tokenizer, 12), model)
    how = {"temperature": 0.7, "top_p": 0.8}  # the local engine's sampler passes the same test
    assert_truncated(sample(sampler, env, tokenizer, 8, **how)[0], model, **how)


@pytest.mark.openrlhf
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_both_engines_ask_vllm_for_the_same(temperature: float) -> None:
    from sorl_train.openrlhf.agent import EngineSampler

    params = SamplingParams(9, temperature=temperature, top_p=0.8, stop=("</a>",), stop_ids=(3,))
    asked: list[Any] = []

    class Engine:
        async def version_of_a_new_turn(self) -> int:
            return 5

        async def generate(self, ids: list[int], how: Any) -> Any:
            asked.append(how)
            entry = SimpleNamespace(logprob=-1.5)
            turn = SimpleNamespace(token_ids=[3], logprobs=[{3: entry}], finish_reason="stop", stop_reason=3)
            return SimpleNamespace(outputs=[turn])

    drawn = asyncio.run(EngineSampler(Engine()).generate("session", [1], params))
    assert (drawn.log_probs, drawn.policy_version, drawn.finish) == ([-1.5], 5, "eos")
    assert repr(asked[0]) == repr(vllm_params(params))
    assert asked[0].top_p == (0.8 if temperature else 1.0) and asked[0].top_k <= 0 and asked[0].min_p == 0.0


@pytest.mark.openrlhf
def test_turns_that_are_given_up_leave_nothing_in_the_engine(vllm_on_cpu: None, tmp_path: Path) -> None:
    """A cancelled caller, a release, the end of a session; and nobody waits for a reply that does not come."""
    folder = str(tmp_path / "policy")
    build_tiny_policy(load_task("minihop", **WORLD), Path(folder), **SIZES)
    sampler = VllmSampler(load_policy(folder), folder, 512, short_config().sampler, dtype="auto", seed=0)
    long = SamplingParams(400)

    async def give_up() -> None:
        turns = [asyncio.ensure_future(sampler.generate(name, [5, 6, 7], long)) for name in "abc"]
        for _ in range(12):
            await asyncio.sleep(0)
        with pytest.raises(ValueError, match="session a: its last turn is still being sampled"):
            await sampler.generate("a", [5, 6, 7], long)
        turns[0].cancel()
        sampler.release("b")
        await asyncio.wait(turns[:2], timeout=60)
        assert [turn.done() for turn in turns] == [True, True, False]
        assert list(sampler._replies) == [sampler._requests["c"]]
        turns[2].cancel()

    with sampler.session():
        asyncio.run(give_up())
    assert not sampler._engine.has_unfinished_requests()
    with sampler.session():
        assert asyncio.run(sampler.generate("a", [5, 6, 7], SamplingParams(3))).token_ids


@pytest.mark.openrlhf
def test_two_steps_of_training(vllm_on_cpu: None, tmp_path: Path) -> None:
    run_dir, summary = train_short(
        tmp_path / "run",
        sampler__backend="vllm",
        **{f"tiny__{name}": size for name, size in SIZES.items()},
        optim__lr=1e-3,
        eval__search_off=True,
    )
    lines = read_metrics(run_dir.metrics)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[2]["loss/grad_norm"] > 0
    # weights of step 1 reached the sampler
    assert max(line["rollout/mismatch_max"] for line in lines[1:]) < 1e-3
    assert summary["steps"] == 2


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_says_what_to_install(tiny_folder: str) -> None:
    with pytest.raises(UserError, match=r"\.\[vllm\].*or use sampler\.backend=transformers"):
        VllmSampler(load_policy(tiny_folder), tiny_folder, 512, short_config().sampler, dtype="auto", seed=0)


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ({"lora__rank": 4}, "takes whole weights"),
        ({"hardware__device": "cuda:1"}, "CUDA_VISIBLE_DEVICES"),
        ({"sampler__gpu_memory": 1.5}, "sampler.gpu_memory should be less than or equal to 1"),
    ],
)
def test_settings_that_do_not_go_with_vllm(setting: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        short_config(sampler__backend="vllm", **setting)
