"""One line of ``results.jsonl``: what a policy did on one question, and what it scored. No clock enters it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sorl_env.env import ToolUseEnv
from sorl_env.errors import UserError, did_you_mean
from sorl_env.parser import parse_turn
from sorl_env.rollout import SampledTurn
from sorl_env.task import Example
from sorl_env.tool import ToolCall
from sorl_env.trajectory import StopReason, Trajectory
from sorl_train.evaluate.answers import answer_in_text, read_answer, read_choice, scores

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
        """What tells it from all others of an evaluation."""
        return self.task, self.mode, self.index, self.sample

    @property
    def id(self) -> str:
        """The sampler's session."""
        return f"{self.task}/{self.mode}/{self.index}/{self.sample}"


@dataclass(frozen=True)
class Row:
    """One question, answered once.

    Attributes:
        turns: each with ``text``, ``kind``, ``content``, ``format_error``, ``observation``, ``tool_calls``, and the
            ``token_ids`` that were drawn (None where a served model's tokenizer is not known).
        answer: what was scored; for multiple choice in one turn the letter. None: no answer.
        answer_from: ``turn`` (agent), or where the answer stood in the output (see ``Answer``).
        scores: by name; the first one is the main score.
        reward: the task's own, in mode ``agent``.
        excluded: a tool was out or the task raised: it says nothing about the policy, counts nowhere, and is tried
            again when the evaluation is started again.
        answer_in_retrieved: a gold answer stood in what was retrieved; None where nothing was searched for.
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
    turns: tuple[Mapping[str, Any], ...]
    answer: str | None
    answer_from: str | None
    scores: Mapping[str, float]
    reward: float | None
    stop_reason: str
    excluded: bool
    error: str | None
    valid_turns: int
    searches: int
    answer_in_retrieved: bool | None
    prompt_tokens: int
    action_tokens: int
    observation_tokens: int
    seed: int

    @property
    def key(self) -> Key:
        """As ``Job.key``."""
        return self.task, self.mode, self.index, self.sample

    @property
    def main_score(self) -> float:
        """Exact match, or the right choice."""
        return next(iter(self.scores.values()))

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any], where: str) -> Row:
        """Inverse of ``to_json``. Raises ``UserError`` for a record of another kind, naming ``where``."""
        if not isinstance(record, dict):
            raise UserError(f"{where}: not a row of sorl-eval: a JSON object is wanted; name another folder")
        names = [field.name for field in dataclasses.fields(cls)]
        for name in (*(n for n in names if n not in record), *(n for n in record if n not in names)):
            raise UserError(f"{where}: not a row of sorl-eval: field {name!r}. {did_you_mean(name, names)}")
        lists = {name: tuple(record[name]) for name in ("golden_answers", "turns")}
        return cls(**(dict(record) | lists))


def row_of_trajectory(job: Job, trajectory: Trajectory, example: Example, keep_ids: bool = True) -> Row:
    """The row of a question answered over several turns. Only an answer in a well-formed turn counts.

    ``keep_ids``: the trajectory's token ids are those of the policy's own tokenizer.
    """
    last = trajectory.turns[-1] if trajectory.turns else None
    answer = last.content if last is not None and last.kind == "answer" else None
    calls = [call for turn in trajectory.turns for call in turn.tool_calls]
    prompt_tokens = trajectory.turns[0].start if trajectory.turns else len(trajectory.token_ids)
    return Row(
        **_question(job, example),
        prompt=trajectory.prompt,
        turns=tuple(
            {
                "text": turn.text,
                "kind": turn.kind,
                "content": turn.content,
                "format_error": turn.format_error,
                "observation": turn.observation,
                "tool_calls": _calls(turn.tool_calls),
                "token_ids": trajectory.token_ids[turn.start : turn.end].tolist() if keep_ids else None,
            }
            for turn in trajectory.turns
        ),
        answer=answer,
        answer_from=None if answer is None else "turn",
        scores=scores(answer, example.golden_answers, example.options),
        reward=trajectory.reward,
        stop_reason=trajectory.stop_reason.value,
        excluded=trajectory.excluded,
        error=trajectory.error,
        valid_turns=sum(turn.format_error is None for turn in trajectory.turns),
        searches=len(calls),
        answer_in_retrieved=_in_retrieved(calls, example),
        prompt_tokens=prompt_tokens,
        action_tokens=trajectory.num_action_tokens,
        observation_tokens=len(trajectory.token_ids) - prompt_tokens - trajectory.num_action_tokens,
    )


def row_of_one_turn(
    job: Job,
    env: ToolUseEnv,
    example: Example,
    prompt: str,
    prompt_tokens: int,
    text: str,
    sampled: SampledTurn,
    calls: Sequence[ToolCall],
    keep_ids: bool = True,
) -> Row:
    """The row of a question answered in one turn. A turn is valid when it answers where it was asked to.

    ``text`` is the output up to its first stop string; ``keep_ids`` as for `row_of_trajectory`.
    """
    if env.task.vocabulary is not None:  # a closed world's policy writes turns as it always does
        parsed = parse_turn(text, env.toolbox.names, env.task.require_think)
        answer, where = (parsed.content, "turn") if parsed.kind == "answer" else (None, None)
        valid, kind, error = parsed.error is None, parsed.kind, parsed.error
    else:
        answer, where = _read(text, job.mode, example)
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
    return Row(
        **_question(job, example),
        prompt=prompt,
        turns=(turn,),
        answer=answer,
        answer_from=where,
        scores=scores(answer, example.golden_answers, example.options),
        reward=None,
        stop_reason=reason.value,
        excluded=False,
        error=None,
        valid_turns=int(valid),
        searches=len(calls),
        answer_in_retrieved=_in_retrieved(calls, example),
        prompt_tokens=prompt_tokens,
        action_tokens=len(sampled.token_ids),
        observation_tokens=0,
    )


def row_of_outage(job: Job, example: Example, prompt: str, error: str) -> Row:
    """The row of a question whose one search failed."""
    return Row(
        **_question(job, example),
        prompt=prompt,
        turns=(),
        answer=None,
        answer_from=None,
        scores=scores(None, example.golden_answers, example.options),
        reward=None,
        stop_reason=StopReason.ERROR.value,
        excluded=True,
        error=error,
        valid_turns=0,
        searches=1,
        answer_in_retrieved=None,
        prompt_tokens=0,
        action_tokens=0,
        observation_tokens=0,
    )


def _question(job: Job, example: Example) -> dict[str, Any]:
    return {
        "task": job.task,
        "mode": job.mode,
        "index": job.index,
        "sample": job.sample,
        "seed": job.seed,
        "example_id": example.id,
        "question": example.question,
        "golden_answers": tuple(example.golden_answers),
        "options": None if example.options is None else dict(example.options),
    }


def _read(text: str, mode: str, example: Example) -> tuple[str | None, str | None]:
    """The answer of an output and where it stood."""
    found = read_answer(text, mode)
    if not example.options:
        return found or (None, None)
    letter = read_choice(text, example.options)
    return letter, None if letter is None else found.where if found else "phrase"


def _calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    return [
        {"tool": call.tool, "argument": call.argument, "ok": call.ok, "hits": call.hits} for call in calls
    ]


def _in_retrieved(calls: Sequence[ToolCall], example: Example) -> bool | None:
    if not calls:
        return None
    found = "\n".join(call.reply for call in calls if call.ok)
    return answer_in_text(found, example.golden_answers, example.options)
