"""Question answering with a search tool, and its scripted expert: demonstrations from questions and passages alone.

It searches for the question itself, and for each gold title that the passages do not have yet, names the passage that
holds an answer, and answers. Where the passages never hold one, there is nothing to imitate, and it gives up.

It does not quote a sentence: each quoted word is one more to sample, and one more that the reward cannot tell from the
answer. docs/recipes/smollm2.md has the figures of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sorl_env.errors import UserError
from sorl_env.rewards import normalize_answer
from sorl_env.task import Example, HubSource, Task
from sorl_tasks._qa import (
    in_share,
    parse_qa_row,
    qa_prompt,
    qa_reward,
    qa_tool_call_prompt,
    sample,
    search_tools,
)

CHOICES = ("yes", "no")  # answers that follow from passages without being in them


def qa_expert(example: Example, observations: Sequence[str]) -> str | None:
    """The next turn, or None where the passages that came back do not hold an answer."""
    if not observations:
        return _search("I need to look this up.", example.question)
    missing = _missing(example, observations)
    if missing:
        if len(observations) > 1 and _missing(example, observations[:-1])[:1] == missing[:1]:
            return None  # it was searched for by name, and did not come
        return _search(f"I still need to know about {missing[0]}.", missing[0])
    for answer in example.golden_answers:
        if normalize_answer(answer) in CHOICES and gold_titles(example):
            names = " and ".join(gold_titles(example))
            return f"<think> The passages about {names} tell. </think>\n<answer> {answer} </answer>"
        passage = _passage_with(answer, example.question, observations)
        if passage is not None:
            return f"<think> {passage} says it. </think>\n<answer> {answer} </answer>"
    return None


def searched_task(name: str, env_id: str, description: str, hub: HubSource, hasty: float) -> Task:
    """Question answering with a search tool, with Search-R1's prompt and reward. On the share ``hasty`` of the
    questions the expert answers at once, as if it knew the answer. A policy that imitates it learns both forms that the
    instruction allows, an answer with a search and without one. Which of them pays is left to reinforcement learning.
    Raises ``UserError`` if ``hasty`` is not a share."""
    if not 0 <= hasty <= 1:
        raise UserError(f"hasty={hasty}: give a share between 0 and 1")

    def expert(example: Example, observations: Sequence[str]) -> str | None:
        if in_share(example, hasty):
            return f"<think> I know this. </think>\n<answer> {example.golden_answers[0]} </answer>"
        return qa_expert(example, observations)

    return Task(
        name=name,
        description=description,
        env_id=env_id,
        prompt=qa_prompt,
        tool_call_prompt=qa_tool_call_prompt,
        reward=qa_reward,
        parse_row=parse_qa_row,
        tools=search_tools(name),
        embedded=sample(name, parse_qa_row),
        embedded_is_sample=True,
        expert=expert,
        hub=hub,
    )


def gold_titles(example: Example) -> list[str]:
    """The titles of the passages that hold the answer, if the row names them (HotpotQA)."""
    named = example.metadata.get("gold_titles")
    if not isinstance(named, list | tuple):
        facts = example.metadata.get("supporting_facts")
        named = [fact[0] for fact in facts if fact] if isinstance(facts, list | tuple) else []
    return list(dict.fromkeys(title for title in named if isinstance(title, str) and title.strip()))


def _search(thought: str, query: str) -> str:
    return f"<think> {thought} </think>\n<search> {query} </search>"


def _missing(example: Example, observations: Sequence[str]) -> list[str]:
    seen = "\n".join(observations).lower()
    return [title for title in gold_titles(example) if f"({title.lower()}):" not in seen]


def _passage_with(answer: str, question: str, observations: Sequence[str]) -> str | None:
    """The passage, such as ``Doc 2``, with the best of the sentences that hold the answer as whole words; or None. The
    best sentence has the most words of the question; of equal ones it is the first."""
    wanted, asked = normalize_answer(answer), set(normalize_answer(question).split())
    best, most = None, -1
    for passage, sentence in (pair for text in observations for pair in _sentences(text)):
        said = normalize_answer(sentence)
        shared = len(asked.intersection(said.split()))
        if wanted and f" {wanted} " in f" {said} " and shared > most:
            best, most = passage, shared
    return best


def _sentences(text: str) -> Iterator[tuple[str, str]]:
    """The passages of an observation, whose lines are ``Doc 1 (Title): text``, with each of their sentences."""
    for line in text.splitlines():
        title, found, passage = line.partition("): ")
        name = title.partition(" (")[0]
        if not (found and name.startswith("Doc ") and name.removeprefix("Doc ").isdecimal()):
            name, passage = "A passage", line
        for sentence in passage.split(". "):
            yield name, sentence
