"""MiniHop: the world, its questions, the expert, and how little can be guessed."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from sorl_env import Example, Task, ToolSettings, ToolUseEnv, UserError, load_examples, parse_turn
from sorl_env.commands.check_task import check_task
from sorl_tasks.minihop import TASK, expert_turn, minihop
from sorl_tasks.minihop_world import NAME_PARTS, Chain, World, WorldSpec, generate_world, world_words
from sorl_tools.index.words import tokenize

SPEC = WorldSpec(seed=0, entities=6000, lookalikes=25.0, distractors=0.5, test_share=0.1)
SMALL: dict[str, Any] = {
    "entities": 400,
    "lookalikes": 6.0,
    "train_questions": 300,
    "test_questions": 60,
    "test_share": 0.3,
}


def hash_world(world: World) -> str:
    """Hash of every entity and every passage, in order."""
    digest = hashlib.sha256()
    for entity in world.entities.values():
        digest.update(f"{entity.name}\0{entity.kind}\0{entity.split}\0".encode())
    for passage in world.passages:
        digest.update(f"{passage.id}\0{passage.title}\0{passage.text}\0".encode())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def world() -> World:
    return generate_world(SPEC)


def examples(task: Task, split: str) -> Sequence[Example]:
    assert task.embedded is not None
    return task.embedded(split)


def play(env: ToolUseEnv, index: int) -> tuple[list[str], float, str]:
    """The expert's turns on an example, its reward, and why the episode ended."""
    assert env.task.expert is not None
    env.begin_episode(index)
    turns: list[str] = []
    observations: list[str] = []
    while True:
        turns.append(env.task.expert(env.example, observations))
        result = env.step(turns[-1])
        observations.append(result.observation)
        if result.terminated or result.truncated:
            return turns, result.reward, result.info["stop_reason"]


# -- the world ---


def test_the_world_is_a_function_of_its_spec(world: World) -> None:
    assert hash_world(world) == "40ac7bebf69651ec0942a0795cf319d64050b165e2a120f2f69a37c9d9e66afe"
    assert hash_world(generate_world(SPEC)) == hash_world(world)
    assert hash_world(generate_world(WorldSpec(1, 6000, 25.0, 0.5, 0.1))) != hash_world(world)


def test_splits_are_closed_and_share_no_name(world: World) -> None:
    names = {
        split: {e.name for e in world.entities.values() if e.split == split} for split in ("train", "test")
    }
    assert len(names["train"]) == 5400 and len(names["test"]) == 600
    assert not names["train"] & names["test"]
    for entity in world.entities.values():
        assert set(entity.facts.values()) <= names[entity.split] - {entity.name}


def test_words_are_told_apart_by_the_search() -> None:
    words = world_words()
    assert len(set(words)) == len(words)
    stems = [stem for word in words for stem in tokenize(word)]
    assert len(set(stems)) == len(stems) == len(words)


def test_lookalikes_share_words_as_often_as_asked() -> None:
    for asked in (6.0, 12.0):
        spec = WorldSpec(0, 1500, asked, 0.5, 0.2)
        people = [e.name for e in generate_world(spec).entities.values() if e.kind == "person"]
        for word in (0, 1):
            counts = Counter(name.split()[word] for name in people)
            assert sum(counts.values()) / len(counts) == pytest.approx(asked, rel=0.1)


# -- questions ---


def test_a_question_reads_from_the_last_relation_inwards() -> None:
    chain = Chain(("Tarvon Melk", "Sendis Quark", "Oldgate Eskham"), ("mother", "birthplace"))
    assert chain.question == "What is the birthplace of the mother of Tarvon Melk?"
    assert chain.answer == "Oldgate Eskham"


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_question_has_one_answer_and_does_not_name_it(world: World, split: str) -> None:
    found = examples(TASK, split)
    assert len({example.question for example in found}) == len(found) == {"train": 4000, "test": 512}[split]
    assert {example.metadata["hops"] for example in found} == {1, 2, 3}
    for example in found:
        name, *rest = example.metadata["names"]
        for relation, value in zip(example.metadata["relations"], rest, strict=True):
            assert world.entities[name].split == split
            assert world.entities[name].facts[relation] == value  # one value a relation: the answer is unique
            name = value
        assert example.golden_answers == (name,)
        assert not any(answer in example.question for answer in rest)


