"""The folder of an evaluation: its settings, and one line for each answered question.

::

    settings.json    what decides the results: policy, tasks and their data, modes, sampling
    manifest.json    versions, commit, hardware, command
    results.jsonl    one result per question and sample, without times: the same bytes for the same settings
    summary.json     figures with intervals       table.md    the paper's Table 1 with ours

It may grow: more questions, modes, samples or tasks, as long as these include all that the folder has. A killed
evaluation leaves complete lines, in the order in which questions ended, and at most one incomplete line. The next start
continues from them, and sorts all lines at the end.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.rollout import SampledTurn
from sorl_env.task import Example
from sorl_env.text import read_json
from sorl_env.tool import ToolCall
from sorl_env.trajectory import StopReason, Trajectory, Turn
from sorl_train.evaluate.answers import read_answer, scores
from sorl_train.rollout.metrics import holds_answer
from sorl_train.run.files import LOCK, append_line, atomic_write
from sorl_train.run.folder import differences
from sorl_train.run.manifest import environment_facts

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
    """One question, answered once. It is ``excluded`` if a tool failed or the task's code raised. That says nothing
    about the policy: it enters no figure, and the question is tried again when the evaluation is started again."""

    task: str
    mode: str
    index: int
    sample: int
    example_id: str
    question: str
    golden_answers: tuple[str, ...]
    options: Mapping[str, str] | None
    prompt: str
    turns: tuple[
        Mapping[str, Any], ...
    ] = ()  # `turn_facts`, and token_ids: None where a served model's are not known
    answer: str | None = None  # what was scored, as the policy wrote it
    answer_from: str | None = None  # where it was found: ``turn`` in mode agent, else as in ``Answer``
    scores: Mapping[str, float]  # by name; the first one is the main score
    reward: float | None = None  # the task's own, in mode ``agent``
    stop_reason: str
    excluded: bool = False
    error: str | None = None
    valid_turns: int = 0
    searches: int
    answer_in_retrieved: bool | None = None  # None where nothing was searched for
    prompt_tokens: int = 0
    action_tokens: int = 0
    observation_tokens: int = 0
    seed: int

    @property
    def key(self) -> Key:
        """As ``Job.key``."""
        return self.task, self.mode, self.index, self.sample

    @classmethod
    def from_json(cls, record: Mapping[str, Any], where: str) -> EvalResult:
        """A line of ``results.jsonl``. Raises ``UserError``, naming ``where``, for a record that is not a result."""
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(record, dict) or record.keys() != names:
            wrong = sorted(names ^ record.keys()) if isinstance(record, dict) else ["it is not a JSON object"]
            raise UserError(
                f"{where}: not a result of sorl-eval ({', '.join(wrong)} missing or unknown); name another folder"
            )
        lists = {name: tuple(record[name]) for name in ("golden_answers", "turns")}
        return cls(**(dict(record) | lists))


def result_of_trajectory(
    job: Job, trajectory: Trajectory, example: Example, keep_ids: bool = True
) -> EvalResult:
    """The result of a question answered over several turns. Only an answer in a well-formed turn counts. ``keep_ids``:
    the token ids of the trajectory are those of the policy's own tokenizer."""
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
    """The result of a question answered in one turn, whose ``text`` goes up to its first stop string. The turn is valid
    if its answer is where the prompt asks for it."""
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
    found = "\n".join(call.reply for call in calls if call.ok)
    golds, options = example.golden_answers, example.options
    sought = [options.get(gold, "") for gold in golds] if options else golds
    return {
        **dataclasses.asdict(job),
        "example_id": example.id,
        "question": example.question,
        "golden_answers": tuple(golds),
        "options": None if options is None else dict(options),
        "answer": answer,
        "scores": scores(answer, golds, options),
        "searches": len(calls),
        "answer_in_retrieved": holds_answer(found, sought) if calls else None,
    }


