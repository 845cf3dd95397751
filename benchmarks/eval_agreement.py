"""Does a served model answer as the same model does in process? Two evaluations, question by question, token by token.

    sorl-eval MODEL --task hotpotqa --mode direct cot rag agent --dtype float32 --out here
    vllm serve MODEL --served-model-name NAME --dtype float32 --port 8000
    sorl-eval --endpoint http://127.0.0.1:8000/v1 --model_name NAME --tokenizer MODEL --task hotpotqa \\
      --mode direct cot rag agent --out there
    python benchmarks/eval_agreement.py MODEL here there --json agreement.json

Both draw the most likely token each time, so two dialogues stay the same until one token differs, and go apart from
there. At that token MODEL is asked again, in float32 and with nothing else in the batch, what both candidates' chances
are. The first thing that differs is the cause:

    near tie     both candidates lie within 0.001 nats of the most likely token: the rounding of a sum decides
    choice       they do not: one of the two sides did not draw the most likely token
    prompt       the policy was shown something else (a template, a tokenizer, what a search found)
    length       one side's turn ends where the other's goes on: a limit, a stop string, an end-of-text token
    text         the same tokens read as different text
    observation  the environment replied differently to the same turn
    reading      the same dialogue, another answer or another score
    counts       all is the same but the numbers of tokens

The exit status is 0 when both answered the same questions and all differences are near ties, 1 otherwise. No figure
depends on a clock.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sorl_env.errors import UserError
from sorl_env.figures import markdown_table
from sorl_env.registry import load_task
from sorl_env.task import Limits
from sorl_env.tokens import Tokenizer, encode_prompt
from sorl_env.turn_codec import tag_reply_ids  # as the rollout cut them, to the token
from sorl_train.evaluate.journal import differences, read_folder
from sorl_train.evaluate.rows import Key, Row
from sorl_train.run.files import atomic_write

TIE = 1e-3  # nats; float32 sums taken in another order move a log-probability by about 1e-5
NEAR_TIE = "near tie"
MAY_DIFFER = ("label", "policy")  # of the settings: the same model has two addresses


@dataclass(frozen=True)
class Candidate:
    """What one side drew at the first token that differs, and its log-probability in process."""

    token_id: int
    text: str
    log_prob: float


@dataclass(frozen=True)
class Difference:
    """Where two answers to a question part, and why.

    Attributes:
        turn: the policy's turn, from 0; None for a difference outside of turns.
        position: the token within the turn, from 0; None where all the tokens are the same.
        gap: nats by which the less likely candidate falls short of the most likely token.
        same_answer: answer and scores are the same all the same.
    """

    task: str
    mode: str
    index: int
    cause: str
    turn: int | None
    position: int | None
    candidates: tuple[Candidate, ...]
    gap: float | None
    answers: tuple[str | None, str | None]
    same_answer: bool
    detail: str = ""


@dataclass(frozen=True)
class Parting:
    """The first thing that differs between two rows, before the model is asked."""

    cause: str
    turn: int | None = None
    position: int | None = None
    detail: str = ""


def same_answer(a: Row, b: Row) -> bool:
    """The same answer with the same scores."""
    return a.answer == b.answer and dict(a.scores) == dict(b.scores)


def first_difference(a: Row, b: Row) -> Parting | None:
    """The first thing that differs between two rows of a question; None when they are the same.

    Raises:
        UserError: a row holds no token ids.
    """
    if a.prompt != b.prompt or a.prompt_tokens != b.prompt_tokens:
        return Parting("prompt", detail=f"{a.prompt_tokens} and {b.prompt_tokens} tokens")
    for k, (turn_a, turn_b) in enumerate(zip(a.turns, b.turns, strict=False)):
        ids_a, ids_b = _ids(a, turn_a), _ids(b, turn_b)
        if ids_a != ids_b:
            shared = min(len(ids_a), len(ids_b))
            at = next((i for i in range(shared) if ids_a[i] != ids_b[i]), None)
            lengths = f"{len(ids_a)} and {len(ids_b)} tokens"
            return Parting("length", k, shared, lengths) if at is None else Parting("choice", k, at)
        if turn_a["text"] != turn_b["text"]:
            return Parting("text", k, detail=f"{turn_a['text'][-40:]!r} and {turn_b['text'][-40:]!r}")
        if turn_a["observation"] != turn_b["observation"]:
            return Parting("observation", k)
    if len(a.turns) != len(b.turns):
        return Parting(
            "length", min(len(a.turns), len(b.turns)), detail=f"{len(a.turns)} and {len(b.turns)} turns"
        )
    if not same_answer(a, b) or (a.stop_reason, a.reward) != (b.stop_reason, b.reward):
        return Parting("reading", detail=f"{a.stop_reason} and {b.stop_reason}")
    counts = [(row.action_tokens, row.observation_tokens) for row in (a, b)]
    return Parting("counts", detail=f"{counts[0]} and {counts[1]}") if counts[0] != counts[1] else None


def _ids(row: Row, turn: Mapping[str, Any]) -> list[int]:
    if turn.get("token_ids") is None:
        raise UserError(
            f"question {row.index} of {row.task}, mode {row.mode}, has a turn without token ids: evaluate again with "
            "this version of sorl-eval, a served model with --tokenizer"
        )
    return list(turn["token_ids"])


class LocalModel:
    """MODEL in process, in float32: the next token's log-probabilities after any context."""

    def __init__(self, folder: str, settings: Mapping[str, Any]) -> None:
        from sorl_train.models.policy import load_policy, load_tokenizer

        self.tokenizer: Tokenizer = load_tokenizer(folder)
        self._model = load_policy(folder, "cpu").eval()
        self._settings = settings

    def context(self, row: Row, turn: int, position: int) -> list[int]:
        """The tokens before one of a row's. Raises ``UserError`` when they are not as many as the row says."""
        task = load_task(row.task)
        system = task.system_prompt if row.mode == "agent" else None
        ids = encode_prompt(
            self.tokenizer, row.prompt, system, use_chat_template=self._settings["chat_template"]
        )
        if len(ids) != row.prompt_tokens:
            raise UserError(
                f"the prompt of question {row.index} of {row.task} has {len(ids)} tokens for this model and "
                f"{row.prompt_tokens} in the results: give the model that was evaluated"
            )
        limit = Limits(**self._settings["tasks"][row.task]["limits"]).max_observation_tokens
        for earlier in row.turns[:turn]:
            ids += [*earlier["token_ids"], *tag_reply_ids(self.tokenizer, earlier["observation"], limit)]
        return ids + list(row.turns[turn]["token_ids"][:position])

    def candidates(
        self, context: Sequence[int], tokens: Sequence[int]
    ) -> tuple[tuple[Candidate, ...], float]:
        """``tokens`` as continuations of ``context``, and the gap from the most likely token to the worst of them."""
        import torch

        with torch.inference_mode():
            logits = self._model(torch.tensor([context]), logits_to_keep=1).logits[0, -1]
        log_probs = torch.log_softmax(logits.double(), dim=-1)
        found = tuple(Candidate(i, self.tokenizer.decode([i]), float(log_probs[i])) for i in tokens)
        return found, float(log_probs.max()) - min(candidate.log_prob for candidate in found)


