"""MiniHop: multi-hop questions over a small closed world that is generated from a seed, searched by BM25.

Nothing can be memorised: the entities of the test questions are others than those of the train questions. Nothing can
be guessed: answers spread evenly over some fifty entities of their kind. So a policy has to search, once a hop, and to
tell the passage it asked for from those of look-alikes. Small enough to train on a laptop's CPU, and the embedded
task of the quickstart.

    gym.make("sorl/MiniHop-v0")
    load_task("minihop", hops=(2, 3, 4), lookalikes=8)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from sorl_env.errors import UserError
from sorl_env.parser import ParsedTurn
from sorl_env.rewards import exact_match
from sorl_env.task import Example, Limits, Task, ToolSettings
from sorl_env.tool import ToolReply
from sorl_tasks.minihop_world import (
    MAX_HOPS,
    SPLITS,
    Chain,
    World,
    WorldSpec,
    draw_chains,
    fact_sentence,
    generate_world,
    world_words,
)

INSTRUCTION = "Search, then answer."
NO_PASSAGES = "No passages found."
UNKNOWN = "unknown"

_PASSAGE = re.compile(r"^\((?P<title>[^)]*)\) (?P<text>.*)$", re.MULTILINE)


def minihop(
    *,
    seed: int = 0,
    hops: Sequence[int] = (1, 2, 3),
    hop_weights: Sequence[float] | None = None,
    entities: int = 1000,
    lookalikes: float = 4.0,
    distractors: float = 0.5,
    test_share: float = 0.25,
    train_questions: int = 2000,
    test_questions: int = 256,
    top_k: int | None = None,
    reasoning: int = 1,
    search_off: bool = False,
) -> Task:
    """Build the task; the defaults are the quickstart's.

    Args:
        seed: of the world: names, facts, passages and questions.
        hops: numbers of hops to ask for, each from 1 to 4.
        hop_weights: share of the questions for each entry of ``hops``; None is equal shares.
        entities: in the world, train and test together: 40% people, 20% each companies, towns and countries.
        lookalikes: how many entities of a kind share each word of a name, on average.
        distractors: passages with a person's name in the title that are about something else, for each person.
        test_share: share of the entities that belong to the test questions.
        train_questions, test_questions: how many questions of each split.
        top_k: passages a search returns; None leaves it to the tool settings (3).
        reasoning: how much the expert thinks aloud: 1 is a line of a few words, each unit above it adds a paragraph
            that goes over the facts found and the titles just read (about 40 words).
        search_off: the search tool finds nothing, which shows how much can be guessed.

    Raises:
        ValueError: a knob is out of range, or the world cannot hold as many names or questions.
    """
    weights = tuple(hop_weights) if hop_weights is not None else (1.0,) * len(hops)
    _check(hops, weights, test_share, reasoning, top_k)
    spec = WorldSpec(seed, entities, lookalikes, distractors, test_share)
    counts = dict(zip(SPLITS, (train_questions, test_questions), strict=True))

    def embedded(split: str) -> Sequence[Example]:
        if split not in counts:
            raise UserError(f"minihop has no split {split!r}: its splits are {', '.join(SPLITS)}")
        chains = draw_chains(_world(spec), split, tuple(hops), weights, counts[split])
        return tuple(_example(chain, split, index) for index, chain in enumerate(chains))

    return Task(
        name="minihop",
        description="Multi-hop questions over a generated closed world, searched by BM25.",
        env_id="sorl/MiniHop-v0",
        prompt=lambda example: f"{INSTRUCTION} {example.question}",
        reward=reward,
        parse_row=parse_row,
        tools=lambda settings: (WorldSearch(spec, 0 if search_off else top_k or settings.top_k),),
        embedded=embedded,
        limits=_limits(max(hops), top_k or ToolSettings().top_k, reasoning),
        expert=lambda example, observations: expert_turn(example, observations, reasoning),
        vocabulary=lambda: _vocabulary(spec),
    )


def reward(example: Example, turns: Sequence[ParsedTurn]) -> Mapping[str, float]:
    """1 for the exact answer in the last turn, else 0."""
    answered = bool(turns) and turns[-1].kind == "answer"
    return {"exact_match": exact_match(turns[-1].content, example.golden_answers) if answered else 0.0}


def parse_row(row: Mapping[str, Any]) -> Example:
    """An example from a row with id, question, names and relations (see `Chain`).

    Raises:
        KeyError: a column is missing.
        ValueError: the chain of the row does not fit together.
    """
    chain = Chain(tuple(row["names"]), tuple(row["relations"]))
    if len(chain.names) != len(chain.relations) + 1:
        raise ValueError(f"column 'names' has {len(chain.names)} entries for {len(chain.relations)} relations")
    return Example(
        id=str(row["id"]),
        question=str(row["question"]),
        golden_answers=(chain.answer,),
        metadata={"hops": len(chain.relations), "names": chain.names, "relations": chain.relations},
    )


class WorldSearch:
    """BM25 over the passages of a MiniHop world, in process.

    Args:
        spec: the world; generated and indexed at the first search.
        top_k: passages a search returns; 0 switches search off.
    """

    name = "search"
    description = "Search the passages of the world by keywords."
    schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    }
    inline = True

    def __init__(self, spec: WorldSpec, top_k: int = 3):
        self.spec = spec
        self.top_k = top_k

    def __call__(self, query: str) -> ToolReply:
        """The passages that match best, one a line, ties in the order of the corpus."""
        if self.top_k == 0:
            return ToolReply(text=NO_PASSAGES, hits=0)
        index = _index(self.spec)
        scores = index.get_scores([word for word in _words(query) if word in index.vocab_dict] or [""])
        best = [i for i in np.argsort(-scores, kind="stable")[: self.top_k] if scores[i] > 0]
        passages = [_world(self.spec).passages[i] for i in best]
        text = "\n".join(f"({passage.title}) {passage.text}" for passage in passages)
        return ToolReply(text=text or NO_PASSAGES, hits=len(passages))

    def call_batch(self, arguments: Sequence[Mapping[str, str]]) -> list[ToolReply]:
        """One reply for each mapping ``{"query": ...}``."""
        return [self(**argument) for argument in arguments]


def expert_turn(example: Example, observations: Sequence[str], reasoning: int = 1) -> str:
    """The next turn of a policy that knows which facts to look up, and learns them from the observations alone.

    Args:
        example: a question with its relations in the metadata.
        observations: the environment's replies so far, the first one after the first turn.
        reasoning: see `minihop`.

    Returns:
        A turn that searches for the next entity, or answers. When a search does not show the fact, it gives up.
    """
    relations: Sequence[str] = example.metadata["relations"]
    names: list[str] = [example.metadata["names"][0]]
    for relation, observation in zip(relations, observations):
        value = _read_fact(observation, names[-1], relation)
        if value is None:
            return f"<think> {relation} of {names[-1]} is {UNKNOWN} </think> <answer> {UNKNOWN} </answer>"
        names.append(value)
    found = [f"{relation} of {name} is {value}" for relation, name, value in zip(relations, names, names[1:])]
    missing = [f"{relation} of {names[-1]}" for relation in relations[len(found) : len(found) + 1]]
    thoughts = " , ".join(found[-1:] + missing)
    if reasoning > 1:
        titles = [f"( {match['title']} )" for match in _PASSAGE.finditer("\n".join(observations[-1:]))]
        paragraph = " . ".join([*found, *(f"{title} is not {names[-1]}" for title in titles), *missing])
        thoughts = " . ".join([paragraph] * (reasoning - 1) + [thoughts])
    action = f"<search> {names[-1]} </search>" if missing else f"<answer> {names[-1]} </answer>"
    return f"<think> {thoughts} </think> {action}"


def _read_fact(observation: str, name: str, relation: str) -> str | None:
    """What the passage titled ``name`` says, None when no such passage was shown."""
    for match in _PASSAGE.finditer(observation):
        if match["title"] == name:
            before, _, after = match["text"].partition(fact_sentence(name, relation, "\0").split("\0")[0])
            return after.partition(".")[0] or None
    return None


def _example(chain: Chain, split: str, index: int) -> Example:
    row = {"id": f"{split}-{index}", "question": chain.question, "names": chain.names, "relations": chain.relations}
    return parse_row(row)


def _limits(hops: int, top_k: int, reasoning: int) -> Limits:
    """One turn a hop, one to answer, one to spare; tokens are the words of `sorl_train.tiny`'s tokenizer."""
    turns, turn_tokens, observation_tokens = hops + 2, 48 + 64 * (reasoning - 1), 16 + 40 * top_k
    return Limits(
        max_turns=turns,
        max_prompt_tokens=64,
        max_new_tokens=turn_tokens,
        max_observation_tokens=observation_tokens,
        max_trajectory_tokens=64 + turns * (turn_tokens + observation_tokens),
    )