class EvalResultsFile:
    """The results of one evaluation on disk. Nothing is written before the first result. Raises ``UserError`` if the
    folder holds something else, or results of settings that these do not include."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self.path = folder / "results.jsonl"
        self._settings = json.loads(json.dumps(settings))
        # those in the folder; ours are written with a result, so that a refused evaluation does not bind the folder
        self._saved: Mapping[str, Any] | None = None
        if (folder / "settings.json").is_file():
            self._saved = _read_settings(folder / "settings.json")
            self._check(self._saved)
        elif folder.exists() and {path.name for path in folder.iterdir()} - {LOCK, "manifest.json"}:
            raise UserError(f"{folder} holds no evaluation of ours; give another folder with --out")
        # those of a tool's outage are tried again
        found = _read_results(self.path) if self.path.is_file() else []
        self.results = {result.key: result for result in found if not result.excluded}
        if self.path.is_file():
            self._write(list(self.results))  # without an incomplete last line

    def _check(self, old: Mapping[str, Any]) -> None:
        changed = list(differences(_grown(old, self._settings), self._settings, was="there"))
        if changed:
            lines = "\n".join(f"  {line}" for line in changed)
            raise UserError(
                f"{self.folder} holds an evaluation with other settings:\n{lines}\nGive another folder with --out. "
                "(The same one can grow: more questions, modes, samples or tasks beside those it has.)"
            )

    def add(self, result: EvalResult) -> None:
        """Append a result immediately."""
        self._save_settings()
        append_line(self.path, _line(result))
        self.results[result.key] = result

    def finish(self, jobs: Sequence[Job]) -> list[EvalResult]:
        """Write the file in the order of the questions, and return the results."""
        self._save_settings()
        self._write([job.key for job in jobs])
        return [self.results[job.key] for job in jobs]

    def _write(self, keys: Sequence[Key]) -> None:
        atomic_write(self.path, "".join(_line(self.results[key]) for key in keys))

    def _save_settings(self) -> None:
        if self._saved is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write(self.folder / "manifest.json", json.dumps(environment_facts(), indent=2) + "\n")
        if self._saved != self._settings:
            (self.folder / "summary.json").unlink(missing_ok=True)  # it marks a finished evaluation
            atomic_write(self.folder / "settings.json", json.dumps(self._settings, indent=2) + "\n")
            self._saved = self._settings


def read_folder(folder: Path) -> tuple[dict[str, Any], list[EvalResult]]:
    """The settings and results of an evaluation's folder. Raises ``UserError`` if it is not one."""
    settings, results = folder / "settings.json", folder / "results.jsonl"
    if not settings.is_file() or not results.is_file():
        raise UserError(
            f"{folder} holds no evaluation (no {settings.name} with {results.name}): give the folder that "
            "sorl-eval wrote with --out"
        )
    return _read_settings(settings), _read_results(results)


def _read_results(path: Path) -> list[EvalResult]:
    results = []
    # an incomplete last line is left out
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            record = read_json(line)
        except ValueError as error:
            raise UserError(
                f"{path}:{number}: not a result of sorl-eval: {error}; delete the folder, or name another"
            ) from error
        results.append(EvalResult.from_json(record, f"{path}:{number}"))
    return results


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        settings = read_json(file.read_bytes())
        if not {"label", "tasks", "modes", "limit", "samples"} <= settings.keys():
            raise ValueError("it lacks settings that sorl-eval writes")
        return dict(settings)
    except (ValueError, AttributeError) as error:
        raise UserError(
            f"{file}: not the settings of an evaluation ({error}); give another folder with --out"
        ) from error


def _grown(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """``old`` with those values of ``new`` that include everything ``old`` asked for."""
    limit = new["limit"]
    wider = {
        "tasks": old["tasks"].keys() <= new["tasks"].keys(),
        "modes": set(old["modes"]) <= set(new["modes"]),
        "limit": limit is None or (old["limit"] is not None and old["limit"] <= limit),
        "samples": old["samples"] <= new["samples"],
    }
    grown = dict(old) | {name: new[name] for name, contains in wider.items() if contains}
    if wider["tasks"]:
        grown["tasks"] = {name: old["tasks"].get(name, facts) for name, facts in new["tasks"].items()}
    return grown


def _line(result: EvalResult) -> str:
    return json.dumps(dataclasses.asdict(result), ensure_ascii=False) + "\n"
