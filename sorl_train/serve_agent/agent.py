"""Runs the policy's dialogues on a thread with its own event loop, so that the server answers while it computes."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from sorl_env.env import ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.rollout import (
    RolloutJob,
    RolloutSettings,
    SampledTurn,
    Sampler,
    SamplingParams,
    TrajectoryBuilder,
    run_trajectory,
)
from sorl_env.task import Example
from sorl_env.trajectory import StopReason, Trajectory, Turn
from sorl_env.turn_codec import make_codec
from sorl_train.evaluate.ask import env_of_question, unknown_words
from sorl_train.evaluate.results import turn_facts
from sorl_train.evaluate.runner import Policy, in_session
from sorl_train.serve_agent.chat import ChatError, ChatRequest

OnEvent = Callable[[dict[str, Any]], None]
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """A dialogue whose prompt fits. ``unknown_words`` are those of the question that the policy cannot read."""

    env: ToolUseEnv
    job: RolloutJob
    settings: RolloutSettings
    unknown_words: Sequence[str]


class Agent:
    """Answers questions with a policy and its tools. Open dialogues share the sampler's batch.

    All methods are called from one event loop, which is not the agent's own.

    Args:
        env: the task's environment, with its tools.
        seed: of the sampling, for requests without one.
        max_waiting: dialogues that may wait for one of the policy's ``max_concurrency`` places; more are refused.

    Raises:
        UserError: the policy's chat template does not fit the environment's turn format.
    """

    def __init__(self, policy: Policy, env: ToolUseEnv, *, seed: int = 0, max_waiting: int = 256) -> None:
        self._policy = policy
        self._env = env
        self._seed = seed
        self._places = policy.settings.max_concurrency
        template = policy.settings.use_chat_template
        self._codec = make_codec(env, policy.tokenizer, use_chat_template=template)
        self._limit = self._places + max_waiting
        self._numbers = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None
        self._slots: asyncio.Semaphore  # belongs to that loop, as the next one does
        self._ending: asyncio.Event
        self.open = 0  # dialogues in the batch or waiting
        # called on the agent's thread, when its loop has died
        self.on_failure: Callable[[], None] = lambda: None

    @property
    def task(self) -> str:
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
        """Answer questions inside this context. Dialogues that are open at its end are given up.

        Raises:
            BaseException: whatever the event loop died of.
        """
        opened = threading.Event()
        thread = threading.Thread(target=self._run, args=(opened,), name="agent", daemon=True)
        thread.start()
        opened.wait()
        if self._failure is not None:
            raise self._failure
        try:
            yield self
        finally:
            assert self._loop is not None
            if not self.failed:
                with suppress(RuntimeError):  # it dies at this moment
                    self._loop.call_soon_threadsafe(self._ending.set)
            thread.join()
            self._loop = None
        if self._failure is not None:
            raise self._failure

    def _run(self, opened: threading.Event) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._slots, self._ending = asyncio.Semaphore(self._places), asyncio.Event()
            opened.set()
            await self._ending.wait()

        try:
            in_session(self._policy, serve)
        except BaseException as error:  # noqa: BLE001  raised again in the thread that waits
            self._failure = error
            self.on_failure()
        finally:
            opened.set()

    async def prepare(self, request: ChatRequest) -> Dialogue:
        """Check that the question fits into the prompt. Raises ``ChatError`` if it does not."""
        return await self._there(self._prepare(request))

    async def answer(self, dialogue: Dialogue, on_event: OnEvent | None = None) -> Trajectory:
        """Run a dialogue.

        ``on_event`` is called on the agent's thread: with ``{"turn": {"index": .., "text": ..}}`` for each turn as soon
        as it is sampled, and with ``{"reply": {"index": .., ..}}``, the fields of ``turn_facts``, once its tools have
        replied.

        Raises:
            ChatError: too many dialogues wait, or the policy's server or a tool failed.
        """
        if self.open >= self._limit:
            raise ChatError(
                503, f"{self.open} dialogues are open or waiting; try again later", code="overloaded"
            )
        self.open += 1
        try:
            return await self._there(self._answer(dialogue, on_event))
        finally:
            self.open -= 1

    async def _there(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the agent's loop. It is cancelled with the task that waits for it."""
        assert self._loop is not None, "use it inside running()"
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
        example = Example(id="asked", question=request.question, options=request.options)
        env = env_of_question(self._env, example)
        settings = self._policy.settings
        for name in ("temperature", "top_p"):
            value = getattr(request, name)
            if value is not None:
                settings = dataclasses.replace(settings, **{name: value})
        seed = self._seed if request.seed is None else request.seed
        job = RolloutJob(f"question {next(self._numbers)}", "asked", 0, seed)
        try:
            prompt, _ = env.reset(seed=job.seed, options={"index": job.example_index})
            begun = TrajectoryBuilder(env, self._codec, job, prompt)
        except UserError as error:
            limit = min(env.limits.max_prompt_tokens, env.limits.max_trajectory_tokens - 1)
            raise ChatError(
                400,
                f"the prompt with this question has more than {limit} tokens (limits.max_prompt_tokens): shorten it",
                param="messages",
                code="context_length_exceeded",
            ) from error
        if request.max_tokens is not None:
            most = min(env.limits.max_trajectory_tokens, len(begun.token_ids) + request.max_tokens)
            env.limits = dataclasses.replace(env.limits, max_trajectory_tokens=most)
        return Dialogue(env, job, settings, unknown_words(self._policy.tokenizer, request.question))

    async def _answer(self, dialogue: Dialogue, on_event: OnEvent | None) -> Trajectory:
        policy = self._policy
        sampler: Sampler = policy.sampler
        if on_event is not None:
            sampler = ReportingSampler(sampler, self._codec.turn_text, on_event)

        def on_turn(turn: Turn) -> None:
            if on_event is not None:
                on_event({"reply": {"index": turn.index, **turn_facts(turn)}})

        async with self._slots:
            try:
                trajectory = await run_trajectory(
                    dialogue.env, policy.tokenizer, sampler, dialogue.job, dialogue.settings, on_turn=on_turn
                )
            except UserError as error:  # from the policy's server, since the prompt fits
                said = str(error).partition(";")[0]  # the rest is advice for evaluations
                raise ChatError(502, said, code="policy_unavailable") from error
        if trajectory.stop_reason is StopReason.ERROR:
            raise ChatError(503, f"a tool or the task failed: {trajectory.error}", code="tool_unavailable")
        return trajectory


class ReportingSampler:
    """A sampler that reports the text of each turn of one dialogue as soon as it is sampled.

    Args:
        text_of: makes the text of a turn from its token ids.
    """

    def __init__(self, sampler: Sampler, text_of: Callable[[Sequence[int]], str], on_event: OnEvent) -> None:
        self._sampler = sampler
        self._text_of = text_of
        self._on_event = on_event
        self._turns = 0

    async def generate(self, session: str, token_ids: Sequence[int], params: SamplingParams) -> SampledTurn:
        """Sample one turn (see ``Sampler.generate``)."""
        sampled = await self._sampler.generate(session, token_ids, params)
        self._on_event({"turn": {"index": self._turns, "text": self._text_of(sampled.token_ids)}})
        self._turns += 1
        return sampled

    def release(self, session: str) -> None:
        self._sampler.release(session)