def test_numbers_of_hops_are_equally_often() -> None:
    task = minihop(hops=(1, 4), **SMALL)
    assert Counter(example.metadata["hops"] for example in examples(task, "train")) == {1: 150, 4: 150}


# -- what can be guessed ---


def test_the_most_common_answers_are_rare() -> None:
    answers = Counter(example.golden_answers[0] for example in examples(TASK, "test"))
    assert max(answers.values()) / 512 < 0.05
    seen = Counter(example.golden_answers[0] for example in examples(TASK, "train"))
    assert not any(answer in seen for answer in answers)  # so what training answers teach scores nothing


def test_without_search_the_expert_fails() -> None:
    env = ToolUseEnv(minihop(search_off=True), split="test")
    played = [play(env, index) for index in range(100)]
    assert [reward for _, reward, _ in played] == [0.0] * 100
    assert {stop for _, _, stop in played} == {"answer"}
    assert env.task.expert is not None
    env.begin_episode(0)
    reply = env.step(env.task.expert(env.example, []))
    assert reply.observation.strip() == "<information>\nNo passages found.\n</information>"


# -- search ---


def test_the_right_passage_is_among_near_misses(world: World) -> None:
    env = ToolUseEnv(TASK, split="test")
    search: Any = env.toolbox.tools[0]
    ranks: Counter[int] = Counter()
    for entity in list(world.entities.values())[::4]:
        titles = [passage.title for passage, _ in search.retrieve(entity.name)]
        ranks[titles.index(entity.name)] += 1
        assert len(titles) == 3
    assert 0.5 < ranks[0] / sum(ranks.values()) < 0.9  # taking the first passage does not do


# -- the expert ---


def test_the_expert_answers_everything() -> None:
    for split in ("train", "test"):
        env = ToolUseEnv(TASK, split=split)
        for index in range(400):
            turns, reward, stop = play(env, index)
            assert (reward, stop) == (1.0, "answer")
            assert len(turns) == env.example.metadata["hops"] + 1 <= env.limits.max_turns - 1
            assert all(parse_turn(turn).error is None for turn in turns)


def test_a_dialogue() -> None:
    example = TASK.parse_row(
        {
            "id": "a",
            "question": "What is the birthplace of the mother of Tarvon Melk?",
            "names": ["Tarvon Melk", "Sendis Quark", "Oldgate Eskham"],
            "relations": ["mother", "birthplace"],
        }
    )
    near_miss = "Doc 1 (Tarvon Melk Prize): Tarvon Melk Prize has sponsor Conora Silkmills."
    first = (
        f"{near_miss}\nDoc 2 (Tarvon Melk): Tarvon Melk has mother Sendis Quark, employer Ardmax Windforge."
    )
    second = "Doc 1 (Sendis Quark): Sendis Quark has mother Bela Savby, birthplace Oldgate Eskham."
    assert TASK.prompt(example) == "Search, then answer. What is the birthplace of the mother of Tarvon Melk?"
    assert expert_turn(example, []) == "<think> mother of Tarvon Melk </think> <search> Tarvon Melk </search>"
    assert expert_turn(example, [first]) == (
        "<think> mother of Tarvon Melk is Sendis Quark , birthplace of Sendis Quark </think> "
        "<search> Sendis Quark </search>"
    )
    assert expert_turn(example, [first, second]) == (
        "<think> birthplace of Sendis Quark is Oldgate Eskham </think> <answer> Oldgate Eskham </answer>"
    )
    assert expert_turn(example, [near_miss]) == (
        "<think> mother of Tarvon Melk is unknown </think> <answer> unknown </answer>"
    )
    assert expert_turn(example, [first], reasoning=2) == (
        "<think> plan : birthplace . Doc 1 is about Tarvon Melk Prize . Doc 2 is about Tarvon Melk . "
        "mother of Tarvon Melk is Sendis Quark . mother of Tarvon Melk is Sendis Quark , birthplace of Sendis Quark "
        "</think> <search> Sendis Quark </search>"
    )


