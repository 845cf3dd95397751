"""Format ``tool_calls`` with MiniHop's tiny policy: demonstrations, a run, its viewer, evaluation and server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from sorl_env.envs.prompts import make_codec
from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.rollout import RolloutJob, RolloutSettings
from sorl_env.task import Example, Task
from sorl_env.task.registry import load_task
from sorl_env.trajectory import Trajectory
from sorl_env.trajectory.token_classes import CLASSES, TokenClassifier
from sorl_env.turns.tool_calls import write_call
from sorl_train.config.files import load_config
from sorl_train.evaluate.cli import main as evaluate
from sorl_train.evaluate.runner import Policy, plan_jobs, run_evaluation
from sorl_train.models.policy import load_tokenizer
from sorl_train.models.tiny import build_tiny_policy
from sorl_train.report.dialogues import message_segments, read_some
from sorl_train.report.viewer import encode
from sorl_train.serve_agent.agent import Agent
from sorl_train.serve_agent.chat import parse_request
from sorl_train.sft.cold_start import start_folder
from sorl_train.sft.fine_tune import expert_demos, expert_trajectory

from ..trajectories import Scripted
from .conftest import WORLD, short_config, train_short
from .evaluate.completions_server import serving


@pytest.fixture(scope="module")
def env() -> ToolUseEnv:
    return ToolUseEnv(load_task("minihop", **WORLD), format="tool_calls")


@pytest.fixture(scope="module")
def tokenizer(env: ToolUseEnv, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny_policy(env.task, folder, hidden_size=48, num_layers=2, num_heads=4, format="tool_calls")
    return load_tokenizer(str(folder))


def _expert(env: ToolUseEnv, tokenizer: Any, index: int) -> Trajectory:
    job = RolloutJob("demo", "demo", index, 0)
    played = expert_trajectory(env.spawn(), tokenizer, job, use_chat_template=True)
    assert played is not None
    return played


def test_the_expert_plays_in_calls_of_the_template(env: ToolUseEnv, tokenizer: Any) -> None:
    for index in range(16):
        played = _expert(env, tokenizer, index)
        assert played.reward == 1 and played.metadata == {"format": "tool_calls"}
        assert [turn.format_error for turn in played.turns] == [None] * len(played.turns)
        assert tokenizer.unk_token_id not in played.token_ids
        assert all(turn.text.count("<function=search>") == (turn.kind == "tool") for turn in played.turns)
    assert len(expert_demos(env, tokenizer, 4, use_chat_template=True)) == 4


def test_the_classes_of_a_calls_tokens_and_its_parts_in_the_viewer(env: ToolUseEnv, tokenizer: Any) -> None:
    played = _expert(env, tokenizer, 0)
    classes = TokenClassifier(tokenizer)(played)
    call, last = played.turns[0], played.turns[-1]
    named = [CLASSES[i] for i in classes[call.start : call.end]]
    think = [i for i, name in enumerate(named) if name == "reasoning"]
    assert think == list(range(len(think)))  # first the thoughts, then the call with a name of two words
    assert named[len(think) :] == [*["tag"] * 3, *["query"] * 2, *["tag"] * 4]
    answer = [CLASSES[i] for i in classes[last.start : last.end]]
    assert answer[-3:] == ["answer", "answer", "tag"] and set(answer[:-3]) == {"reasoning"}
    assert (classes[~played.action_mask] == -1).all()
    assert [kind for kind, _ in message_segments(call)] == ["think", "tool"]
    assert [kind for kind, _ in message_segments(last)] == ["think", "answer"]
    assert "".join(text for _, text in message_segments(call)) == call.text
    shown = encode(played, None, "")["turns"]
    assert [kind for kind, _ in shown[0]["pieces"]] == ["think", "tool"]
    broken = dataclasses.replace(call, kind="invalid", content="", text="<tool_call> oh")
    assert message_segments(broken) == [("plain", "<tool_call> oh")]


def test_gymnasium_and_vectors_take_the_format() -> None:
    knobs = {"knobs": WORLD, "format": "tool_calls"}
    single = gymnasium.make("sorl/MiniHop-v0", **knobs)
    prompt, about = single.reset(seed=0)
    assert prompt.startswith("Search, then answer.")
    call = write_call("search", {"query": about["question"]})
    reply, _, _, _, info = single.step(call)
    assert info["parsed"].tool == "search" and reply.startswith("Doc 1") and "<" not in reply
    reply, _, _, _, info = single.step("<search>nobody</search><tool_call>")
    assert info["format_error"] == "unclosed" and reply.startswith("Invalid message")
    assert single.step("Paris")[2] is True
    pair = gymnasium.make_vec("sorl/MiniHop-v0", num_envs=2, **knobs)
    pair.reset(seed=0)
    _, _, ended, _, infos = pair.step([call, "Paris"])
    assert ended.tolist() == [False, True] and infos["parsed"][0].tool == "search"
    with pytest.raises(UserError, match=r"there is no turn format 'tool_call'.*tool_calls"):
        gymnasium.make("sorl/MiniHop-v0", knobs=WORLD, format="tool_call")


def test_prompts_of_all_tasks_name_no_tags() -> None:
    for name in ("nq", "hotpotqa", "bioasq", "alphamed19k", "medqa", "minihop"):
        played = ToolUseEnv(load_task(name), format="tool_calls")
        prompt, info = played.reset(seed=1)
        assert info["question"].strip() in prompt and "<" not in prompt.replace(info["question"], "")


def test_a_task_that_only_asks_for_tags_is_refused() -> None:
    asking = Task(
        name="tagged",
        prompt=lambda example: f"Answer inside <answer> and </answer>. {example.question}",
        reward=lambda example, turns: {},
        parse_row=lambda row: Example("0", "?"),
        embedded=lambda split: [Example("0", "<answer>?")],
    )
    with pytest.raises(UserError, match="give the task a tool_call_prompt"):
        ToolUseEnv(asking, format="tool_calls").reset(seed=0)
    plain = dataclasses.replace(asking, prompt=lambda example: example.question)
    assert ToolUseEnv(plain, format="tool_calls").reset(seed=0)[0] == "<answer>?"


def test_settings_that_do_not_go_with_it_are_named() -> None:
    for setting, said in (
        ("chat_template", "use chat_template=true"),
        ("sft.demos", "the task's scripted expert"),
    ):
        value = False if setting == "chat_template" else "demos.jsonl"
        with pytest.raises(UserError, match=said):
            load_config("minihop", {"format": "tool_calls", setting: value})
    with pytest.raises(UserError, match="format"):
        load_config("minihop", {"format": "calls"})
    assert start_folder(short_config()) != start_folder(short_config(format="tool_calls"))
    assert start_folder(short_config()) != start_folder(short_config(hardware__dtype="bfloat16"))


def scripted(env: ToolUseEnv, tokenizer: Any) -> Scripted:
    """A sampler that writes a call, then an answer, as the template does."""
    codec = make_codec(env, tokenizer, use_chat_template=True)
    call = "<tool_call> <function=search> <parameter=query> employer </parameter> </function> </tool_call>"
    parsed = [codec.format.parse(text, env.toolbox, False) for text in (call, "employer")]
    return Scripted(tokenizer, [codec.written_turn(turn, "")[1] for turn in parsed])


def test_the_server_tells_the_turns_and_the_answer(env: ToolUseEnv, tokenizer: Any) -> None:
    settings = RolloutSettings(temperature=0.0, max_concurrency=1)
    agent = Agent(Policy(scripted(env, tokenizer), tokenizer, nullcontext, settings), env)
    body = {"model": "agent", "messages": [{"role": "user", "content": "who?"}]}
    told: list[dict[str, Any]] = []

    async def ask() -> Trajectory:
        dialogue = await agent.prepare(parse_request(json.dumps(body).encode(), "agent"))
        return await agent.answer(dialogue, told.append)

    with agent.running():
        trajectory = asyncio.run(ask())
    assert [turn.kind for turn in trajectory.turns] == ["tool", "answer"]
    texts = [turn["text"] for turn in told]
    assert texts == [turn.text for turn in trajectory.turns] and texts[1] == "employer"


def test_evaluation_in_one_turn_reads_messages_and_refuses_rag(env: ToolUseEnv, tokenizer: Any) -> None:
    script = scripted(env, tokenizer)
    script.turns = script.turns[1:]  # type: ignore[index]
    policy = Policy(script, tokenizer, nullcontext, RolloutSettings(temperature=0.0, max_concurrency=1))
    rows: list[Any] = []
    jobs = plan_jobs({"minihop": env}, ["direct"], 1, 1, 0)
    run_evaluation(policy, {"minihop": env}, jobs, lambda row: rows.append(row))
    assert rows[0].answer == "employer" and rows[0].valid_turns == 1


def _said(row: dict[str, Any]) -> list[Any]:
    return [row["prompt"], row["answer"], row["valid_turns"], *(turn["text"] for turn in row["turns"])]


@pytest.mark.slow
def test_a_run_learns_is_evaluated_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, summary = train_short(tmp_path / "run", format="tool_calls", update__steps=1, sft__steps=150)
    assert summary["steps"] == 1
    saved = tmp_path / "run" / "trajectories" / "step_000001.jsonl"
    notes: list[str] = []
    trajectories = read_some(saved, notes)
    valid = [turn.format_error is None for t in trajectories for turn in t.turns]
    assert not notes and sum(valid) > 0.8 * len(valid)
    assert all(t.metadata["format"] == "tool_calls" for t in trajectories)
    card = (tmp_path / "run" / "checkpoints").glob("*/policy/README.md")
    assert all(
        "--format tool_calls" in text.read_text() and "chat template" in text.read_text() for text in card
    )
    options = [str(run_dir.path), "--limit", "4", "--out", str(tmp_path / "eval"), "--hardware.threads", "1"]
    assert evaluate(options) == 0
    rows = [json.loads(line) for line in (tmp_path / "eval" / "results.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and sum(row["valid_turns"] for row in rows) >= 4
    policy = str(run_dir.path / "checkpoints" / "best" / "policy")
    for vllm_like in (True, False):  # the latter sends neither tokens nor the end of the message
        with serving(policy, vllm=vllm_like) as served:
            there = tmp_path / f"served {vllm_like}"
            model = ["--endpoint", served.url, "--model_name", "tiny", "--tokenizer", policy]
            task = ["--task", "minihop", *(f"--task_args.{key}={value}" for key, value in WORLD.items())]
            assert (
                evaluate([*model, *task, "--format", "tool_calls", *options[1:3], "--out", str(there)]) == 0
            )
        lines = (there / "results.jsonl").read_text().splitlines()
        assert [_said(json.loads(line)) for line in lines] == [_said(row) for row in rows]
    assert evaluate([*options, "--mode", "rag", "--out", str(tmp_path / "rag")]) == 2
    assert "leave the mode out" in capsys.readouterr().err
