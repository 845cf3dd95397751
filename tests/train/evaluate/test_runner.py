"""The four modes on MiniHop, with a scripted policy and with outages."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.rollout import RolloutSettings
from sorl_env.task import ToolSettings
from sorl_env.task.registry import load_task
from sorl_env.tool import ToolUnavailableError
from sorl_env.tool.toolbox import Toolbox
from sorl_train.evaluate.endpoint import TextTokenizer
from sorl_train.evaluate.results import EvalResult
from sorl_train.evaluate.runner import (
    MODES,
    Policy,
    check_modes,
    check_search,
    one_turn_prompt,
    plan_jobs,
    run_evaluation,
)
from sorl_train.evaluate.summary import summarize

from ...trajectories import Scripted
from .conftest import WORLD, Expert


def answer(policy: Policy, env: ToolUseEnv, modes: list[str], limit: int | None = None) -> list[EvalResult]:
    jobs = plan_jobs({"minihop": env}, modes, limit, 1, 0)
    rows: dict[object, EvalResult] = {}
    run_evaluation(policy, {"minihop": env}, jobs, lambda row: rows.update({row.key: row}))
    return [rows[job.key] for job in jobs]


def test_the_expert_answers_all_as_an_agent_one_hop_with_one_search_and_nothing_alone(
    expert: Policy, minihop: ToolUseEnv
) -> None:
    rows = answer(expert, minihop, list(MODES))
    by_mode = {mode: [row for row in rows if row.mode == mode] for mode in MODES}
    assert all(len(group) == 64 for group in by_mode.values())
    assert all(row.scores["em"] == 1.0 and row.reward == 1.0 for row in by_mode["agent"])
    assert not any(row.scores["em"] for row in (*by_mode["direct"], *by_mode["cot"]))
    for row in by_mode["agent"]:
        hops = minihop.examples.examples[row.index].metadata["hops"]
        assert (row.searches, len(row.turns), row.valid_turns) == (hops, hops + 1, hops + 1)
        assert row.answer_in_retrieved is True and row.stop_reason == "answer"
    for row in by_mode["rag"]:  # one search finds the passage of the name in the question, enough for one hop
        hops = minihop.examples.examples[row.index].metadata["hops"]
        assert row.searches == 1 and (row.scores["em"] == 1.0) <= (hops == 1)
    assert sum(row.scores["em"] for row in by_mode["rag"]) > 16
    assert isinstance(expert.sampler, Expert) and expert.sampler.most_in_flight == 4

    entries = summarize(rows)
    means = {entry["mode"]: entry["metrics"]["em"] for entry in entries}
    assert means["agent"]["low"] > means["rag"]["high"] and means["rag"]["low"] > means["direct"]["high"]


def test_counts_of_tokens_add_up(expert: Policy, minihop: ToolUseEnv) -> None:
    (row,) = answer(expert, minihop, ["agent"], limit=1)
    prompt, *_ = minihop.spawn().begin_episode(row.index)
    assert row.prompt_tokens == len(expert.tokenizer.encode(prompt, add_special_tokens=False))
    texts = [turn["text"] for turn in row.turns]
    assert row.action_tokens == sum(len(expert.tokenizer.encode(t, add_special_tokens=False)) for t in texts)
    assert [expert.tokenizer.decode(turn["token_ids"]) for turn in row.turns] == texts
    seen = [turn["observation"] for turn in row.turns]
    assert row.observation_tokens == sum(
        len(expert.tokenizer.encode(t, add_special_tokens=False)) for t in seen
    )


def test_a_limit_is_a_seeded_sample_and_a_larger_one_contains_it(minihop: ToolUseEnv) -> None:
    def indices(limit: int, seed: int = 0) -> set[int]:
        return {job.index for job in plan_jobs({"minihop": minihop}, ["direct"], limit, 1, seed)}

    assert len(indices(10)) == 10 and indices(10) < indices(30)
    assert indices(10) == indices(10) and indices(10) != indices(10, seed=1)
    assert indices(10) != set(range(10))


def test_samples_of_a_question_have_seeds_of_their_own(minihop: ToolUseEnv) -> None:
    jobs = plan_jobs({"minihop": minihop}, ["direct", "rag"], 5, 3, 0)
    assert len({job.seed for job in jobs}) == len(jobs) == 30
    assert [job.key for job in jobs] == sorted((job.key for job in jobs), key=lambda key: key)


class Flaky:
    """Finds nothing for most, and is out for every other question."""

    name = "search"
    description = "Search."
    schema = load_task("minihop", **WORLD).tools(ToolSettings())[0].schema  # type: ignore[operator, union-attr]
    inline = True

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, query: str) -> str:
        self.calls += 1
        if self.calls % 2:
            raise ToolUnavailableError("the index is on fire")
        return "Nothing found."


@pytest.mark.parametrize("mode", ["rag", "agent"])
def test_an_outage_counts_nowhere(expert: Policy, minihop: ToolUseEnv, mode: str) -> None:
    broken = minihop.spawn()
    broken.toolbox = Toolbox([Flaky()], retries=0)
    rows = answer(expert, broken, [mode], limit=12)
    out = [row for row in rows if row.excluded]
    assert len(out) == 6 and all("on fire" in (row.error or "") for row in out)
    assert {row.stop_reason for row in out} == {"error"}
    (entry,) = summarize(rows)
    assert entry["excluded"] == 6 and entry["questions"] == 6


def test_a_prompt_that_does_not_fit_says_what_to_raise(expert: Policy) -> None:
    task = load_task("minihop", **WORLD)
    env = ToolUseEnv(task, split="test", limits=type(task.limits)(max_trajectory_tokens=8))
    with pytest.raises(UserError, match=r"max_trajectory_tokens"):
        answer(expert, env, ["direct"], limit=1)


def test_unknown_modes_and_tasks_without_search_are_named(minihop: ToolUseEnv) -> None:
    with pytest.raises(UserError, match=r"no mode 'agnet'. Did you mean 'agent'"):
        check_modes(["direct", "agnet"])
    toolless = minihop.spawn()
    toolless.toolbox = Toolbox([])
    check_search({"minihop": toolless}, ["direct", "agent"])
    with pytest.raises(UserError, match="task minihop does not have"):
        check_search({"minihop": toolless}, ["rag"])


def test_prompts_of_real_tasks() -> None:
    nq, medical = load_task("nq"), load_task("alphamed19k")
    assert nq.embedded is not None and medical.embedded is not None
    question, choice = nq.embedded("test")[0], medical.embedded("test")[0]
    assert one_turn_prompt("direct", nq, question).startswith(
        "Answer the question based on your own knowledge."
    )
    cot = one_turn_prompt("cot", nq, question)
    assert (
        cot.endswith(f"Question: {question.question.rstrip('?')}?\n") and "<answer> Beijing </answer>" in cot
    )
    rag = one_turn_prompt("rag", nq, question, "Doc 1 (Paris): {a} city")
    assert rag.endswith(" Context: Doc 1 (Paris): {a} city \n")
    assert choice.options is not None
    for mode in ("direct", "cot", "rag"):
        prompt = one_turn_prompt(mode, medical, choice, "passages")
        assert all(f"\n{letter}: {text}" in prompt for letter, text in choice.options.items())
        assert ("Context: passages" in prompt) == (mode == "rag")
        assert "<search>" not in prompt  # nobody could serve it


def test_a_policy_of_a_model_that_writes_prose() -> None:
    """Direct, CoT and RAG over a real question task: the rows say where the answer stood."""
    tokenizer = TextTokenizer()
    says = {
        "direct": "Paris\nQuestion: and then?",
        "cot": "<think>Hm.</think> The answer is Paris. Yes.",
        "rag": "<think>It is stated.</think>\n<answer> Paris </answer> and more",
    }

    env = ToolUseEnv("nq", split="test")
    jobs = plan_jobs({"nq": env}, ["direct", "cot", "rag"], 1, 1, 0)
    sampler = Scripted(tokenizer, {job.id: [says[job.mode]] for job in jobs})
    policy = Policy(sampler, tokenizer, nullcontext, RolloutSettings(temperature=0.0))
    rows: list[EvalResult] = []
    run_evaluation(policy, {"nq": env}, jobs, lambda row: rows.append(row))
    found = {row.mode: (row.answer, row.answer_from, row.valid_turns) for row in rows}
    expected = {"direct": ("text", 1), "cot": ("phrase", 0), "rag": ("tag", 1)}
    assert found == {mode: ("Paris", *where) for mode, where in expected.items()}
