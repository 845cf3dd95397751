"""A task of sorl as an environment of OpenEnv."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, EnvironmentMetadata, Observation, State
from pydantic import ConfigDict, Field

from sorl_env.bridges.openenv_client import KEY, facts_of, result_to_json
from sorl_env.envs.text_env import TextEnv
from sorl_env.trajectory import StopReason

logger = logging.getLogger(__name__)


class TextAction(Action):
    """A turn of the policy. With one required field, clients such as verifiers send a model's text as it is."""

    message: str = Field(description="the full text of the policy's turn")
    truncate: StopReason | None = Field(
        default=None, description="ends the episode for this reason instead of playing a turn"
    )


class TextObservation(Observation):
    """The prompt, or the environment's reply to a turn."""

    text: str = Field(description="what the policy reads next; empty after the last turn")


class TaskState(State):
    """The state of an episode; ``sorl`` says what a client of sorl's own has to know of the task."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)
    sorl: dict[str, Any] = Field(default_factory=dict)


class TaskEnvironment(Environment[TextAction, TextObservation, TaskState]):
    """One session: plays episodes of a task, one after the other. ``envs`` has an environment for each split that is
    served; this one plays in copies of them."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, envs: Mapping[str, TextEnv]) -> None:
        super().__init__()
        self._envs = envs
        self._first = next(iter(envs))
        self._env: TextEnv | None = None
        self._episode_id: str | None = None
        self._steps = 0

    def list_splits(self) -> list[str]:
        """The splits that are served."""
        return list(self._envs)

    def num_tasks(self, split: str) -> int:
        """Number of examples in a split; 0 for one that is not served."""
        return len(self._envs[split].examples) if split in self._envs else 0

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        """An example, without its answer. Raises ``IndexError`` if there is none."""
        if not 0 <= index < self.num_tasks(split):
            raise IndexError(f"split {split!r} has tasks 0 to {self.num_tasks(split) - 1}")
        example = self._envs[split].examples.examples[index]
        return {"id": example.id, "index": index, "question": example.question}

    async def reset_async(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        split: str | None = None,
        index: int | None = None,
        **others: Any,
    ) -> TextObservation:
        """Start an episode: on example ``index`` of ``split``, or else on the one that ``seed`` chooses. Raises
        ``ValueError`` if there is no such example."""
        split = self._first if split is None else split
        size = self.num_tasks(split)
        seed = 0 if seed is None else seed
        if not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ValueError("seed must be a whole number from 0 on")
        index = seed % max(1, size) if index is None else index
        if not isinstance(index, int) or not 0 <= index < size:
            said = f"there is no task {index!r} in split {split!r}; /list_environments names the Task API"
            raise ValueError(said)
        self.close()
        env = self._envs[split].spawn()
        prompt = await env.areset(index, seed)
        self._env, self._episode_id, self._steps = env, episode_id, 0
        example = {"id": env.example.id, "question": env.example.question}
        return TextObservation(text=prompt, metadata={KEY: {"example": example}})

    def reset(self, seed: int | None = None, episode_id: str | None = None, **others: Any) -> TextObservation:
        """Not used: the server prefers ``reset_async``."""
        raise NotImplementedError("use reset_async")

    async def step_async(
        self, action: TextAction, timeout_s: float | None = None, **others: Any
    ) -> TextObservation:
        """One turn. Raises ``RuntimeError`` if no episode is running."""
        env = self._env
        if env is None:
            raise RuntimeError("no episode is running: send reset first, over the same WebSocket")
        try:
            if action.truncate is not None:
                result = await env.atruncate(action.truncate)
            else:
                result = await env.astep(action.message)
        except Exception:
            logger.exception("task %s raised on example %s", env.task.name, env.example.id)
            self.close()
            raise
        self._steps += 1
        if result.ended:
            self.close()
        facts = {KEY: result_to_json(result)}
        return TextObservation(
            text=result.observation, reward=result.reward, done=result.ended, metadata=facts
        )

    def step(self, action: TextAction, timeout_s: float | None = None, **others: Any) -> TextObservation:
        """Not used: the server prefers ``step_async``."""
        raise NotImplementedError("use step_async")

    @property
    def state(self) -> TaskState:
        """The state of the episode, and the facts about the task."""
        facts = facts_of(self._envs[self._first], tuple(self._envs))
        return TaskState(episode_id=self._episode_id, step_count=self._steps, sorl=facts)

    def get_metadata(self) -> EnvironmentMetadata:
        """What the task is, for people."""
        task = self._envs[self._first].task
        return EnvironmentMetadata(name=task.name, description=task.description or task.name)

    def close(self) -> None:
        """Give up the running episode."""
        if self._env is not None:
            self._env.end_episode()
            self._env = None
