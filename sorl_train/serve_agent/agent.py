"""Runs the policy's dialogues on a thread with its own event loop, so that the server answers while it computes."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from sorl_env.envs.prompts import make_codec
from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.rollout import RolloutJob, RolloutSettings, TrajectoryBuilder, run_trajectory
from sorl_env.task import Example
from sorl_env.trajectory import StopReason, Trajectory, Turn
from sorl_train.evaluate.ask import env_of_question, unknown_words
from sorl_train.evaluate.results import turn_facts
from sorl_train.evaluate.runner import Policy, in_session
from sorl_train.serve_agent.chat import ChatError, ChatRequest

OnTurn = Callable[[dict[str, Any]], None]
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """A dialogue whose prompt fits. ``unknown_words`` are those of the question that the policy cannot read."""

    env: ToolUseEnv
    job: RolloutJob
    settings: RolloutSettings
    unknown_words: Sequence[str]


class Agent:
    """Answers questions with a policy and its tools. Open dialogues share the sampler's batch. All methods are called
    from one event loop, which is not the agent's own. ``seed`` is of the sampling, for requests without one. At most
    ``max_waiting`` dialogues may wait for one of the policy's ``max_concurrency`` places; more are refused. Raises
    ``UserError`` if the policy's chat template does not fit the environment's turn format."""

    def __init__(self, policy: Policy, env: ToolUseEnv, *, seed: int = 0, max_waiting: int = 256) -> None:
        self._policy = policy
        self._env = env
        self._seed = seed
        self._places = policy.settings.max_concurrency
        template = policy.settings.use_chat_template
        self._codec = make_codec(env, policy.tokenizer, use_chat_template=template)
        self._limit = self._places + max_waiting
        self._numbers = itertools.count()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop  # runs inside running(), and owns the next two
        self._slots: asyncio.Semaphore
        self._ending: asyncio.Event
        self.open = 0  # dialogues in the batch or waiting
        # called on the agent's thread, when its loop has died
        self.on_failure: Callable[[], None] = lambda: None

    @property
    def task(self) -> str:
        """Name of the task."""
        return self._env.task.name

    @property
    def failed(self) -> bool:
        """Whether its event loop has died, so that it will never answer again."""
        return self._failure is not None

    @property
    def in_flight(self) -> int:
        """The number of dialogues in the batch."""
        return min(self.open, self._places)

    @contextmanager
    def running(self) -> Iterator[Agent]:
        """Answer questions inside this context, which raises whatever the event loop died of. Dialogues that are open
        at its end are given up."""
        opened: Future[asyncio.AbstractEventLoop] = Future()
        thread = threading.Thread(target=self._run, args=(opened,), name="agent", daemon=True)
        thread.start()
        self._loop = opened.result()
        try:
            yield self
        finally:
            with suppress(RuntimeError):  # it has died
                self._loop.call_soon_threadsafe(self._ending.set)
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self, opened: Future[asyncio.AbstractEventLoop]) -> None:
        async def serve() -> None:
            self._slots, self._ending = asyncio.Semaphore(self._places), asyncio.Event()
            opened.set_result(asyncio.get_running_loop())
            await self._ending.wait()

        try:
            in_session(self._policy, serve)
        except BaseException as error:  # noqa: BLE001  raised again in the thread that waits
            self._failure = error
            if opened.done():
                self.on_failure()
            else:
                opened.set_exception(error)

    async def prepare(self, request: ChatRequest) -> Dialogue:
        """Check that the question fits into the prompt. Raises ``ChatError`` if it does not."""
        return await self._there(self._prepare(request))

    async def answer(self, dialogue: Dialogue, on_turn: OnTurn | None = None) -> Trajectory:
        """Run a dialogue. Raises ChatError if too many wait, or the policy's server or a tool failed. ``on_turn`` is
        called on the agent's thread, when the tools have replied to a turn, with its ``index`` and the fields of
        ``turn_facts``."""
        if self.open >= self._limit:
            raise ChatError(
                503, f"{self.open} dialogues are open or waiting; try again later", code="overloaded"
            )
        self.open += 1
        try:
            return await self._there(self._answer(dialogue, on_turn))
        finally:
            self.open -= 1

    async def _there(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the agent's loop. It is cancelled with the task that waits for it."""
        ended = ChatError(503, "the policy has failed, and the server ends", code="policy_failed")
        if self.failed:
            work.close()
            raise ended
        waiting = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        try:
            await asyncio.wait({waiting})
        finally:
            waiting.cancel()
        # the end of that loop cancels it, and what ended the loop must not end this one as well
        if waiting.cancelled() or isinstance(waiting.exception(), (SystemExit, KeyboardInterrupt)):
            raise ended
        return waiting.result()

    async def _prepare(self, request: ChatRequest) -> Dialogue:
        example = Example(id="asked", question=request.question, options=request.sorl.options)
        env = env_of_question(self._env, example)
        settings = self._policy.settings
        if request.temperature is not None:
            settings = dataclasses.replace(settings, temperature=request.temperature)
        if request.top_p is not None:
            settings = dataclasses.replace(settings, top_p=request.top_p)
        seed = self._seed if request.seed is None else request.seed
        job = RolloutJob(f"question {next(self._numbers)}", "asked", 0, seed)
        prompt, _ = env.reset(seed=job.seed, options={"index": job.example_index})
        try:
            begun = TrajectoryBuilder(env, self._codec, job, prompt)
        except UserError as error:
            limit = min(env.limits.max_prompt_tokens, env.limits.max_trajectory_tokens - 1)
            raise ChatError(
                400,
                f"the prompt with this question has more than {limit} tokens (limits.max_prompt_tokens): shorten it",
                param="messages",
                code="context_length_exceeded",
            ) from error
        if request.token_limit is not None:
            most = min(env.limits.max_trajectory_tokens, len(begun.token_ids) + request.token_limit)
            env.limits = dataclasses.replace(env.limits, max_trajectory_tokens=most)
        return Dialogue(env, job, settings, unknown_words(self._policy.tokenizer, request.question))

    async def _answer(self, dialogue: Dialogue, on_turn: OnTurn | None) -> Trajectory:
        policy = self._policy

        def report(turn: Turn) -> None:
            if on_turn is not None:
                on_turn({"index": turn.index, **turn_facts(turn)})

        async with self._slots:
            try:
                trajectory = await run_trajectory(
                    dialogue.env,
                    policy.tokenizer,
                    policy.sampler,
                    dialogue.job,
                    dialogue.settings,
                    on_turn=report,
                )
            except UserError as error:  # from the policy's server, since the prompt fits
                said = str(error).partition(";")[0]  # the rest is advice for evaluations
                raise ChatError(502, said, code="policy_unavailable") from error
        if trajectory.stop_reason is StopReason.ERROR:
            raise ChatError(503, f"a tool or the task failed: {trajectory.error}", code="tool_unavailable")
        return trajectory
