"""MiniHop: multi-hop questions over a small closed world that is generated from a seed and searched with BM25.

Nothing can be memorised, because the test questions are about other entities than the train questions. Nothing can be
guessed, because answers are spread evenly over more than a hundred entities. So a policy has to search once for each
hop, and to tell the passage it asked for from those with similar titles. It is small enough to train on a laptop's CPU.

    gym.make("sorl/MiniHop-v0")
    load_task("minihop", hops=(2, 3, 4), distractors=2.0)
    load_task("minihop", hit_reward=0.5, valid_reward=0.1)  # turns earn rewards, too
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from sorl_env.errors import UserError, did_you_mean
from sorl_env.rewards import exact_match, normalize_answer
from sorl_env.task import Example, Limits, Task, ToolSettings
from sorl_env.turns.tags import ParsedTurn
from sorl_tasks._qa import in_share, row_id, text_column
from sorl_tasks.minihop_world import (
    MAX_HOPS,
    Chain,
    World,
    WorldSpec,
    draw_chains,
    generate_world,
    world_words,
)
from sorl_tools.corpus import format_passages
from sorl_tools.search.bm25_search import BM25Search

INSTRUCTION = "Search, then answer."
GIVE_UP = "unknown"
MOST_BEFORE_ANSWER = 0.99  # what the turns of an episode can earn together; 1 is a success

_PASSAGE = re.compile(r"^Doc \d+ \((?P<title>[^)\n]*)\): (?P<text>.*)$", re.MULTILINE)


def minihop(
    *,
    seed: int = 0,
    hops: Sequence[int] = (1, 2, 3),
    entities: int = 6000,
    lookalikes: float = 25.0,
    distractors: float = 0.5,
    test_share: float = 0.1,
    train_questions: int = 4000,
    test_questions: int = 512,
    top_k: int | None = None,
    reasoning: int = 1,
    hasty: float = 0.0,
    search_off: bool = False,
    hit_reward: float = 0.0,
    valid_reward: float = 0.0,
) -> Task:
    """Build the task; the defaults are the quickstart's.

    Args:
        seed: draws the world: names, facts, passages and questions.
        hops: numbers of hops that questions have, each from 1 to 4, equally often.
        entities, lookalikes, distractors, test_share: the size and the difficulty of the world, see `WorldSpec`.
        train_questions, test_questions: number of questions in each split, all different.
        top_k: passages that a search returns; None takes it from the tool settings (3).
        reasoning: how much the expert thinks aloud: 1 is a line of a few words, and each unit above it adds a review of
            the plan, the titles just read and the facts found (up to about 70 words).
        hasty: on this share of the questions with the most hops, the expert answers one hop too early. A policy that
            imitates the expert learns this habit, and reinforcement learning has to correct it.
        search_off: the search tool finds nothing, which shows how much can be guessed.
        hit_reward, valid_reward: what the turns of an episode earn at most before the answer, see `turn_reward`.

    Raises ``UserError`` if a knob is out of range, or the world has too few names or questions.
    """
    hops = tuple(hops)
    spec = WorldSpec(seed, entities, lookalikes, distractors, test_share)
    wholes = {"entities": entities, "reasoning": reasoning, "top_k": 1 if top_k is None else top_k}
    wholes |= {"train_questions": train_questions, "test_questions": test_questions}
    _check_knobs(hops, spec, hasty, wholes)
    counts = {"train": train_questions, "test": test_questions}

    return Task(
        name="minihop",
        description="Multi-hop questions over a generated closed world, searched by BM25.",
        env_id="sorl/MiniHop-v0",
        prompt=lambda example: f"{INSTRUCTION} {example.question}",
        reward=reward,
        turn_reward=_turn_reward(hit_reward, valid_reward),
        parse_row=parse_row,
        tools=lambda settings: [_search_tool(spec, settings, top_k, search_off)],
        embedded=lambda split: _draw_examples(spec, split, hops, _count(counts, split)),
        limits=_limits(max(hops), top_k or ToolSettings().top_k, reasoning),
        wrong_answer=lambda example: example.metadata["names"][0],
        expert=lambda example, observations: expert_turn(
            example, observations, reasoning, skipped=int(_is_hasty(example, max(hops), hasty))
        ),
        vocabulary=lambda: _vocabulary(spec),
    )


def reward(example: Example, turns: Sequence[ParsedTurn]) -> Mapping[str, float]:
    """1 if the last turn gives the exact answer, else 0."""
    answered = bool(turns) and turns[-1].kind == "answer"
    return {"exact_match": exact_match(turns[-1].content, example.golden_answers) if answered else 0.0}


def turn_reward(
    example: Example, turns: Sequence[ParsedTurn], hit_reward: float, valid_reward: float
) -> dict[str, float]:
    """What the newest turn earns towards the answer. With h hops, an episode earns each item at most h times.

    - ``search_hit``: ``hit_reward`` / h for a search for exactly the entity that the next fact is about. The first one
      is named in the question and each later one in the reply to the search before, so searches for several names,
      names off the path and repetitions earn nothing.
    - ``search_valid``: ``valid_reward`` / h for a well-formed search that was not made before, useful or not.

    A right answer earns 1 on top. Both items together stay below 1, so that no episode without the right answer counts
    as a success, and they end after h searches, so that none earns more than one that searches h times and answers.
    """
    now, before = _progress(example, turns), _progress(example, turns[:-1])
    hops = example.metadata["hops"]
    rewards = {"search_hit": hit_reward, "search_valid": valid_reward}
    return {
        name: most * (new - old) / hops
        for (name, most), new, old in zip(rewards.items(), now, before, strict=True)
        if most > 0
    }


def _progress(example: Example, turns: Sequence[ParsedTurn]) -> tuple[int, int]:
    """How many entities on the path were searched for, in their order, and how many different searches were made; both
    count up to the number of hops."""
    hops: int = example.metadata["hops"]
    queries = [turn.content for turn in turns if turn.kind == "tool"]
    hits = 0
    for query in queries:
        hits += hits < hops and bool(exact_match(query, [example.metadata["names"][hits]]))
    return hits, min(hops, len({normalize_answer(query) for query in queries}))


def _turn_reward(
    hit_reward: float, valid_reward: float
) -> Callable[[Example, Sequence[ParsedTurn]], Mapping[str, float]] | None:
    if not (hit_reward >= 0 and valid_reward >= 0 and hit_reward + valid_reward <= MOST_BEFORE_ANSWER):
        raise UserError(
            f"minihop: hit_reward={hit_reward}, valid_reward={valid_reward}: give none below 0, and at most "
            f"{MOST_BEFORE_ANSWER} together, because an episode with a total reward of 1 counts as a success"
        )
    if hit_reward == valid_reward == 0:
        return None
    return lambda example, turns: turn_reward(example, turns, hit_reward, valid_reward)


def parse_row(row: Mapping[str, Any]) -> Example:
    """An example from a row with ``id``, ``question``, ``names`` and ``relations`` (see `Chain`). Raises ``KeyError``
    if a column is missing, and ``ValueError`` if the names and the relations do not make a chain."""
    for column in ("names", "relations"):
        words = row[column]
        if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
            raise ValueError(f"column {column!r} must be a list of texts, not {words!r}")
    question = text_column(row, "question")
    chain = Chain(tuple(row["names"]), tuple(row["relations"]))
    if not chain.relations or len(chain.names) != len(chain.relations) + 1:
        raise ValueError(
            f"columns 'names' and 'relations' do not make a chain: {len(chain.names)} names need one relation less, "
            f"not {len(chain.relations)}"
        )
    return Example(
        id=row_id({"id": row["id"]}, question),
        question=question,
        golden_answers=(chain.answer,),
        metadata={"hops": len(chain.relations), "names": chain.names, "relations": chain.relations},
    )


def _is_hasty(example: Example, most_hops: int, share: float) -> bool:
    return 1 < most_hops == example.metadata["hops"] and in_share(example, share)


def expert_turn(example: Example, observations: Sequence[str], reasoning: int = 1, skipped: int = 0) -> str:
    """The next turn of a scripted policy that knows the relations to follow and reads the names from observations. It
    searches for the next entity, or answers; the answer is `GIVE_UP` if a reply lacks the fact. The first one of
    ``observations`` answers the first turn. For ``reasoning`` see `minihop`; ``skipped`` hops at the end are not
    taken."""
    relations: Sequence[str] = example.metadata["relations"]
    relations = relations[: len(relations) - skipped]
    names: list[str] = [example.metadata["names"][0]]
    for relation, observation in zip(relations, observations, strict=False):
        names.append(_read_fact(observation, names[-1], relation) or GIVE_UP)
        if names[-1] == GIVE_UP:
            break
    found = zip(relations, names, names[1:], strict=False)
    facts = [f"{relation} of {name} is {value}" for relation, name, value in found]
    missing = [] if names[-1] == GIVE_UP else relations[len(facts) :]
    steps = [*facts[-1:], *(f"{relation} of {names[-1]}" for relation in missing[:1])]
    titles = [match["title"] for match in _PASSAGE.finditer("\n".join(observations[-1:]))]
    review = [
        "plan : " + " , then ".join(missing) if missing else "plan : answer",
        *(f"Doc {rank} is about {title}" for rank, title in enumerate(titles, start=1)),
        *facts,
    ]
    thoughts = " . ".join(review * (reasoning - 1) + [" , ".join(steps)])
    action = f"<search> {names[-1]} </search>" if missing else f"<answer> {names[-1]} </answer>"
    return f"<think> {thoughts} </think> {action}"


def _read_fact(observation: str, name: str, relation: str) -> str | None:
    """What the passage titled ``name`` says about the relation; None if there is no such passage or fact."""
    for match in _PASSAGE.finditer(observation):
        if match["title"] == name:
            stated = re.search(rf"\b{relation} (\w+ \w+)", match["text"])
            return stated[1] if stated else None
    return None


def _limits(hops: int, top_k: int, reasoning: int) -> Limits:
    """A turn for each hop, one to answer and one to spare. Token limits allow three tokens per word."""
    review = 8 * top_k + 10 * hops + 4
    turn, observation = 48 + 3 * review * (reasoning - 1), 80 * top_k
    return Limits(
        max_turns=hops + 2,
        max_prompt_tokens=128,
        max_new_tokens=turn,
        max_observation_tokens=observation,
        max_trajectory_tokens=128 + (hops + 2) * (turn + observation),
    )


def _check_knobs(hops: tuple[int, ...], spec: WorldSpec, hasty: float, wholes: Mapping[str, int]) -> None:
    if not hops or len(set(hops)) < len(hops) or not set(hops) <= set(range(1, MAX_HOPS + 1)):
        raise UserError(f"minihop: hops={hops}: give different numbers from 1 to {MAX_HOPS}")
    for name, number in wholes.items():
        if not (isinstance(number, int) and number >= 1):
            raise UserError(f"minihop: {name}={number}: give a whole number from 1 on")
    if not spec.lookalikes >= 1:
        raise UserError(f"minihop: lookalikes={spec.lookalikes}: give at least 1")
    for name, share in {"test_share": spec.test_share, "hasty": hasty}.items():
        if not 0 <= share <= 1:
            raise UserError(f"minihop: {name}={share}: give a share between 0 and 1")


def _count(counts: Mapping[str, int], split: str) -> int:
    if split not in counts:
        raise UserError(f"task minihop has no split {split!r}. {did_you_mean(split, counts)}")
    return counts[split]


@lru_cache(maxsize=4)  # a run makes several environments of one world
def _draw_examples(spec: WorldSpec, split: str, hops: tuple[int, ...], count: int) -> tuple[Example, ...]:
    chains = draw_chains(_world(spec), split, hops, count)
    rows = ({"question": one.question, "names": one.names, "relations": one.relations} for one in chains)
    return tuple(parse_row({"id": f"{split}-{index}", **row}) for index, row in enumerate(rows))


def _search_tool(spec: WorldSpec, settings: ToolSettings, top_k: int | None, search_off: bool) -> BM25Search:
    if settings.corpus is not None or settings.search_url is not None:
        raise UserError("minihop searches the world it generates: leave corpus and search_url out")
    shown = top_k or settings.top_k
    if spec.distractors > shown - 1:
        raise UserError(
            f"minihop: distractors={spec.distractors} would push the right passage out of the top {shown}: give at "
            f"most {shown - 1}"
        )
    return _search(spec, 0 if search_off else shown)


def _vocabulary(spec: WorldSpec) -> tuple[str, ...]:
    """Texts with every word of the world; the words of questions and of the expert come from its dialogues."""
    passages = format_passages(_world(spec).passages[:10]).text  # their format, and their ranks
    return (*world_words(), GIVE_UP, format_passages([]).text, passages)


@lru_cache(maxsize=4)
def _world(spec: WorldSpec) -> World:
    return generate_world(spec)


@lru_cache(maxsize=4)
def _search(spec: WorldSpec, top_k: int) -> BM25Search:
    return BM25Search(_world(spec).passages, top_k)


TASK = minihop()
