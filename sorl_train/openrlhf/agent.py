"""Rollout in OpenRLHF's vLLM actors: each call makes one trajectory, with the rollout of ``sorl_env``.

OpenRLHF loads this file by its path (``--train.agent_func_path``) in each vLLM actor and awaits
``AgentExecutor().execute``. The settings come from the run's folder, which ``SORL_RUN_DIR`` names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrlhf.utils.agent import AgentExecutorBase

from sorl_env.envs.text_env import TextEnv
from sorl_env.rollout import RolloutJob, RolloutSettings, SampledTurn, SamplingParams, run_trajectory
from sorl_train.config.files import read_resolved
from sorl_train.config.seeds import derive_seed
from sorl_train.rollout.environments import make_env, without_tools
from sorl_train.rollout.vllm_sampler import sampled_turn, vllm_params
from sorl_train.run.folder import RunDir


class EngineSampler:
    """A ``sorl_env.rollout.Sampler`` that uses the engine of one vLLM actor."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def generate(self, session: str, token_ids: Sequence[int], params: SamplingParams) -> SampledTurn:
        """Sample a turn after ``token_ids``, with the version of the weights that began it."""
        version = await self._engine.version_of_a_new_turn()
        output = await self._engine.generate(list(token_ids), vllm_params(params))
        return sampled_turn(output.outputs[0], version)

    def release(self, session: str) -> None:
        """Nothing to do: vLLM's prefix cache drops old entries by itself."""


class AgentExecutor(AgentExecutorBase):
    """Plays the examples that ``prompts.JobLoader`` hands out."""

    def __init__(self) -> None:
        self.config = read_resolved(RunDir(Path(os.environ["SORL_RUN_DIR"])).config)
        self._envs: dict[str, TextEnv] = {}
        self._members: dict[str, int] = {}

    def env(self, kind: str) -> TextEnv:
        """The environment for ``train``, ``eval`` or ``search_off`` jobs, made at its first use."""
        if kind not in self._envs:
            env = make_env(self.config, evaluation=kind != "train")
            self._envs[kind] = without_tools(env) if kind == "search_off" else env
        return self._envs[kind]

    def _member(self, group: str, size: int) -> int:
        """Number this call within its group, whose calls all come to the same actor with the same label."""
        member = self._members.pop(group, 0)
        if member + 1 < size:
            self._members[group] = member + 1
        return member

    async def execute(
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """One trajectory, under the key ``trajectory``. An exception of a tool or task ends only this trajectory."""
        place = json.loads(label)
        group = place["group"]
        member = self._member(group, self.config.rollout.group_size if place["kind"] == "train" else 1)
        job = RolloutJob(
            id=f"{group}/{member}",
            group_id=group,
            example_index=place["index"],
            seed=derive_seed(self.config.seed, group, member),
        )
        settings = RolloutSettings(
            temperature=sampling_params.temperature,
            top_p=sampling_params.top_p,
            use_chat_template=self.config.chat_template,
        )
        env = self.env(place["kind"]).spawn()
        trajectory = await run_trajectory(env, hf_tokenizer, EngineSampler(llm_engine), job, settings)
        return {"trajectory": trajectory}
