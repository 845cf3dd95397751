"""Runs an evaluation: the prompts of the modes with one turn, and many questions at once, each reported as it ends.

The prompts (mode ``agent`` uses the task's own), as read in FlashRAG's repository and in copies of Search-R1's:

- ``direct``: the instruction of FlashRAG's zero-shot example (``examples/methods/run_exp.py``), word for word. There it
  is the system prompt; here instruction and question are one text, and ``Answer:`` stands behind it.
- ``cot`` and ``rag``: Search-R1's ``scripts/data_process/nq.py`` and ``nq_rag.py``, word for word.
- Multiple choice: for ``direct`` the same words, asking for the letter; for ``cot`` the prefix prompt of the paper's
  appendix without what it says about searching, and without the word "medical"; ``rag`` adds the context to it.

A policy with a closed vocabulary (``Task.vocabulary``) cannot read these prompts and gets its task's own. In mode
``rag`` a search for the question and its result follow the prompt, as if the policy had searched in its first turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from sorl_env.commands.command import run_async
from sorl_env.envs.prompts import make_codec
from sorl_env.envs.text_env import TextEnv, format_of, require_tool_env
from sorl_env.errors import UserError, did_you_mean
from sorl_env.rollout import RolloutJob, RolloutSettings, Sampler, SamplingParams, run_trajectory
from sorl_env.task import Example, Task
from sorl_env.tool import ToolCall, ToolRequest, ToolUnavailableError
from sorl_env.trajectory import Trajectory
from sorl_env.turns.tags import neutralise
from sorl_env.turns.tokens import Tokenizer, encode_prompt, encode_text, turn_text
from sorl_train.config.seeds import derive_seed, generator
from sorl_train.evaluate.endpoint import TextTokenizer
from sorl_train.evaluate.results import (
    EvalResult,
    Job,
    result_of_one_turn,
    result_of_outage,
    result_of_trajectory,
)

MODES = ("direct", "cot", "rag", "agent")

_TAGGED = (
    "You should first have a reasoning process in mind and then provides the answer. Show your reasoning in <think> "
    "</think> tags and return the final answer in <answer> </answer> tags, for example <answer> Beijing </answer>. "
    "Question: {question}"
)
_ANALYZE = (
    "You should analyze the question carefully, evaluate the given context (which may or may not be useful), and then "
    "generate an accurate and well-reasoned response. "
)
_LETTER = (
    "Think step-by-step inside <think> and </think> tags. After sufficient reasoning, provide your final answer "
    "inside <answer> and </answer> with ONLY the letter (e.g., <answer>A</answer>).\n\nQuestion: {question}\n"
    "Options:\n{options}"
)
_QUESTION = {
    "direct": (
        "Answer the question based on your own knowledge. Only give me the answer and do not output any other words.\n"
        "Question: {question}\nAnswer:"
    ),
    "cot": f"Answer the given question. {_TAGGED}\n",
    "rag": (
        f"Answer the given question with some potentially useful context. {_ANALYZE}{_TAGGED} "
        "Context: {context} \n"
    ),
}
_CHOICE = {
    "direct": (
        "Answer the given multiple-choice question based on your own knowledge. Only give me the letter of the answer "
        "and do not output any other words.\nQuestion: {question}\nOptions:\n{options}\nAnswer:"
    ),
    "cot": f"Answer the given multiple-choice question. {_LETTER}\n",
    "rag": (
        "Answer the given multiple-choice question with some potentially useful context. "
        f"{_ANALYZE}{_LETTER}\nContext: {{context}}\n"
    ),
}
# A turn ends with its answer, or where a base model begins to make up the next question.
STOP: tuple[str, ...] = ("</answer>", "\nQuestion:")


def check_modes(modes: list[str]) -> None:
    """Raise ``UserError`` for an unknown mode."""
    for mode in modes:
        if mode not in MODES:
            raise UserError(f"there is no mode {mode!r}. {did_you_mean(mode, MODES)}")


def one_turn_prompt(mode: str, task: Task, example: Example, context: str = "") -> str:
    """The whole prompt of mode ``direct``, ``cot`` or ``rag``; ``context`` is what the search of ``rag`` found."""
    if task.vocabulary is not None:
        return task.prompt(example) + (_searched(example.question, context) if mode == "rag" else "")
    question = example.question.strip()
    if not example.options:
        if not question.endswith("?"):  # as Search-R1's data preparation does
            question += "?"
        return _QUESTION[mode].format(question=question, context=context)
    options = "\n".join(f"{letter}: {text}" for letter, text in example.options.items())
    return _CHOICE[mode].format(question=question, options=options, context=context)


def _searched(question: str, context: str) -> str:
    return f"<think></think> <search> {question} </search>\n\n<information>\n{context}\n</information>\n\n"


SEARCH = "search"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Policy:
    """A sampler with its tokenizer and settings; ``session`` opens and closes it (see ``LocalSampler.session``)."""

    sampler: Sampler
    tokenizer: Tokenizer
    session: Callable[[], AbstractContextManager[Any] | AbstractAsyncContextManager[Any]]
    settings: RolloutSettings

    @property
    def knows_ids(self) -> bool:
        """Whether token ids are the model's own, and not those of a `TextTokenizer`."""
        return not isinstance(self.tokenizer, TextTokenizer)


def plan_jobs(
    envs: Mapping[str, TextEnv], modes: Sequence[str], limit: int | None, samples: int, seed: int
) -> list[Job]:
    """All questions to answer, in the order of the results: task, mode, question, sample. ``limit`` chooses a seeded
    sample of questions per task, the same in every mode. The sample of a larger limit contains that of a smaller one.
    """
    jobs: list[Job] = []
    for task, env in envs.items():
        order = generator(seed, "evaluate").permutation(len(env.examples)).tolist()[:limit]
        jobs += [
            Job(task, mode, index, sample, derive_seed(seed, f"evaluate {mode}", index, sample))
            for mode in modes
            for index in sorted(order)
            for sample in range(samples)
        ]
    return jobs