def compare(
    rows_a: Sequence[Row], rows_b: Sequence[Row], model: Callable[[], LocalModel]
) -> tuple[dict[tuple[str, str], list[Key]], list[Difference], int]:
    """All questions that both answered, by task and mode, the differences, and how many one side alone answered.

    A question left out for an outage was not answered.
    """
    side_a, side_b = ({row.key: row for row in rows if not row.excluded} for rows in (rows_a, rows_b))
    cells: dict[tuple[str, str], list[Key]] = {}
    found = []
    for key in (key for key in side_a if key in side_b):
        a, b = side_a[key], side_b[key]
        cells.setdefault((a.task, a.mode), []).append(key)
        parting = first_difference(a, b)
        if parting is not None:
            found.append(_explain(a, b, parting, model))
    return cells, found, len(side_a.keys() ^ side_b.keys())


def _explain(a: Row, b: Row, parting: Parting, model: Callable[[], LocalModel]) -> Difference:
    cause, candidates, gap = parting.cause, (), None
    if cause == "choice":
        assert parting.turn is not None and parting.position is not None
        context = model().context(a, parting.turn, parting.position)
        drawn = [row.turns[parting.turn]["token_ids"][parting.position] for row in (a, b)]
        candidates, gap = model().candidates(context, drawn)
        cause = NEAR_TIE if gap <= TIE else cause
    return Difference(
        task=a.task,
        mode=a.mode,
        index=a.index,
        cause=cause,
        turn=parting.turn,
        position=parting.position,
        candidates=candidates,
        gap=gap,
        answers=(a.answer, b.answer),
        same_answer=same_answer(a, b),
        detail=parting.detail,
    )


