"""The closed world behind MiniHop: invented entities, the passages about them, and multi-hop questions.

Everything is drawn from ``random.Random`` seeded by text, so a world is a function of its `WorldSpec` alone, on every
platform. The train and the test half are closed under every relation: no chain leads from one into the other, while
their names are put together from the same parts, so that a word-level vocabulary covers both.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

SPLITS = ("train", "test")

# What each kind of entity tells about itself: relation -> kind of its object.
RELATIONS: Mapping[str, Mapping[str, str]] = {
    "person": {"mother": "person", "birthplace": "town", "employer": "company"},
    "company": {"founder": "person", "headquarters": "town"},
    "town": {"country": "country"},
    "country": {"capital": "town"},
}
MAX_HOPS = 4


def _parts(stems: str, endings: str) -> tuple[str, ...]:
    return tuple(stem + ending for stem, ending in product(stems.split(), endings.split()))


# The closed list of name parts: (first words, second words) of each kind. A name is one of each.
NAME_PARTS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "person": (
        _parts("Tar Sen Bel Kor Mir Ru Jal Ne Os Pri Vel Dor", "von a ric lan dis eth o imar"),
        _parts("Mel Das Quar Brin Hol Fen Gor Tul Sav Ost Zel Lum", "k kin ovar tes by mond wright ell"),
    ),
    "company": (
        _parts("Brill Con Vex Nor Ard Sul", "tech dyne ora max ium aris"),
        _parts("Wind Iron Silk Salt Glass Steam", "works mills craft yards lines forge"),
    ),
    "town": (
        _parts("Old New Low High East Far", "er bury stead moor gate port"),
        _parts("Quist Hather Wend Cald Esk Thorn", "ham ford ley combe wick dale"),
    ),
    "country": (
        _parts("Al Ver Is Ma Sor Ux", "dania grovia tria landa rusia mark"),
        _parts("Coast Vale Cape Crown Isle Heath", "land reach shore mark side watch"),
    ),
}

# Titles that start with a person's name yet are about something else: title word -> (relation, kind of its object).
NAMESAKES: Mapping[str, tuple[str, str]] = {
    "Prize": ("winner", "person"),
    "Bridge": ("builder", "company"),
    "Museum": ("town", "town"),
    "Song": ("singer", "person"),
}


@dataclass(frozen=True)
class WorldSpec:
    """What a world is made from; see `sorl_tasks.minihop.minihop` for the meaning of each knob."""

    seed: int
    entities: int
    lookalikes: float
    distractors: float
    test_share: float


@dataclass(frozen=True)
class Entity:
    """An invented entity with its facts: relation -> name of the object."""

    name: str
    kind: str
    split: str
    facts: Mapping[str, str]


@dataclass(frozen=True)
class Passage:
    """A retrievable document."""

    title: str
    text: str


@dataclass(frozen=True)
class Chain:
    """A question's path: ``names[i + 1]`` is the ``relations[i]`` of ``names[i]``."""

    names: tuple[str, ...]
    relations: tuple[str, ...]

    @property
    def answer(self) -> str:
        return self.names[-1]

    @property
    def question(self) -> str:
        """Asked from the last relation inwards, e.g. "What is the birthplace of the mother of Tarvon Melk?"."""
        return f"What is {' of '.join(f'the {name}' for name in reversed(self.relations))} of {self.names[0]}?"


@dataclass(frozen=True)
class World:
    """A generated world.

    Attributes:
        entities: by name, in a fixed order.
        passages: one for each entity, then the distractors, shuffled together.
    """

    spec: WorldSpec
    entities: Mapping[str, Entity]
    passages: tuple[Passage, ...]

    @property
    def sha256(self) -> str:
        """Hash of every passage and every split: equal for equal worlds."""
        digest = hashlib.sha256()
        for passage in self.passages:
            digest.update(f"{passage.title}\t{passage.text}\n".encode())
        for entity in self.entities.values():
            digest.update(f"{entity.name}\t{entity.split}\n".encode())
        return digest.hexdigest()

    def follow(self, start: str, relations: Sequence[str]) -> Chain:
        """The chain from ``start`` along ``relations``."""
        names = [start]
        for relation in relations:
            names.append(self.entities[names[-1]].facts[relation])
        return Chain(tuple(names), tuple(relations))


def fact_sentence(name: str, relation: str, value: str) -> str:
    """A fact as passages state it."""
    return f"The {relation} of {name} is {value}."


