"""Coin Collector: TextWorld's game of many rooms and one coin, written by others (Microsoft, arXiv:1806.11532).

The policy walks through a generated house, of which it knows nothing, and answers with the room in which the coin lies.
Half of the rooms are dead ends, so it has to go back and to remember where it has been: 15 to 40 turns, and one reward
at the end. TextWorld generates the games, plays them and writes what is read there (``pip install sorl[textworld]``).

    sorl-lab stability --config long_horizon    # a tiny policy learns houses of ten rooms
    load_task("coin_collector", length=6)
"""

from __future__ import annotations

import json
import re
import threading
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from sorl_env.bridges.session_env import seeded_examples
from sorl_env.errors import Bounds, UserError, install_command
from sorl_env.folders import cache_folder, replacing
from sorl_env.rewards import exact_match
from sorl_env.task import Example, Limits, Task
from sorl_env.turns.tags import ParsedTurn
from sorl_tasks._qa import in_share

DIRECTIONS = ("north", "east", "south", "west")
COMMANDS = ("look", *(f"go {direction}" for direction in DIRECTIONS))
OPPOSITE = dict(zip(DIRECTIONS, (*DIRECTIONS[2:], *DIRECTIONS[:2]), strict=True))
PROMPT = (
    "Somewhere in this house lies a coin. Look around and walk with <act> look </act> and <act> go north </act> (or "
    "east, south, west). When you see the coin, answer with the name of the room, as <answer> kitchen </answer>.\n"
)
_ROOM = re.compile(r"-= (?P<name>.+?) =-")
_LONGEST = 50  # TextWorld's games have at most 100 rooms
_MAKING = threading.Lock()  # TextWorld generates one game at a time


def coin_collector(*, length: int = 10, games: int = 2000, hasty: float = 0.0) -> Task:
    """Build the task.

    Args:
        length: rooms on the way to the coin, that of the start among them. As many are dead ends beside it.
        games: number of games in each split. The first episodes make theirs one after another, about a second each, and
            keep them in the cache folder. A first batch of over twenty games needs a longer ``search.timeout_s``.
        hasty: on this share of the games the expert answers with the first dead end that it meets. A policy that
            imitates it learns this habit, and reinforcement learning has to correct it.

    Raises ``UserError`` if a knob is out of range or TextWorld is not installed.
    """
    bounds = {"length": (length, Bounds(2, _LONGEST)), "games": (games, Bounds(1, 10_000_000))}
    for name, (value, allowed) in {**bounds, "hasty": (hasty, Bounds(0, 1))}.items():
        if problem := allowed.problem(value):
            raise UserError(f"coin_collector: {name} {problem}")
    turns = 4 * length  # into each dead end and back, and to the coin
    return Task(
        name="coin_collector",
        description="Find the coin in a TextWorld house of many rooms, half of them dead ends.",
        prompt=lambda example: PROMPT,
        reward=reward,
        parse_row=_no_rows,
        tools=[Walk()],
        embedded=lambda split: _examples(split, length, games),
        limits=Limits(
            max_turns=turns,
            max_prompt_tokens=128,
            max_new_tokens=48,
            max_observation_tokens=160,
            max_trajectory_tokens=128 + turns * 120,
        ),
        expert=lambda example, observations: expert_turn(observations, hasty=in_share(example, hasty)),
        vocabulary=lambda: [PROMPT, " ".join(DIRECTIONS), *_room_names()],
    )


class Walk:
    """Plays one game: its argument is one of ``COMMANDS``, its reply what the game writes."""

    name = "act"
    description = "Type a command into the game, such as: look, go north."
    schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
    }

    def __init__(self, example: Example | None = None) -> None:
        self._example = example
        self._game: Any = None

    def new_episode(self, example: Example, seed: int) -> Walk:
        """The game of this example, from its beginning. All episodes of an example are alike; ``seed`` is not used."""
        return Walk(example)

    def __call__(self, command: str) -> str:
        """What the game writes, in one line."""
        if self._game is None:  # made or read at the first call, which has a deadline
            assert self._example is not None
            from textworld.envs import JerichoEnv

            # which says that it reads no scores of such games; they are not used here
            warnings.filterwarnings("ignore", ".*is not fully supported", module="jericho")
            self._game = JerichoEnv()
            self._game.load(str(_game_file(self._example)))
            self._game.reset()
        words = " ".join(command.lower().split())
        if words not in COMMANDS:  # the interpreter's own, such as quit, and some bytes end the process
            return f"Possible commands: {', '.join(COMMANDS)}."
        state, *_ = self._game.step(words)
        return re.sub(r"\s+", " ", state.feedback.partition("\n>")[0]).strip()

    def close(self) -> None:
        """End the game."""
        if self._game is not None:
            self._game.close()