def check_search(envs: Mapping[str, TextEnv], modes: Sequence[str]) -> None:
    """Raise ``UserError`` if a mode is asked of a task that cannot have it: ``rag`` needs a search tool."""
    for name, env in envs.items():
        others = [mode for mode in modes if mode != "agent"]
        names = require_tool_env(env, f"mode {others[0]}").toolbox.names if others else ()
        if "rag" in modes and SEARCH not in names:
            raise UserError(
                f"mode rag needs a tool named {SEARCH!r}, which task {name} does not have. "
                f"{did_you_mean(SEARCH, names)} Leave the mode out for this task"
            )
        if "rag" in modes and format_of(env) != "tags" and env.task.vocabulary is not None:
            raise UserError(
                f"mode rag puts a search with tags into the prompt of task {name}, whose policy writes "
                f"{format_of(env)}: leave the mode out, or use format tags"
            )


def run_evaluation(
    policy: Policy, envs: Mapping[str, TextEnv], jobs: Sequence[Job], on_result: Callable[[EvalResult], None]
) -> None:
    """Answer all ``jobs`` in a new event loop; ``on_result`` gets each result when it is there. Raises ``UserError`` if
    a prompt is too long, or the policy cannot be reached."""
    in_session(policy, lambda: _run_all(policy, envs, jobs, on_result))


def in_session(policy: Policy, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """The result of a coroutine in a new event loop, inside the policy's session."""

    async def main() -> _T:
        session = policy.session()
        if isinstance(session, AbstractAsyncContextManager):
            async with session:
                return await work()
        with session:
            return await work()

    return run_async(main())


async def _run_all(
    policy: Policy, envs: Mapping[str, TextEnv], jobs: Sequence[Job], on_result: Callable[[EvalResult], None]
) -> None:
    slots = asyncio.Semaphore(policy.settings.max_concurrency)

    async def run(job: Job) -> None:
        async with slots:
            env = envs[job.task]
            if job.mode == "agent":
                trajectory = await agent_trajectory(policy, env, job)
                example = env.examples.examples[job.index]
                on_result(result_of_trajectory(job, trajectory, example, policy.knows_ids))
            else:
                on_result(await answer_in_one_turn(policy, env, job))

    tasks = [asyncio.ensure_future(run(job)) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:  # after an error or Ctrl-C, nothing may keep sampling in the background
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def agent_trajectory(policy: Policy, env: TextEnv, job: Job) -> Trajectory:
    """Run the environment's whole dialogue, as in training."""
    rollout = RolloutJob(id=job.id, group_id=job.id, example_index=job.index, seed=job.seed)
    return await run_trajectory(env.spawn(), policy.tokenizer, policy.sampler, rollout, policy.settings)


async def answer_in_one_turn(policy: Policy, given: TextEnv, job: Job) -> EvalResult:
    """Answer in mode ``direct``, ``cot`` or ``rag``, in one turn; ``rag`` first searches once for the question."""
    env = require_tool_env(given, f"mode {job.mode}")
    example = env.examples.examples[job.index]
    calls: list[ToolCall] = []
    context = ""
    if job.mode == "rag":
        outcome = await env.toolbox.acall(ToolRequest(SEARCH, example.question))
        if isinstance(outcome, ToolUnavailableError):
            prompt = one_turn_prompt(job.mode, env.task, example)
            return result_of_outage(job, example, prompt, str(outcome))
        calls = [outcome]
        context = _cut(outcome.reply, policy.tokenizer, env) if outcome.ok else ""
    prompt = one_turn_prompt(job.mode, env.task, example, context)
    template = policy.settings.use_chat_template
    stop_ids: tuple[int, ...] = ()
    if env.task.vocabulary is None:
        codec, stop = None, STOP
        ids = encode_prompt(policy.tokenizer, prompt, use_chat_template=template)
    else:  # such a policy can only read and write the turns of its own task
        codec = make_codec(env, policy.tokenizer, use_chat_template=template)
        ids, stop, stop_ids = codec.prompt_ids(prompt, None), codec.stop, codec.stop_ids
    left = env.limits.max_trajectory_tokens - len(ids)
    if left < 1:
        raise UserError(
            f"the prompt of question {job.index} of task {job.task} has {len(ids)} tokens in mode {job.mode}, "
            f"the limit is {env.limits.max_trajectory_tokens}: raise it with --limits.max_trajectory_tokens N"
        )
    params = SamplingParams(
        max_new_tokens=min(env.limits.max_new_tokens, left),
        temperature=policy.settings.temperature,
        top_p=policy.settings.top_p,
        stop=stop,
        seed=job.seed,
        stop_ids=stop_ids,
    )
    try:
        sampled = await policy.sampler.generate(job.id, ids, params)
    finally:
        policy.sampler.release(job.id)
    drawn = sampled.token_ids
    text = turn_text(policy.tokenizer, drawn, stop) if codec is None else codec.turn_text(drawn)
    return result_of_one_turn(job, env, example, prompt, len(ids), text, sampled, calls, policy.knows_ids)


def _cut(reply: str, tokenizer: Tokenizer, env: TextEnv) -> str:
    text = neutralise(reply)
    ids = encode_text(tokenizer, text)
    limit = env.limits.max_observation_tokens
    return text if len(ids) <= limit else tokenizer.decode(ids[:limit], skip_special_tokens=True)