@pytest.mark.parametrize("reasoning", [1, 2, 5])
def test_four_hops_and_longer_thoughts_fit_the_limits(reasoning: int) -> None:
    env = ToolUseEnv(minihop(hops=(4,), reasoning=reasoning, **SMALL), split="test")
    words = 0
    for index in range(60):
        turns, reward, _ = play(env, index)
        assert reward == 1.0
        words = max(words, *(len(turn.split()) for turn in turns))
    assert (reasoning - 1) * 40 < words <= (reasoning - 1) * 80 + 20
    assert 3 * words <= env.limits.max_new_tokens + 12


# -- the task ---


@pytest.mark.parametrize("split", ["train", "test"])
def test_contract(split: str) -> None:
    assert [check for check in check_task(ToolUseEnv(TASK, split=split)) if not check.passed] == []


def test_questions_are_a_function_of_the_knobs() -> None:
    digests = [load_examples(minihop(seed=seed, **SMALL), None, "test").sha256 for seed in (3, 4)]
    assert digests[0] == "53d7ac0f1b5c11b2d2b9daa76f8ef79c9045e16c979040a2778b1ea61e8749b7" != digests[1]


def test_vocabulary_is_closed(world: World) -> None:
    assert TASK.vocabulary is not None
    words = {word for text in TASK.vocabulary() for word in text.replace(".", " ").replace(",", " ").split()}
    for passage in world.passages:
        assert set(passage.title.split()) <= words
        assert set(passage.text.replace(",", "").replace(".", "").split()) <= words
    assert sum(len(words) for pair in NAME_PARTS.values() for words in pair) == 408


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"hops": ()}, "hops=()"),
        ({"hops": (1, 5)}, "from 1 to 4"),
        ({"hops": (2, 2)}, "different numbers"),
        ({"reasoning": 0}, "reasoning=0"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": 2.5}, "top_k=2.5: give a whole number"),
        ({"reasoning": 1.5}, "reasoning=1.5: give a whole number"),
        ({"train_questions": -5}, "train_questions=-5: give a whole number from 1"),
        ({"lookalikes": -3}, "lookalikes=-3: give at least 1"),
        ({"lookalikes": float("nan")}, "lookalikes=nan"),
        ({"test_share": float("nan")}, "test_share=nan: give a share between 0 and 1"),
    ],
)
def test_knobs_out_of_range(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(").replace(")", r"\)")):
        minihop(**knobs)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"entities": 100_000}, "need 40000 names of kind person"),
        ({"lookalikes": 500.0}, "lower one of them"),
        ({"entities": 20, "lookalikes": 1.0}, "fewer than two entities of kind person"),
        ({"test_share": 0.0}, "move test_share"),
        ({"test_questions": 100_000}, "test questions of 1 hops are wanted, but the world has"),
        ({"distractors": 5.0}, "give 0 to 4"),
    ],
)
def test_worlds_that_cannot_be(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        examples(minihop(**knobs), "test")
    with pytest.raises(UserError, match="Did you mean 'test'"):
        examples(TASK, "tests")


def test_namesakes_must_not_crowd_out_the_passage() -> None:
    with pytest.raises(UserError, match=r"distractors=3.0 would push .* top 3: give at most 2"):
        ToolUseEnv(minihop(distractors=3.0))
    env = ToolUseEnv(minihop(distractors=3.0, **SMALL), tool_settings=ToolSettings(top_k=5), split="test")
    assert [play(env, index)[1] for index in range(60)] == [1.0] * 60


def test_rows_that_make_no_chain() -> None:
    row = {"id": 1, "question": "?", "names": ["A B"], "relations": ["mother"]}
    with pytest.raises(ValueError, match="'names' and 'relations' do not make a chain"):
        TASK.parse_row(row)
    with pytest.raises(KeyError, match="names"):
        TASK.parse_row({"id": 1, "question": "?"})


def test_a_hasty_expert_stops_a_hop_early_on_some_of_the_longest_questions() -> None:
    env = ToolUseEnv(minihop(hasty=0.6, train_questions=300))
    solved: dict[int, list[float]] = {1: [], 2: [], 3: []}
    for index, example in enumerate(env.examples.examples):
        solved[example.metadata["hops"]].append(play(env, index)[1])
    assert set(solved[1]) == set(solved[2]) == {1.0}
    assert 0.3 < sum(solved[3]) / len(solved[3]) < 0.5
    with pytest.raises(UserError, match=r"hasty=1\.5"):
        minihop(hasty=1.5)
