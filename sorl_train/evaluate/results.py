"""One line of ``results.jsonl``: what a policy did on one question, and its scores.

A result holds no times, so that the same evaluation writes the same bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sorl_env.env import ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.rollout import SampledTurn
from sorl_env.task import Example
from sorl_env.tool import ToolCall
from sorl_env.trajectory import StopReason, Trajectory, Turn
from sorl_train.evaluate.answers import answer_in_text, read_answer, scores

Key = tuple[str, str, int, int]  # task, mode, index of the question in the data, sample


@dataclass(frozen=True)
class Job:
    """One question to answer once."""

    task: str
    mode: str
    index: int
    sample: int
    seed: int

    @property
    def key(self) -> Key:
        """Unique within an evaluation."""
        return self.task, self.mode, self.index, self.sample

    @property
    def id(self) -> str:
        """Name of the sampler's session."""
        return f"{self.task}/{self.mode}/{self.index}/{self.sample}"


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """One question, answered once.

    Attributes:
        turns: each with the fields of `turn_facts`, and the sampled ``token_ids`` (None where the tokenizer of a served
            model is not known).
        answer: what was scored, as the policy wrote it. None: no answer.
        answer_from: where the answer was found: ``turn`` in mode agent, else as in ``Answer``.
        scores: by name; the first one is the main score.
        reward: the task's own, in mode ``agent``.
        excluded: a tool failed or the task's code raised. That says nothing about the policy: it enters no figure, and
            the question is tried again when the evaluation is started again.
        answer_in_retrieved: whether a retrieved passage contained a gold answer; None where nothing was searched for.
    """

    task: str
    mode: str
    index: int
    sample: int
    example_id: str
    question: str
    golden_answers: tuple[str, ...]
    options: Mapping[str, str] | None
    prompt: str
    turns: tuple[Mapping[str, Any], ...] = ()
    answer: str | None = None
    answer_from: str | None = None
    scores: Mapping[str, float]
    reward: float | None = None
    stop_reason: str
    excluded: bool = False
    error: str | None = None
    valid_turns: int = 0
    searches: int
    answer_in_retrieved: bool | None = None
    prompt_tokens: int = 0
    action_tokens: int = 0
    observation_tokens: int = 0
    seed: int

    @property
    def key(self) -> Key:
        """As ``Job.key``."""
        return self.task, self.mode, self.index, self.sample

    @property
    def main_score(self) -> float:
        """Exact match, or whether the choice is right."""
        return next(iter(self.scores.values()))

    def to_json(self) -> dict[str, Any]:
        """The result as plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any], where: str) -> EvalResult:
        """Inverse of ``to_json``. Raises ``UserError``, naming ``where``, for a record that is not a result."""
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(record, dict) or record.keys() != names:
            wrong = sorted(names ^ record.keys()) if isinstance(record, dict) else ["it is no JSON object"]
            raise UserError(
                f"{where}: not a result of sorl-eval ({', '.join(wrong)} missing or unknown); name another folder"
            )
        lists = {name: tuple(record[name]) for name in ("golden_answers", "turns")}
        return cls(**(dict(record) | lists))


def result_of_trajectory(
    job: Job, trajectory: Trajectory, example: Example, keep_ids: bool = True
) -> EvalResult:
    """The result of a question answered over several turns. Only an answer in a well-formed turn counts.

    Args:
        keep_ids: whether the token ids of the trajectory are those of the policy's own tokenizer.
    """
    answer = final_answer(trajectory)
    calls = [call for turn in trajectory.turns for call in turn.tool_calls]
    prompt_tokens = trajectory.turns[0].start if trajectory.turns else len(trajectory.token_ids)
    ids = trajectory.token_ids
    return EvalResult(
        **_about(job, example, answer, calls),
        prompt=trajectory.prompt,
        turns=tuple(
            {**turn_facts(turn), "token_ids": ids[turn.start : turn.end].tolist() if keep_ids else None}
            for turn in trajectory.turns
        ),
        answer_from=None if answer is None else "turn",
        reward=trajectory.reward,
        stop_reason=trajectory.stop_reason.value,
        excluded=trajectory.excluded,
        error=trajectory.error,
        valid_turns=sum(turn.format_error is None for turn in trajectory.turns),
        prompt_tokens=prompt_tokens,
        action_tokens=trajectory.num_action_tokens,
        observation_tokens=len(ids) - prompt_tokens - trajectory.num_action_tokens,
    )


def result_of_one_turn(
    job: Job,
    env: ToolUseEnv,
    example: Example,
    prompt: str,
    prompt_tokens: int,
    text: str,
    sampled: SampledTurn,
    calls: Sequence[ToolCall],
    keep_ids: bool = True,
) -> EvalResult:
    """The result of a question answered in one turn. The turn is valid if its answer is where the prompt asks for it.

    Args:
        text: the output up to its first stop string.
        keep_ids: as for `result_of_trajectory`.
    """
    if env.task.vocabulary is not None:  # such a policy can only write the turns of its own task
        parsed = env.format.parse(text, env.toolbox, env.task.require_think)
        answer, where = (parsed.content, "turn") if parsed.kind == "answer" else (None, None)
        valid, kind, error = parsed.error is None, parsed.kind, parsed.error
    else:
        answer, where = read_answer(text, job.mode, example.options) or (None, None)
        valid, kind, error = where in ("tag", "text"), "invalid" if answer is None else "answer", None
    if answer is not None:
        reason = StopReason.ANSWER
    else:
        reason = StopReason.MAX_TOKENS if sampled.finish == "length" else StopReason.INVALID
    turn = {
        "text": text,
        "kind": kind,
        "content": answer or "",
        "format_error": None if error is None else error.value,
        "observation": "",
        "tool_calls": _calls(calls),
        "token_ids": list(sampled.token_ids) if keep_ids else None,
    }
    return EvalResult(
        **_about(job, example, answer, calls),
        prompt=prompt,
        turns=(turn,),
        answer_from=where,
        stop_reason=reason.value,
        valid_turns=int(valid),
        prompt_tokens=prompt_tokens,
        action_tokens=len(sampled.token_ids),
    )


def result_of_outage(job: Job, example: Example, prompt: str, error: str) -> EvalResult:
    """The result of a question whose one search failed."""
    about = _about(job, example, None, ()) | {"searches": 1}
    return EvalResult(**about, prompt=prompt, stop_reason=StopReason.ERROR.value, excluded=True, error=error)


def final_answer(trajectory: Trajectory) -> str | None:
    """The answer of a dialogue; None if it ended without one, which is not the same as an empty answer."""
    last = trajectory.turns[-1] if trajectory.turns else None
    return last.content if last is not None and last.kind == "answer" else None


def turn_facts(turn: Turn) -> dict[str, Any]:
    """A turn as plain values: the policy's text, what is wrong with it, and what the tools replied."""
    names = ("text", "kind", "content", "format_error", "observation")
    return {**{name: getattr(turn, name) for name in names}, "tool_calls": _calls(turn.tool_calls)}


def _calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    return [{name: getattr(call, name) for name in ("tool", "argument", "ok", "hits")} for call in calls]


def _about(job: Job, example: Example, answer: str | None, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """What all results have in common: the question, the answer with its scores, and the searches."""
    found = "\n".join(call.reply for call in calls if call.ok)
    golds, options = example.golden_answers, example.options
    return {
        **dataclasses.asdict(job),
        "example_id": example.id,
        "question": example.question,
        "golden_answers": tuple(golds),
        "options": None if options is None else dict(options),
        "answer": answer,
        "scores": scores(answer, golds, options),
        "searches": len(calls),
        "answer_in_retrieved": answer_in_text(found, golds, options) if calls else None,
    }
