"""A tiny policy for closed-world tasks: a word-level tokenizer and a small random Llama in a plain model folder.

With one token a word and half a million parameters, a policy learns a multi-turn search task on a laptop's CPU in
minutes. The folder is an ordinary Hugging Face one: everything that trains a real model trains this one too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sorl_env.env import ToolUseEnv
from sorl_env.task import Example, Task

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
# A tag, a word, or one punctuation mark. Decoding joins with blanks, and encoding that gives the same ids again.
TOKEN_PATTERN = r"</?\w+>|\w+|[^\w\s]"


def build_tiny_policy(
    task: Task,
    folder: str | Path,
    *,
    seed: int = 0,
    hidden_size: int = 96,
    num_layers: int = 3,
    num_heads: int = 4,
    intermediate_size: int | None = None,
    num_demonstrations: int = 64,
) -> None:
    """Write a tokenizer over the task's own words and a Llama with random weights into ``folder``.

    Args:
        task: with an expert and a vocabulary (see `Task`), such as `sorl_tasks.minihop`.
        folder: created if missing; loads with ``AutoModelForCausalLM`` and ``AutoTokenizer``.
        seed: of the weights. Torch's global random state is left as it was.
        hidden_size, num_layers, num_heads: of the Llama; heads divide the hidden size into even parts.
        intermediate_size: width of the MLP, None for 4 times ``hidden_size``.
        num_demonstrations: expert dialogues that the vocabulary is read from, next to the task's own list.

    Raises:
        ValueError: the task has no expert or no vocabulary, or the sizes do not fit together.
    """
    if task.vocabulary is None or task.expert is None:
        missing = "vocabulary" if task.vocabulary is None else "expert"
        raise ValueError(f"task {task.name!r} has no {missing}: a tiny policy needs a closed world, such as minihop")
    if hidden_size % num_heads or (hidden_size // num_heads) % 2:
        raise ValueError(f"hidden_size={hidden_size} does not split into {num_heads} heads of even width")
    texts = [*task.vocabulary(), *demonstrations(task, "train", num_demonstrations), *_feedback(task)]
    tokenizer = word_tokenizer(texts, max_length=task.limits.max_trajectory_tokens)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size or 4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        max_position_embeddings=task.limits.max_trajectory_tokens,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def word_tokenizer(texts: Iterable[str], max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the words, tags and punctuation marks of ``texts``; others become ``<unk>``."""
    words = dict.fromkeys(word for text in texts for word in re.findall(TOKEN_PATTERN, text))
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys([PAD, EOS, UNK, *words]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(TOKEN_PATTERN), behavior="removed", invert=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def demonstrations(task: Task, split: str, count: int) -> list[str]:
    """The first ``count`` expert dialogues of a split as text: prompt, turns and observations."""
    if task.expert is None or task.embedded is None:
        raise ValueError(f"task {task.name!r} has no scripted expert over embedded examples")
    env = ToolUseEnv(task, split=split)
    return [_dialogue(env, task, index, example) for index, example in enumerate(task.embedded(split)[:count])]


def _dialogue(env: ToolUseEnv, task: Task, index: int, example: Example) -> str:
    assert task.expert is not None
    prompt, _ = env.reset(options={"index": index})
    parts, observations, ended = [prompt], list[str](), False
    while not ended:
        turn = task.expert(example, observations)
        observation, _, terminated, truncated, _ = env.step(turn)
        parts += [turn, observation]
        observations.append(observation)
        ended = terminated or truncated
    return "\n".join(parts)


def _feedback(task: Task) -> Sequence[str]:
    """What the environment says to a malformed turn, so that the policy can read it."""
    env = ToolUseEnv(task, split="train")
    env.reset(seed=0)
    return [env.step("")[0]]
