"""The tiny policy: its tokenizer, its folder, its initial weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sorl_env import Task, ToolUseEnv, UserError, parse_turn
from sorl_tasks.minihop import TASK, minihop
from sorl_train.cli import main
from sorl_train.models.policy import model_shape
from sorl_train.models.tiny import build_tiny_policy, task_texts, tiny_shape
from sorl_train.sft.fine_tune import expert_demos


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "policy"
    build_tiny_policy(TASK, path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def dialogues(task: Task, split: str, count: int) -> list[list[str]]:
    """Prompt, turn, observation, turn, .. of the expert."""
    env = ToolUseEnv(task, split=split)
    assert task.expert is not None
    found = []
    for index in range(count):
        prompt, _ = env.begin_episode(index)
        texts, observations, ended = [prompt], list[str](), False
        while not ended:
            turn = task.expert(env.example, observations)
            result = env.step(turn)
            observations.append(result.observation)
            texts += [turn, result.observation]
            ended = result.terminated or result.truncated
        found.append(texts)
    return found


@pytest.mark.parametrize(
    ("expert", "how"),
    [
        (lambda *_: None, "it gives up on the first"),
        (lambda *_: "<think>x</think><answer>none</answer>", "the first ends with answer"),
        (lambda *_: "<search>", "the first ends with invalid"),
    ],
)
def test_an_expert_that_solves_nothing_is_told_so(expert: Any, how: str, tokenizer: Any) -> None:
    env = ToolUseEnv(dataclasses.replace(TASK, expert=expert))
    with pytest.raises(
        UserError, match=f"failed on all of 3 examples, {how}: see it play with sorl-play TASK"
    ):
        expert_demos(env, tokenizer, 3, use_chat_template=False)


OPEN_VOCABULARY = """
from sorl_env import Example, Task

rows = [Example(str(i), f"say w{i}", (f"w{i}",)) for i in range(70)]
TASK = Task(
    "open", lambda example: example.question, lambda example, turns: {"a": 1.0}, lambda row: rows[0], [],
    embedded=lambda split: rows,
    expert=lambda example, seen: f"<think>x</think><answer>{example.golden_answers[0]}</answer>",
    vocabulary=lambda: ["say"],
)
"""


def test_a_cold_start_says_what_the_vocabulary_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SORL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "open.py").write_text(OPEN_VOCABULARY)
    short = "--tiny.hidden_size 16 --tiny.num_layers 1 --tiny.num_heads 2 --sft.num_demos 70 --sft.steps 1"
    words = ["--task", str(tmp_path / "open.py"), "--run_dir", str(tmp_path / "run"), *short.split()]
    more = "--rollout.batch_size 4 --update.mini_batch_size 4 --update.steps 1 --eval.num_examples_final 1"
    assert main([*words, *more.split()]) == 0
    said = capsys.readouterr().out
    assert "on 70 demonstrations" in said and "6 of them hold words that the task's vocabulary lacks" in said


# -- the tokenizer ---


@pytest.mark.parametrize("split", ["train", "test"])
def test_no_word_of_the_world_is_unknown_and_limits_hold(tokenizer: Any, split: str) -> None:
    for prompt, *rest in dialogues(TASK, split, 250):
        turns, observations = rest[::2], rest[1::2]
        sizes = [len(tokenizer.encode(text)) for text in (prompt, *rest)]
        assert tokenizer.unk_token_id not in tokenizer.encode(" ".join([prompt, *rest]))
        assert sizes[0] <= 24 < TASK.limits.max_prompt_tokens
        assert max(len(tokenizer.encode(turn)) for turn in turns) <= 20 < TASK.limits.max_new_tokens
        assert (
            max(len(tokenizer.encode(text)) for text in observations)
            <= 80
            < TASK.limits.max_observation_tokens
        )
        assert sum(sizes) <= 360 < TASK.limits.max_trajectory_tokens


def test_every_passage_and_the_environments_own_words_are_known(tokenizer: Any) -> None:
    assert tokenizer.unk_token_id not in tokenizer.encode(" ".join(task_texts(TASK, 4)))
    env = ToolUseEnv(minihop(search_off=True))
    env.begin_episode(0)
    assert tokenizer.unk_token_id not in tokenizer.encode(
        env.step("<think> a </think> <search> b </search>").observation
    )


def test_decoded_turns_parse_and_encode_to_the_same_ids(tokenizer: Any) -> None:
    for texts in dialogues(TASK, "test", 50):
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids
        for turn in texts[1::2]:
            decoded = tokenizer.decode(tokenizer.encode(turn))
            assert decoded == turn
            assert parse_turn(decoded).content == parse_turn(turn).content != ""


# -- the folder ---


def test_weights_depend_on_the_seed_and_leave_torchs_random_state(folder: Path, tmp_path: Path) -> None:
    task = minihop(train_questions=64)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for name, seed in (("a", 0), ("b", 1)):
        build_tiny_policy(task, tmp_path / name, seed=seed, hidden_size=32, num_layers=2, num_heads=2)
    build_tiny_policy(task, tmp_path / "c", seed=0, hidden_size=32, num_layers=2, num_heads=2)
    assert torch.equal(torch.get_rng_state(), before)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == c != b


def test_first_layer_starts_by_looking_at_the_words_before(model: Any, tokenizer: Any) -> None:
    text = "Doc 1 (Tarvon Melk): Tarvon Melk has mother Sendis Quark, birthplace Oldgate Eskham."
    token_ids = torch.tensor([tokenizer.encode(text)])
    attention = model(token_ids, output_attentions=True).attentions[0][0]  # (heads, L, L)
    for head in range(model.config.num_attention_heads):
        back = [attention[head].diagonal(-offset)[8:].mean().item() for offset in range(8)]
        assert max(range(8), key=back.__getitem__) == head + 1
        assert back[head + 1] > 0.5


def test_later_layers_start_by_looking_at_the_same_word(model: Any) -> None:
    for layer in model.model.layers[1:]:
        attention = layer.self_attn
        assert torch.equal(attention.q_proj.weight, attention.k_proj.weight)
        assert attention.q_proj.weight.std() > 0.05
        assert torch.equal(attention.o_proj.weight, attention.v_proj.weight.T)


@pytest.mark.parametrize("lora_rank", [0, 3])
def test_the_sizes_are_known_without_a_model(folder: Path, tokenizer: Any, lora_rank: int) -> None:
    assert tiny_shape(len(tokenizer), 96, 3, 4, lora_rank) == model_shape(str(folder), lora_rank)


# -- errors ---


@pytest.mark.parametrize("missing", ["expert", "vocabulary"])
def test_a_task_without_a_closed_world(missing: str, tmp_path: Path) -> None:
    without: dict[str, Any] = {missing: None}
    task = dataclasses.replace(TASK, **without)
    with pytest.raises(UserError, match=f"task 'minihop' has no {missing}.*use model=FOLDER"):
        build_tiny_policy(task, tmp_path / "policy")
    assert not (tmp_path / "policy").exists()


@pytest.mark.parametrize(("hidden_size", "num_heads"), [(96, 5), (36, 4), (0, 4)])
def test_sizes_that_do_not_fit(hidden_size: int, num_heads: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"hidden_size={hidden_size} does not split into {num_heads} heads"):
        build_tiny_policy(TASK, tmp_path, hidden_size=hidden_size, num_heads=num_heads)
