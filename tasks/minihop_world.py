"""The closed world of MiniHop: invented entities, the passages about them, and multi-hop questions.

Everything is drawn from ``random.Random`` objects that are seeded with texts, so a `WorldSpec` gives the same world on
every platform. No relation leads from the train part of the world to its test part, or back. The names of both parts
are made of the same words, so that one word-level vocabulary is enough for both.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from sorl_env.errors import UserError
from sorl_tools.corpus import Passage

SPLITS = ("train", "test")
MAX_HOPS = 4

# The facts about each kind of entity: relation -> kind of the entity that it names.
RELATIONS: Mapping[str, Mapping[str, str]] = {
    "person": {"mother": "person", "birthplace": "town", "employer": "company"},
    "company": {"founder": "person", "headquarters": "town"},
    "town": {"country": "country"},
    "country": {"capital": "town"},
}
SHARES = {"person": 0.4, "company": 0.2, "town": 0.2, "country": 0.2}

# Distractors are passages titled with a person's name and one of these words; each states one fact, a relation and the
# kind of entity that it names. No fact names a person, because a passage with two similar names would outrank the
# passage about the person.
NAMESAKES: Mapping[str, tuple[str, str]] = {
    "Prize": ("sponsor", "company"),
    "Bridge": ("builder", "company"),
    "Museum": ("location", "town"),
    "Song": ("publisher", "company"),
}


def _words(stems: str, endings: str) -> tuple[str, ...]:
    return tuple(stem + ending for stem, ending in product(stems.split(), endings.split()))


# All parts of names. A name is a word of the kind's first tuple, then a word of the second one.
NAME_PARTS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "person": (
        _words("Tar Sen Bel Kor Mir Ru Jal Ne Os Pri Vel Dor", "von a ric lan dis eth o imar"),
        _words("Mel Das Quar Brin Hol Fen Gor Tul Sav Ost Zel Lum", "k kin ovar tes by mond wright ell"),
    ),
    "company": (
        _words("Brill Con Vex Nor Ard Sul", "tech dyne ora max ium aris"),
        _words("Wind Iron Silk Salt Glass Steam", "works mills craft yards lines forge"),
    ),
    "town": (
        _words("Old New Low High East Far", "er bury stead moor gate port"),
        _words("Quist Hather Wend Cald Esk Thorn", "ham ford ley combe wick dale"),
    ),
    "country": (
        _words("Al Ver Is Ma Sor Ux", "dania grovia tria landa rusia mark"),
        _words("Coast Vale Cape Crown Isle Heath", "land reach shore mark side watch"),
    ),
}


@dataclass(frozen=True)
class WorldSpec:
    """What a world is generated from."""

    seed: int
    entities: int  # train and test together: 40% people, 20% each companies, towns and countries
    lookalikes: float  # how many entities of a kind share each word of a name, on average
    distractors: float  # passages titled with a person's name that are about something else, for each person
    test_share: float  # of the entities

    def rng(self, purpose: str) -> random.Random:
        """A random generator for one purpose, which does not depend on the draws for other purposes."""
        return random.Random(f"minihop/{self.seed}/{purpose}")


@dataclass(frozen=True)
class Entity:
    """An invented entity; ``facts`` maps relations to the names of other entities."""

    name: str
    kind: str
    split: str
    facts: Mapping[str, str]


@dataclass(frozen=True)
class Chain:
    """The path of a question: ``names[i + 1]`` is the ``relations[i]`` of ``names[i]``."""

    names: tuple[str, ...]
    relations: tuple[str, ...]

    @property
    def answer(self) -> str:
        return self.names[-1]

    @property
    def question(self) -> str:
        """In words, the last relation first: "What is the birthplace of the mother of Tarvon Melk?"."""
        return f"What is {' of '.join(f'the {relation}' for relation in self.relations[::-1])} of {self.names[0]}?"


@dataclass(frozen=True)
class World:
    """A generated world: entities by name, and their passages, shuffled together with the distractors."""

    spec: WorldSpec
    entities: Mapping[str, Entity]
    passages: tuple[Passage, ...]

    def chains(self, split: str, kind: str, relations: Sequence[str]) -> Iterator[Chain]:
        """Every chain of a split along ``relations`` that does not return to an earlier entity."""
        for entity in self.entities.values():
            if entity.kind == kind and entity.split == split:
                names = [entity.name]
                for relation in relations:
                    names.append(self.entities[names[-1]].facts[relation])
                if len(set(names)) == len(names):
                    yield Chain(tuple(names), tuple(relations))


def relation_paths(hops: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each path of ``hops`` different relations, as (kind of the first entity, relations)."""

    def extend(kind: str, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if len(path) == hops:
            yield path
            return
        for relation, target in RELATIONS[kind].items():
            if relation not in path:
                yield from extend(target, (*path, relation))

    for kind in RELATIONS:
        for path in extend(kind, ()):
            yield kind, path


def generate_world(spec: WorldSpec) -> World:
    """Draw the world of ``spec``. Raises ``UserError`` if there are fewer words than names, or a split gets no
    entities."""
    names = {kind: _draw_names(spec, kind) for kind in RELATIONS}
    entities: dict[str, Entity] = {}
    for split in SPLITS:
        for kind, relations in RELATIONS.items():
            subjects = names[kind][split]
            facts: list[dict[str, str]] = [{} for _ in subjects]
            for relation, target in relations.items():
                objects = _spread(spec.rng(f"{split}/{relation}"), subjects, names[target][split])
                for own, value in zip(facts, objects, strict=True):
                    own[relation] = value
            for name, own in zip(subjects, facts, strict=True):
                entities[name] = Entity(name, kind, split, own)
    texts = [(entity.name, _text(entity.name, entity.facts)) for entity in entities.values()]
    texts += _distractors(spec, entities)
    spec.rng("passages").shuffle(texts)
    return World(spec, entities, tuple(Passage(str(i), title, text) for i, (title, text) in enumerate(texts)))


def draw_chains(world: World, split: str, hops: Sequence[int], count: int) -> list[Chain]:
    """Draw ``count`` different questions: every number of hops and every path of relations equally often. Raises
    ``UserError`` if the world has too few questions with some number of hops."""
    rng = world.spec.rng(f"questions/{split}")
    drawn: list[Chain] = []
    for index, depth in enumerate(hops):
        by_path = [list(world.chains(split, kind, path)) for kind, path in relation_paths(depth)]
        for chains in by_path:
            rng.shuffle(chains)
        in_turn = [chains[i] for i in range(max(map(len, by_path))) for chains in by_path if i < len(chains)]
        before, after = (round(count * end / len(hops)) for end in (index, index + 1))
        if after - before > len(in_turn):
            raise UserError(
                f"minihop: {after - before} {split} questions of {depth} hops are wanted, but the world has "
                f"{len(in_turn)}: give more entities, or ask for fewer questions"
            )
        drawn += in_turn[: after - before]
    rng.shuffle(drawn)
    return drawn


def world_words() -> tuple[str, ...]:
    """Every word of names, relations and titles in any world, whatever its spec."""
    parts = [word for pair in NAME_PARTS.values() for words in pair for word in words]
    relations = [relation for facts in RELATIONS.values() for relation in facts]
    return (*parts, *relations, *NAMESAKES, *dict.fromkeys(relation for relation, _ in NAMESAKES.values()))


def _draw_names(spec: WorldSpec, kind: str) -> dict[str, list[str]]:
    """Split -> names, all different; each word occurs in ``lookalikes`` names on average."""
    count = round(spec.entities * SHARES[kind])
    num_words = max(1, round(count / max(spec.lookalikes, 1.0)))
    first, second = (words[:num_words] for words in NAME_PARTS[kind])
    if count > len(first) * len(second):
        raise UserError(
            f"minihop: entities={spec.entities} and lookalikes={spec.lookalikes} need {count} names of kind {kind}, "
            f"but {len(first)} x {len(second)} words make fewer: lower one of them"
        )
    num_test = round(count * spec.test_share)
    if not 2 <= num_test <= count - 2:
        raise UserError(
            f"minihop: entities={spec.entities} and test_share={spec.test_share} leave a split with fewer than two "
            f"entities of kind {kind}: raise entities, or move test_share towards 0.5"
        )
    names = [" ".join(pair) for pair in spec.rng(f"names/{kind}").sample(list(product(first, second)), count)]
    return {"train": names[num_test:], "test": names[:num_test]}


def _spread(rng: random.Random, subjects: Sequence[str], objects: Sequence[str]) -> list[str]:
    """An object for each subject, never itself; each object equally often, so that no guess is better than others."""
    order = rng.sample(objects, len(objects))
    chosen = [order[i % len(order)] for i in rng.sample(range(len(subjects)), len(subjects))]
    for i, name in enumerate(subjects):
        if chosen[i] == name:  # possible only if subjects and objects are the same entities, each chosen once
            chosen[i], chosen[i - 1] = chosen[i - 1], chosen[i]
    return chosen


def _text(name: str, facts: Mapping[str, str]) -> str:
    return f"{name} has {', '.join(f'{relation} {value}' for relation, value in facts.items())}."


def _distractors(spec: WorldSpec, entities: Mapping[str, Entity]) -> list[tuple[str, str]]:
    """(title, text) of passages that share a person's name but answer no question, spread evenly over the people."""
    if not 0 <= spec.distractors <= len(NAMESAKES):
        raise UserError(f"minihop: distractors={spec.distractors}: give 0 to {len(NAMESAKES)}")
    rng = spec.rng("distractors")
    by_kind = {kind: [e.name for e in entities.values() if e.kind == kind] for kind in RELATIONS}
    people = by_kind["person"]
    order = rng.sample(people, len(people))
    words = {person: rng.sample(list(NAMESAKES), len(NAMESAKES)) for person in people}
    texts = []
    for index in range(round(spec.distractors * len(people))):
        person = order[index % len(people)]
        word = words[person][index // len(people)]
        relation, kind = NAMESAKES[word]
        title = f"{person} {word}"
        texts.append((title, _text(title, {relation: rng.choice(by_kind[kind])})))
    return texts
