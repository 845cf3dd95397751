"""A tiny policy for tasks with a closed vocabulary: a word-level tokenizer and a small untrained Llama.

With one token for each word and half a million parameters, a policy learns a multi-turn search task on a laptop's CPU
in minutes. Its folder is an ordinary transformers folder: whatever trains a real model trains this one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from sorl_env.envs.tool_use import ToolUseEnv
from sorl_env.errors import UserError
from sorl_env.task import Task
from sorl_env.turns.format import INVALID_MESSAGE, FormatName
from sorl_env.turns.tokens import TINY_DIALOGUES, WORD_OR_MARK
from sorl_train.models.policy import ModelShape

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
# In the format of tool calls also those of Qwen's calls, such as <function=search>.
CALL_TOKEN = r"</?\w+(?:=\w+)?>|\w+|[^\w\s]"
END = "<im_end>"
# Calls in the form of Qwen 3.5, whose values may have blanks around them, since decoding puts blanks between tokens.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == "tool" -%}
<im_start> user <tool_response> {{ message.content }} </tool_response> <im_end> {% else -%}
<im_start> {{ message.role }} {{ message.content }} {% for call in message.tool_calls or [] -%}
<tool_call> <function={{ call.function.name }}> {% for name, value in call.function.arguments | items -%}
<parameter={{ name }}> {{ value }} </parameter> {% endfor -%}
</function> </tool_call> {% endfor -%}
<im_end> {% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<im_start> assistant {% endif -%}"""
# What matters in a context of a few hundred words is a few words apart, so most rotary frequencies should be high.
ROPE_THETA = 100.0