def cell_figures(
    cells: Mapping[tuple[str, str], Sequence[Key]], found: Sequence[Difference]
) -> list[dict[str, Any]]:
    """For each task and mode: questions, those answered the same, those the same to the token, differences by cause."""
    figures = []
    for (task, mode), keys in cells.items():
        here = [one for one in found if (one.task, one.mode) == (task, mode)]
        others = sum(not one.same_answer for one in here)
        beyond = sum(not one.same_answer and one.cause != NEAR_TIE for one in here)
        figures.append(
            {
                "task": task,
                "mode": mode,
                "questions": len(keys),
                "same_answer": len(keys) - others,
                "same_answer_up_to_numerics": len(keys) - beyond,
                "same_tokens": len(keys) - len(here),
                "causes": dict(Counter(one.cause for one in here)),
            }
        )
    return figures


def report(figures: Sequence[Mapping[str, Any]], found: Sequence[Difference]) -> str:
    """The table, and a line for each difference."""
    counts = ("questions", "same_answer", "same_answer_up_to_numerics", "same_tokens")
    total = {name: sum(cell[name] for cell in figures) for name in counts}
    causes: Counter[str] = Counter()
    rows = []
    for cell in figures:
        causes.update(cell["causes"])
    for cell in (*figures, {"task": "all", "mode": "", **total, "causes": causes}):
        shares = [f"{cell[name]} ({cell[name] / cell['questions']:.1%})" for name in counts[1:]]
        named = ", ".join(f"{number} {cause}" for cause, number in cell["causes"].items()) or "none"
        rows.append([cell["task"], cell["mode"], cell["questions"], *shares, named])
    head = (
        "task, mode, questions, same answer and score, up to numerics, same to the token, differences".split(
            ", "
        )
    )
    return "\n".join([markdown_table(head, rows, "llrrrrl"), "", *map(_line, found)])


def _line(one: Difference) -> str:
    where = "" if one.turn is None else f" turn {one.turn + 1}"
    where += "" if one.position is None else f" token {one.position + 1}"
    text = f"{one.task} {one.mode} question {one.index}{where}: {one.cause}"
    if one.gap is not None:
        drawn = " or ".join(f"{candidate.text!r} ({candidate.log_prob:.6f})" for candidate in one.candidates)
        text += f", {drawn}, gap {one.gap:.1e}"
    if one.detail:
        text += f", {one.detail}"
    answers = "same answer" if one.same_answer else f"answers {one.answers[0]!r} and {one.answers[1]!r}"
    return f"{text}; {answers}"


def check_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    """Raise ``UserError`` where two evaluations were not asked the same, or drew at random."""
    first, second = ({k: v for k, v in side.items() if k not in MAY_DIFFER} for side in (a, b))
    different = list(differences(first, second))
    if different:
        raise UserError("the two evaluations differ in their settings:\n  " + "\n  ".join(different))
    if a["temperature"] != 0:
        raise UserError(f"both drew at temperature {a['temperature']:g}: only greedy answers can agree")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit status: 0 near ties at most, 1 other differences, 2 wrong usage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", help="the model's folder")
    parser.add_argument("a", type=Path, help="folder of the evaluation in process")
    parser.add_argument("b", type=Path, help="folder of the evaluation of the served model")
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args(argv)
    try:
        (settings, rows_a), (settings_b, rows_b) = read_folder(args.a), read_folder(args.b)
        check_settings(settings, settings_b)
        loaded: list[LocalModel] = []

        def model() -> LocalModel:
            if not loaded:
                loaded.append(LocalModel(args.model, settings))
            return loaded[0]

        cells, found, alone = compare(rows_a, rows_b, model)
        if not cells:
            raise UserError(f"{args.a} and {args.b} have no question in common")
    except UserError as error:
        print(f"eval_agreement: {error}", file=sys.stderr)
        return 2
    figures = cell_figures(cells, found)
    print(report(figures, found))
    if alone:
        print(f"{alone} of the questions: answered on one side alone", file=sys.stderr)
    if args.json:
        content = {"tie": TIE, "cells": figures, "answered_on_one_side": alone}
        content["differences"] = [dataclasses.asdict(one) for one in found]
        atomic_write(args.json, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return 1 if alone or any(one.cause != NEAR_TIE for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