def _check(
    hops: Sequence[int], weights: Sequence[float], test_share: float, reasoning: int, top_k: int | None
) -> None:
    if not hops or not all(1 <= depth <= MAX_HOPS for depth in hops) or len(set(hops)) < len(hops):
        raise ValueError(f"hops={tuple(hops)}: give different numbers from 1 to {MAX_HOPS}")
    if len(weights) != len(hops) or min(weights) < 0 or sum(weights) <= 0:
        raise ValueError(f"hop_weights={tuple(weights)}: give {len(hops)} weights, none negative, not all 0")
    if not 0 < test_share < 1:
        raise ValueError(f"test_share={test_share}: both splits need entities, give a share between 0 and 1")
    if reasoning < 1 or (top_k is not None and top_k < 1):
        raise ValueError(f"reasoning={reasoning}, top_k={top_k}: give at least 1 (search_off=True stops the search)")


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _vocabulary(spec: WorldSpec) -> Iterable[str]:
    """All text that a tokenizer of this world has to cover: the closed list of words, then the passages."""
    yield from world_words()
    yield from (NO_PASSAGES, UNKNOWN)
    for passage in _world(spec).passages:
        yield f"({passage.title}) {passage.text}"


@lru_cache(maxsize=8)
def _world(spec: WorldSpec) -> World:
    return generate_world(spec)


@lru_cache(maxsize=8)
def _index(spec: WorldSpec) -> Any:
    import bm25s

    index = bm25s.BM25()
    index.index([_words(f"{p.title} {p.text}") for p in _world(spec).passages], show_progress=False)
    return index


TASK = minihop()