def reward(example: Example, turns: Sequence[ParsedTurn]) -> Mapping[str, float]:
    """1 for the name of the room with the coin, else 0."""
    answered = bool(turns) and turns[-1].kind == "answer"
    said = turns[-1].content if answered else ""
    spaced = said.replace("-", " ")  # a "dish - pit" is a dish-pit
    return {"exact_match": exact_match(spaced, [_coin_room(example).replace("-", " ")]) if answered else 0.0}


def expert_turn(observations: Sequence[str], hasty: bool = False) -> str:
    """The next turn of a depth-first search, which says where it came from and what it has tried in this room. The
    first of ``observations`` answers ``look``. If ``hasty`` it answers with the first dead end."""
    if not observations:
        return "<think> start </think> <act> look </act>"
    # the path from the start: for each room, the direction back and those that were tried
    path: list[tuple[str, list[str]]] = [("start", [])]
    for text in observations[:-1]:
        back, tried = path[-1]
        onward = _onward(text, back, tried)
        if onward is None:
            path.pop()
        else:
            tried.append(onward)
            path.append((OPPOSITE[onward], []))
    newest = observations[-1]
    back, tried = path[-1]
    onward = _onward(newest, back, tried)
    room = _ROOM.search(newest)
    dead_end = onward is None and not tried
    if room and ("coin" in newest or (hasty and dead_end)):
        seen = "coin" if "coin" in newest else "nothing"
        return f"<think> {seen} here </think> <answer> {room['name']} </answer>"
    walked = f"from {back} , tried {' '.join(tried) or 'none'}"
    return f"<think> {walked} </think> <act> go {onward or back} </act>"


def _onward(text: str, back: str, tried: Sequence[str]) -> str | None:
    """The first exit of a room that was not tried, other than the one back; None if there is none."""
    exits = [way for way in DIRECTIONS if re.search(rf"\b{way}\b", text)]
    return next((way for way in exits if way != back and way not in tried), None)


def _examples(split: str, length: int, games: int) -> tuple[Example, ...]:
    _textworld()  # refused here where it is not installed, and not when the file is imported
    seeds = seeded_examples("coin_collector", split, games)
    return tuple(Example(one.id, "", metadata={**one.metadata, "length": length}) for one in seeds)


def _game_file(example: Example) -> Path:
    """The compiled game of an example; it is made where it is not in the cache, beside the name of the coin's room."""
    length, seed = example.metadata["length"], example.metadata["seed"]
    folder = cache_folder() / "coin_collector" / f"textworld-{_textworld().__version__}"
    path = folder / f"{length}-{seed}.z8"
    with _MAKING:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _make(length, seed, path)
    return path


def _make(length: int, seed: int, path: Path) -> None:
    from textworld.challenges.tw_coin_collector import coin_collector as challenge
    from textworld.generator import GameOptions, compile_game

    options = GameOptions()
    options.seeds = seed
    game = challenge.make({"level": 100 + length}, options)  # a dead end for each room on the way
    lies = next(fact for fact in game.world.facts if fact.name == "at" and fact.arguments[0].name == "o_0")
    with replacing(path) as unfinished, replacing(path.with_suffix(".json")) as about:
        about.write_text(json.dumps({"room": game.infos[lies.arguments[1].name].name}), encoding="utf-8")
        options.path = f"{unfinished}.z8"
        compile_game(game, options)
        Path(options.path).rename(unfinished)
        Path(options.path).with_suffix(".json").unlink()
        Path(options.path).with_suffix(".ni").unlink()


@lru_cache(maxsize=100_000)
def _room(path: Path) -> str:
    name: str = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["room"]
    return name


def _coin_room(example: Example) -> str:
    return _room(_game_file(example))


def _room_names() -> list[str]:
    from textworld.generator import Grammar

    return [name.title() for name in Grammar().get_all_names_for_type("r", include_adj=True)]


def _textworld() -> Any:
    try:
        import textworld
    except ModuleNotFoundError as error:
        raise UserError(
            f"coin_collector needs the package textworld ({error}): {install_command('textworld')}"
        ) from error
    return textworld


def _no_rows(row: Mapping[str, Any]) -> Example:
    raise ValueError("coin_collector generates its games: leave --data out")


TASK = coin_collector()