def relation_paths(hops: int) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Every (kind of the start, relations) with ``hops`` relations, none of them twice."""

    def extend(kind: str, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if len(path) == hops:
            yield path
            return
        for relation, target in RELATIONS[kind].items():
            if relation not in path:
                yield from extend(target, (*path, relation))

    return tuple((kind, path) for kind in RELATIONS for path in extend(kind, ()))


def generate_world(spec: WorldSpec) -> World:
    """Draw the world of ``spec``.

    Raises:
        ValueError: the spec asks for more names than the closed list of name parts can make.
    """
    entities: dict[str, Entity] = {}
    names = {kind: _draw_names(spec, kind) for kind in RELATIONS}
    for split in SPLITS:
        pools = {kind: [name for name, its_split in names[kind] if its_split == split] for kind in RELATIONS}
        for kind, pool in pools.items():
            objects = {
                relation: _spread(spec, f"{split}/{kind}/{relation}", pool, pools[target])
                for relation, target in RELATIONS[kind].items()
            }
            for index, name in enumerate(pool):
                facts = {relation: chosen[index] for relation, chosen in objects.items()}
                entities[name] = Entity(name, kind, split, facts)
    passages = [_entity_passage(entity) for entity in entities.values()] + _distractors(spec, entities)
    _rng(spec, "order").shuffle(passages)
    return World(spec, entities, tuple(passages))


def draw_chains(
    world: World, split: str, hops: Sequence[int], weights: Sequence[float], count: int
) -> tuple[Chain, ...]:
    """Draw ``count`` different questions: hops by weight, then the relations and the start uniformly.

    Raises:
        ValueError: the world has too few questions of some number of hops.
    """
    rng = _rng(world.spec, f"questions/{split}")
    by_path = {depth: [_chains(world, split, *path) for path in relation_paths(depth)] for depth in hops}
    for paths in by_path.values():
        for chains in paths:
            rng.shuffle(chains)
    quotas = _quotas(count, weights)
    drawn: list[Chain] = []
    for depth, quota in zip(hops, quotas, strict=True):
        paths = by_path[depth]
        available = sum(map(len, paths))
        if quota > available:
            raise ValueError(
                f"{quota} {split} questions of {depth} hops asked for, the world has {available}: "
                "ask for fewer questions or more entities"
            )
        # Round robin over the paths, so that no relation is rarer than its number of entities makes it.
        rounds = (chains[i] for i in range(max(map(len, paths))) for chains in paths if i < len(chains))
        drawn += [chain for chain, _ in zip(rounds, range(quota))]
    rng.shuffle(drawn)
    return tuple(drawn)


def world_words() -> tuple[str, ...]:
    """The closed list of words that name something in any world, whatever its knobs."""
    parts = [word for pair in NAME_PARTS.values() for words in pair for word in words]
    relations = [relation for facts in RELATIONS.values() for relation in facts]
    namesakes = [word for title, (relation, _) in NAMESAKES.items() for word in (title, relation)]
    return tuple(dict.fromkeys(parts + relations + namesakes))


def _rng(spec: WorldSpec, purpose: str) -> random.Random:
    return random.Random(f"minihop/{spec.seed}/{purpose}")


def _draw_names(spec: WorldSpec, kind: str) -> list[tuple[str, str]]:
    """(name, split) for every entity of a kind; each name part is shared by ``lookalikes`` of them on average."""
    share = {"person": 0.4, "company": 0.2, "town": 0.2, "country": 0.2}[kind]
    count = round(spec.entities * share)
    num_parts = max(1, round(count / max(spec.lookalikes, 1)))
    first, second = (words[:num_parts] for words in NAME_PARTS[kind])
    if count > len(first) * len(second):
        raise ValueError(
            f"{count} names of kind {kind} asked for, {len(first)} x {len(second)} can be made: "
            "lower entities or lookalikes"
        )
    rng = _rng(spec, f"names/{kind}")
    names = [f"{a} {b}" for a, b in rng.sample(list(product(first, second)), count)]
    num_test = round(count * spec.test_share)
    return [(name, "test" if index < num_test else "train") for index, name in enumerate(names)]


def _spread(spec: WorldSpec, purpose: str, subjects: Sequence[str], objects: Sequence[str]) -> list[str]:
    """An object for each subject: every object equally often, none its own.

    Equal counts keep the most common answer as rare as it can be.
    """
    rng = _rng(spec, f"facts/{purpose}")
    order = rng.sample(list(objects), len(objects))
    chosen = [order[index % len(order)] for index in rng.sample(range(len(subjects)), len(subjects))]
    for i, name in enumerate(subjects):
        if chosen[i] == name:
            j = (i + 1) % len(subjects)
            chosen[i], chosen[j] = chosen[j], chosen[i]
    return chosen


def _entity_passage(entity: Entity) -> Passage:
    sentences = [fact_sentence(entity.name, relation, value) for relation, value in entity.facts.items()]
    return Passage(entity.name, " ".join(sentences))


def _distractors(spec: WorldSpec, entities: Mapping[str, Entity]) -> list[Passage]:
    """Passages titled after a person that are about something else and so answer no question."""
    rng = _rng(spec, "distractors")
    by_kind = {kind: [e.name for e in entities.values() if e.kind == kind] for kind in RELATIONS}
    passages = []
    for person in rng.sample(by_kind["person"], round(spec.distractors * len(by_kind["person"]))):
        word, (relation, kind) = rng.choice(list(NAMESAKES.items()))
        title = f"{person} {word}"
        passages.append(Passage(title, fact_sentence(title, relation, rng.choice(by_kind[kind]))))
    return passages


def _chains(world: World, split: str, kind: str, relations: Sequence[str]) -> list[Chain]:
    """Every question along ``relations``, those that come back to an earlier entity left out."""
    starts = (e.name for e in world.entities.values() if e.kind == kind and e.split == split)
    chains = (world.follow(start, relations) for start in starts)
    return [chain for chain in chains if len(set(chain.names)) == len(chain.names)]


def _quotas(count: int, weights: Sequence[float]) -> list[int]:
    """Split ``count`` in proportion to ``weights``, to the unit."""
    total = sum(weights)
    bounds = [round(count * sum(weights[:i]) / total) for i in range(len(weights) + 1)]
    return [after - before for before, after in zip(bounds, bounds[1:])]