def build_tiny_policy(
    task: Task,
    folder: str | Path,
    *,
    seed: int = 0,
    hidden_size: int = 96,
    num_layers: int = 3,
    num_heads: int = 4,
    num_dialogues: int = TINY_DIALOGUES,
    format: FormatName = "tags",
) -> None:
    """Write a tokenizer of the task's words and an untrained Llama (see ``init_weights``) into ``folder``.

    Args:
        task: a task with an expert and a vocabulary, such as minihop.
        folder: created if missing; loads with ``AutoModelForCausalLM`` and ``AutoTokenizer``.
        seed: seed of the weights. The state of torch's global generator does not change.
        hidden_size, num_layers, num_heads: sizes of the model; its MLP is twice as wide as ``hidden_size``.
        num_dialogues: how many dialogues of the expert add their words to the task's vocabulary.
        format: with ``tool_calls`` the tokenizer gets ``CHAT_TEMPLATE``.

    Raises ``UserError`` if the task lacks expert or vocabulary, or ``hidden_size`` does not split into heads of even
    width.
    """
    _check_heads(hidden_size, num_heads)
    from transformers import LlamaConfig, LlamaForCausalLM  # a second that --dry_run need not wait

    tokenizer = tiny_tokenizer(task, num_dialogues=num_dialogues, format=format)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        attention_bias=True,
        max_position_embeddings=task.limits.max_trajectory_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        init_weights(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tiny_tokenizer(
    task: Task, *, num_dialogues: int = TINY_DIALOGUES, format: FormatName = "tags"
) -> PreTrainedTokenizerFast:
    """The tokenizer that ``build_tiny_policy`` writes."""
    max_tokens = task.limits.max_trajectory_tokens
    texts = task_texts(task, num_dialogues)
    if format == "tags":
        return word_tokenizer(texts, max_tokens)
    return call_tokenizer([*texts, *call_texts(task)], max_tokens)


def tiny_shape(
    vocabulary: int, hidden_size: int, num_layers: int, num_heads: int, lora_rank: int = 0
) -> ModelShape:
    """The sizes of the model that ``build_tiny_policy`` writes, as ``model_shape`` finds them. Raises ``UserError`` as
    it does."""
    _check_heads(hidden_size, num_heads)
    inner = 2 * hidden_size
    attention = 4 * (hidden_size + 1) * hidden_size  # four projections with a bias
    layer = attention + 3 * hidden_size * inner + 2 * hidden_size  # gate, up and down; two norms
    parameters = vocabulary * hidden_size + num_layers * layer + hidden_size
    adapters = num_layers * lora_rank * (4 * 2 * hidden_size + 3 * (hidden_size + inner))
    return ModelShape(
        parameters=parameters,
        backbone_parameters=parameters,  # the output layer is that of the embeddings
        trained=adapters if lora_rank else parameters,
        layers=num_layers,
        hidden=hidden_size,
        intermediate=inner,
        key_value_width=hidden_size,
        vocabulary=vocabulary,
        key_value_heads=num_heads,
        heads=num_heads,
    )


def _check_heads(hidden_size: int, num_heads: int) -> None:
    if hidden_size < 1 or hidden_size % (2 * num_heads):
        raise UserError(f"tiny.hidden_size={hidden_size} does not split into {num_heads} heads of even width")


@torch.no_grad()
def init_weights(
    model: LlamaForCausalLM, *, scale: float = 0.7, positional: float = 4.0, embedding: float = 0.1
) -> None:
    """Draw weights from which a small model soon learns to look things up in its context. In the first layer, head h
    looks h + 1 positions back, by its biases alone: a token learns which words precede it. In later layers keys start
    equal to queries, and in all layers the output projection starts as the transpose of the values: a token attends to
    tokens like itself and copies what they hold (mimetic initialization, Trockman and Kolter, 2023). Together this is
    the beginning of an induction head. From usual weights a small model needs several times as many supervised steps to
    find one. Entries of queries and values have the standard deviation ``scale / sqrt(hidden_size)``; ``positional`` is
    the size of the query and key biases in the first layer; ``embedding`` is the standard deviation of the word
    vectors, which also make the logits, and which 0.02 would leave too flat."""
    config = model.config
    nn.init.normal_(model.model.embed_tokens.weight, std=embedding)
    for layer in model.model.layers:
        attention = layer.self_attn
        for drawn in (attention.q_proj.weight, attention.v_proj.weight):
            nn.init.normal_(drawn, std=scale / config.hidden_size**0.5)
        attention.k_proj.weight.copy_(attention.q_proj.weight)
        attention.o_proj.weight.copy_(attention.v_proj.weight.T)
    first = model.model.layers[0].self_attn
    keys, queries = _look_back(
        config.num_attention_heads, first.head_dim, config.rope_parameters["rope_theta"]
    )
    for projection, bias in ((first.k_proj, keys), (first.q_proj, queries)):
        nn.init.zeros_(projection.weight)
        projection.bias.copy_(positional * bias.flatten())


def _look_back(num_heads: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Key and query biases (heads, head_dim) whose product, once rotated, is largest h + 1 positions back in head h."""
    angles = theta ** (-torch.arange(0, head_dim, 2) / head_dim)  # (head_dim / 2,), radians for each position
    offsets = torch.arange(1, num_heads + 1)[:, None]  # (heads, 1)
    zeros = torch.zeros(num_heads, head_dim // 2)
    keys = torch.cat([1.0 + zeros, zeros], dim=1)
    return keys, torch.cat([torch.cos(offsets * angles), -torch.sin(offsets * angles)], dim=1)


def call_tokenizer(texts: Iterable[str], max_tokens: int) -> PreTrainedTokenizerFast:
    """As ``word_tokenizer``, with a chat template for tool calls and the special tokens that it writes."""
    tokenizer = word_tokenizer(texts, max_tokens, CALL_TOKEN, END)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<im_start>"]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def call_texts(task: Task) -> Iterator[str]:
    """The words that messages with tool calls have beside those of ``task_texts``."""
    env = ToolUseEnv(task, format="tool_calls")
    yield INVALID_MESSAGE
    yield "<im_start> user assistant tool system <think> </think> <tool_call> </tool_call> </function> </parameter>"
    yield "<tool_response> </tool_response>"
    for tool in env.toolbox.tools:
        yield " ".join(
            [f"<function={tool.name}>", *(f"<parameter={name}>" for name in tool.schema["properties"])]
        )


def word_tokenizer(
    texts: Iterable[str], max_tokens: int, token: str = WORD_OR_MARK, eos: str = EOS
) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the words, tags and marks of ``texts``; all others become ``<unk>``."""
    words = dict.fromkeys([PAD, eos, UNK, *(word for text in texts for word in re.findall(token, text))])
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(token), behavior="removed", invert=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=eos,
        unk_token=UNK,
        model_max_length=max_tokens,
        clean_up_tokenization_spaces=False,
    )


def task_texts(task: Task, num_dialogues: int) -> Iterator[str]:
    """Texts with every word that may occur in a dialogue of the task. These are the task's vocabulary, the first
    dialogues of its expert, and the reply to a malformed turn. Raises ``UserError`` if the task has no expert or no
    vocabulary."""
    if task.vocabulary is None or task.expert is None:
        missing = "vocabulary" if task.vocabulary is None else "expert"
        raise UserError(
            f"task {task.name!r} has no {missing}, which model=tiny needs: use model=FOLDER, or task=minihop"
        )
    yield from task.vocabulary()
    env = ToolUseEnv(task)
    for index in range(min(num_dialogues, len(env.examples))):
        observation, _ = env.begin_episode(index)
        observations: list[str] = []
        ended = False
        while not ended:
            yield observation
            turn = task.expert(env.example, observations)
            if turn is None:
                break
            yield turn
            observation, _, terminated, truncated, _ = env.step(turn)
            observations.append(observation)
            ended = terminated or truncated
    env.begin_episode(0)
    yield env.step("").observation
