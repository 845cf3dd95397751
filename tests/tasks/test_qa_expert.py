"""The expert of NQ and HotpotQA: what it searches for, what it names, when it gives up; and on real questions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.task import Example, ToolSettings
from sorl_env.task.registry import load_task
from sorl_env.turns.tags import parse_turn
from sorl_tasks._qa_expert import qa_expert

PASSAGES = (
    "<information>\nDoc 1 (Opera): Carmen is long. Bizet died young.\n"
    "Doc 2 (Carmen): The composer of Carmen was Georges Bizet. It has four acts.\n</information>"
)


def example(answers: tuple[str, ...] = ("Georges Bizet",), **metadata: Any) -> Example:
    return Example(id="1", question="who composed Carmen?", golden_answers=answers, metadata=metadata)


def test_it_searches_for_the_question_and_names_the_passage_with_the_answer() -> None:
    assert qa_expert(example(), []) == (
        "<think> I need to look this up. </think>\n<search> who composed Carmen? </search>"
    )
    assert qa_expert(example(), [PASSAGES]) == (
        "<think> Doc 2 says it. </think>\n<answer> Georges Bizet </answer>"
    )


def test_an_answer_is_whole_words() -> None:
    assert qa_expert(example(("acts of",)), [PASSAGES]) is None
    assert qa_expert(example(("Car",)), [PASSAGES]) is None
    assert qa_expert(example(("the Four Acts",)), [PASSAGES]) is not None  # articles and case do not count
    assert qa_expert(example(("the",)), [PASSAGES]) is None  # nothing is left of it


def test_gold_titles_are_searched_for_one_after_the_other() -> None:
    two = example(gold_titles=["Carmen", "Seville"])
    assert qa_expert(two, [PASSAGES]) == (
        "<think> I still need to know about Seville. </think>\n<search> Seville </search>"
    )
    assert qa_expert(two, [PASSAGES, "<information>\nDoc 1 (Spain): Far.\n</information>"]) is None
    turn = qa_expert(two, [PASSAGES, "<information>\nDoc 1 (Seville): A city.\n</information>"])
    assert turn is not None and turn.endswith("<answer> Georges Bizet </answer>")


@pytest.mark.parametrize("facts", [None, "Carmen", [["Carmen", 0], ["Carmen", 2]], [[]], [[7, 0]], [{}]])
def test_odd_supporting_facts_do_no_harm(facts: Any) -> None:
    assert qa_expert(example(supporting_facts=facts), [PASSAGES]) is not None


def test_yes_and_no_follow_from_named_passages_only() -> None:
    assert qa_expert(example(("yes",)), [PASSAGES]) is None
    turn = qa_expert(example(("yes",), gold_titles=["Carmen"]), [PASSAGES])
    assert turn == "<think> The passages about Carmen tell. </think>\n<answer> yes </answer>"


@pytest.mark.parametrize(
    "hostile",
    ["Georges Bizet", "</think> (Doc 1): Georges Bizet.", "Doc 1 </search> (Carmen): Georges Bizet."],
)
def test_what_a_passage_is_called_holds_no_tags(hostile: str) -> None:
    turn = qa_expert(example(), [hostile])
    assert turn == "<think> A passage says it. </think>\n<answer> Georges Bizet </answer>"


@pytest.mark.parametrize("nothing", ["", "</think><answer> x </answer>", "Doc 1 (Georges Bizet): Nobody."])
def test_without_an_answer_in_a_passage_it_gives_up(nothing: str) -> None:
    assert qa_expert(example(), [nothing]) is None


@pytest.mark.parametrize("task", ["nq", "hotpotqa"])
def test_a_hasty_expert_answers_its_share_of_the_questions_without_a_search(task: str) -> None:
    expert = load_task(task, hasty=0.25).expert
    assert expert is not None
    examples = [
        Example(id=str(number), question="who composed Carmen?", golden_answers=("Georges Bizet", "Bizet"))
        for number in range(400)
    ]
    first_turns = [expert(one, []) for one in examples]
    assert first_turns == [expert(one, []) for one in examples]  # the same ones each time
    hasty = "<think> I know this. </think>\n<answer> Georges Bizet </answer>"
    assert 60 < first_turns.count(hasty) < 140
    assert parse_turn(hasty, ("search",)).error is None
    for one, turn in zip(examples, first_turns, strict=True):
        if turn != hasty:
            assert turn == qa_expert(one, []) and expert(one, [PASSAGES]) == qa_expert(one, [PASSAGES])


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_hasty_is_a_share(share: float) -> None:
    with pytest.raises(UserError, match=r"hasty=.*give a share between 0 and 1"):
        load_task("nq", hasty=share)


@pytest.mark.parametrize(
    ("task", "file", "share"),
    [("nq", "nq/train.jsonl.gz", 0.6), ("hotpotqa", "hotpotqa/train_distractor.jsonl.gz", 0.7)],
)
def test_on_real_questions_it_solves_what_it_does_not_give_up(
    task: str, file: str, share: float, shared_data: Path
) -> None:
    settings = ToolSettings(corpus=str(shared_data / "corpus/wiki.jsonl.gz"))
    env = ToolUseEnv(task, data=str(shared_data / file), tool_settings=settings)
    solved = tried = 0
    for index in range(100):
        env.reset(options={"index": index})
        observations: list[str] = []
        while (turn := qa_expert(env.example, observations)) is not None:
            assert parse_turn(turn, ("search",)).error is None
            result = env.step(turn)
            observations.append(result.observation)
            if result.terminated or result.truncated:
                solved += result.reward == 1.0
                tried += 1
                break
    assert solved == tried >= 100 * share
