"""Half surrogate pairs from the questions to the page: a tool that echoes JSON lets any policy write them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.rollout import RolloutJob, RolloutSettings, collect
from sorl_env.trajectory import Trajectory, read_jsonl, write_jsonl
from sorl_train.evaluate.cli import main as evaluate
from sorl_train.evaluate.endpoint import TextTokenizer
from sorl_train.report.viewer import write_viewer
from sorl_train.run.files import read_jsonl as read_metrics
from sorl_train.run.folder import RunDir

from ..trajectories import Scripted
from .conftest import train_short

TASK = r'''
"""Three questions, and a tool that says what it was told. Text with half a surrogate pair everywhere."""

import json

from sorl_env import Example, Limits, Task, ToolInputError
from sorl_env.rewards import exact_match


def note(request: str) -> str:
    try:
        said = json.loads(request.replace(" ", ""))["text"]
    except (ValueError, KeyError, TypeError):
        raise ToolInputError("Write JSON .")
    return f"bolts 3 {said} {json.dumps(said)}"


note.inline = True


def embedded(split):
    return [
        Example(
            f"{split} {i} \ude00",
            f"How many bolts \ud800 lie on shelf {i} ?",
            ("3", "three \udfff"),
            metadata={"x": "\ud801"},
        )
        for i in range(12)
    ]


def reward(example, turns):
    answers = [turn.content for turn in turns if turn.kind == "answer"]
    return {"exact_match": exact_match(answers[-1], example.golden_answers) if answers else 0.0}


def expert(example, observations):
    if observations:
        return "<think> bolts </think> <answer> 3 </answer>"
    return '<think> look </think> <note> {"text":"\\ud800"} </note>'


TASK = Task(
    name="halves",
    prompt=lambda example: f"Answer \ud83d\ude00 \ud800 . {example.question}",
    system_prompt="\udfff",
    reward=reward,
    parse_row=lambda row: Example(row["id"], row["question"], tuple(row["golden_answers"])),
    tools=[note],
    embedded=embedded,
    limits=Limits(3, max_prompt_tokens=96, max_new_tokens=24, max_observation_tokens=64, max_trajectory_tokens=384),
    expert=expert,
    vocabulary=lambda: ["How many bolts lie on shelf look Answer ? .", *map(str, range(12))],
)
'''


@pytest.fixture(scope="module")
def task_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("task") / "halves.py"
    path.write_text(TASK, encoding="utf-8")
    return str(path)


def check_texts(trajectories: list[Trajectory], folder: Path) -> None:
    """They are valid, and the same from a file."""
    calls = [call for t in trajectories for turn in t.turns for call in turn.tool_calls if call.ok]
    assert calls and all('bolts 3 \ufffd "' in call.reply for call in calls)
    for trajectory in trajectories:
        assert "How many bolts \ufffd lie" in trajectory.prompt
        texts = [trajectory.prompt, trajectory.example_id, trajectory.error or ""]
        for turn in trajectory.turns:
            texts += [turn.text, turn.content, turn.observation]
            texts += [
                text for call in turn.tool_calls for text in (call.argument, call.reply, call.error or "")
            ]
        for text in texts:
            text.encode("utf-8")
    write_jsonl(folder / "t.jsonl", trajectories)
    found = read_jsonl(folder / "t.jsonl")
    assert [(t.id, t.prompt, t.turns) for t in found] == [(t.id, t.prompt, t.turns) for t in trajectories]


# each turn with half a surrogate pair
TURNS = [
    '<think>\ud800</think><note>{"text":"\\ud800"}</note>',
    "<think>\ude00</think><answer>3\udfff</answer>",
]


def test_rollouts_of_hostile_text(task_file: str, tmp_path: Path) -> None:
    env, tokenizer = ToolUseEnv(task_file), TextTokenizer()
    jobs = [RolloutJob(f"g/{i}", "g", i, i) for i in range(3)]
    settings = RolloutSettings(use_chat_template=False)
    found = asyncio.run(collect(env, tokenizer, Scripted(tokenizer, TURNS), jobs, settings))
    assert [t.stop_reason.value for t in found] == ["answer"] * 3
    assert [turn.text for turn in found[0].turns][1] == "<think>\ufffd</think><answer>3\ufffd</answer>"
    check_texts(found, tmp_path)


@pytest.mark.slow
def test_training_on_hostile_text(task_file: str, tmp_path: Path) -> None:
    run_dir, summary = train_short(
        tmp_path / "run", task=task_file, task_args={}, eval__every=1, rollout__save_every=1
    )
    lines = read_metrics(run_dir.metrics)
    assert summary["steps"] == 2 and lines[-1]["eval/success"] > 0.5
    trajectories = [t for path in sorted(run_dir.trajectories.glob("step_*.jsonl")) for t in read_jsonl(path)]
    assert not any(t.excluded for t in trajectories)
    check_texts(trajectories, tmp_path)
    assert "halves" in write_viewer(RunDir(run_dir.path).path).read_text(encoding="utf-8")
    policy = str(run_dir.checkpoints / "best" / "policy")
    out = tmp_path / "eval"
    options = "--split test --mode agent --quiet --hardware.threads 1".split()
    assert evaluate([policy, "--task", task_file, *options, "--out", str(out)]) == 0
    assert (out / "results.jsonl").read_bytes().count(b"bolts 3") > 0
