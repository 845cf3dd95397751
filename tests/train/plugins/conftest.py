"""A tiny policy that calls tools in the chat format of Qwen3, and MiniHop's questions and search for TRL."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sorl_env.envs.tool_use import ToolUseEnv
from sorl_train.plugins.objective import _OBJECTIVES

MARKS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>"),
]
DIALOGUES = 4


class ToolPolicy(NamedTuple):
    """A folder with model and tokenizer, the questions it has seen, and the tool."""

    folder: Path
    questions: list[dict[str, Any]]
    search: Callable[[str], str]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No loss of a test scales an optimizer's step in another one."""
    yield
    for made in _OBJECTIVES.values():
        made.steps.clear()


@pytest.fixture(scope="session")
def tool_policy(tmp_path_factory: pytest.TempPathFactory, minihop_env: ToolUseEnv) -> ToolPolicy:
    """It has learned four dialogues by heart, so that most of what it samples are valid calls of ``search``."""
    trl = pytest.importorskip("trl", reason="needs TRL (the interop extra, Python 3.11)")
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"

    def search(query: str) -> str:
        """Looks a name up.

        Args:
            query: the name
        """
        minihop_env.begin_episode(0)
        return minihop_env.step(f"<think> {query} </think> <search> {query} </search>").observation[16:136]

    dialogues = [_dialogue(minihop_env, index, search) for index in range(DIALOGUES)]
    tokenizer = _tokenizer(dialogues, template.read_text(encoding="utf-8"), search)
    folder = tmp_path_factory.mktemp("tool_policy")
    tokenizer.save_pretrained(folder)
    _imitate(tokenizer, dialogues, search).save_pretrained(folder)
    questions = [{"prompt": dialogue[:1], "answer": dialogue[-1]["content"]} for dialogue in dialogues]
    return ToolPolicy(folder, questions, search)


def _dialogue(env: ToolUseEnv, index: int, search: Callable[[str], str]) -> list[dict[str, Any]]:
    """One search and an answer, as chat messages."""
    env.begin_episode(index)
    assert env.task.expert is not None
    found = re.search(r"<search> (.*?) </search>", env.task.expert(env.example, []))
    assert found is not None
    arguments = {"query": found[1]}
    call = {"type": "function", "function": {"name": "search", "arguments": arguments}}
    return [
        {"role": "user", "content": env.example.question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "search", "content": search(found[1])},
        {"role": "assistant", "content": env.example.golden_answers[0]},
    ]


def _tokenizer(
    dialogues: list[list[dict[str, Any]]], template: str, search: Callable[[str], str]
) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=MARKS[:3], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    plain = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=MARKS[2], pad_token=MARKS[0])
    plain.chat_template = template
    texts = [plain.apply_chat_template(d, tools=[search], tokenize=False) for d in dialogues]
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens(MARKS[3:])  # not special: they have to be in the decoded text
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=MARKS[2], pad_token=MARKS[0])
    tokenizer.chat_template = template
    return tokenizer


def _imitate(
    tokenizer: PreTrainedTokenizerFast, dialogues: list[list[dict[str, Any]]], search: Callable[[str], str]
) -> LlamaForCausalLM:
    from trl.chat_template_utils import get_training_chat_template

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=768,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    template = get_training_chat_template(tokenizer)
    ids = [
        torch.tensor(
            tokenizer.apply_chat_template(d, tools=[search], chat_template=template, return_dict=False)
        )
        for d in dialogues
    ]
    tokens = pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
    labels = pad_sequence(ids, batch_first=True, padding_value=-100)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
        for _ in range(100):
            loss = model(input_ids=tokens, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model
