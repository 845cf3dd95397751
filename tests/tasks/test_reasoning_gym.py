"""``reasoning_gym:NAME``: the data sets of reasoning-gym as tasks."""

from __future__ import annotations

import pytest

from sorl_env import ToolUseEnv, UserError, load_task
from sorl_env.commands.check_task import check_task

pytest.importorskip("reasoning_gym", reason="needs pip install -e '.[reasoning-gym]'")


def test_a_right_answer_scores_one_and_a_wrong_one_nothing() -> None:
    env = ToolUseEnv(load_task("reasoning_gym:chain_sum", examples=5))
    for index in range(5):
        prompt, info = env.reset(options={"index": index})
        assert info["question"] in prompt
        answer = env.example.golden_answers[0]
        result = env.step(f"<think> so </think> <answer> {answer} </answer>")
        assert result.terminated and result.info["reward_items"] == {"score": 1.0}
        env.reset(options={"index": index})
        assert env.step("<think> so </think> <answer> none </answer>").reward < 1
    assert all(
        check.passed for check in check_task(env) if check.name not in ("wrong answer", "empty answer")
    )


def test_seeds_and_splits_have_questions_of_their_own() -> None:
    def questions(split: str, **knobs: int) -> list[str]:
        env = ToolUseEnv(load_task("reasoning_gym:chain_sum", examples=20, **knobs), split=split)
        return [example.question for example in env.examples.examples]

    assert questions("train") == questions("train")
    assert len({tuple(questions("train")), tuple(questions("test")), tuple(questions("train", seed=1))}) == 3


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("chain_sm", {}, "Did you mean 'chain_sum'"),
        ("chain_sum", {"settings": {"terms": 2}}, "unexpected keyword argument 'terms'"),
        ("chain_sum", {"settings": {"min_terms": 9, "max_terms": 2}}, "settings"),
        ("chain_sum", {"examples": 0}, "examples must lie between 1"),
        ("chain_sum", {"seed": -1}, "seed cannot be negative"),
    ],
)
def test_what_does_not_exist_is_refused(name: str, knobs: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_task(f"reasoning_gym:{name}", **knobs)
