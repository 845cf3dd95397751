"""What the fields of the config are made of: strict types with their bounds, and facts about a field.

A field is ``name: Annotated[TYPE, FACT, ..] = DEFAULT`` with a docstring below it, which ``--help`` prints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, ConfigDict, Strict

from sorl_env.bounds import MOST
from sorl_train.algorithms import Algorithm

SECTION_RULES = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

# pydantic's own types of these names take True for 1 and "3" for 3
Bool = Annotated[bool, Strict()]
Int = Annotated[int, Strict(), Le(MOST)]
PositiveInt = Annotated[Int, Ge(1)]
NonNegativeInt = Annotated[Int, Ge(0)]
Float = Annotated[float, Strict()]
PositiveFloat = Annotated[Float, Gt(0)]
NonNegativeFloat = Annotated[Float, Ge(0)]
Share = Annotated[Float, Ge(0), Le(1)]
Texts = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
UserKeys = dict[Annotated[str, BeforeValidator(str)], Any]  # a mapping whose keys the user chooses
_T = TypeVar("_T")
# one whose lines are all commented out is None
Section = Annotated[_T, BeforeValidator(lambda value: {} if value is None else value)]


class Resumable(NamedTuple):
    """The setting may change when a run is resumed: it alters no step already taken."""


class Needs(NamedTuple):
    """Only some runs read the setting: what they need, and whether a run has it, given the values of all settings."""

    text: str
    is_met: Callable[[Algorithm, Mapping[str, Any]], bool]


def needs(name: str, *values: str) -> Needs:
    """The setting ``name`` has to have one of ``values``; without any, it has to be given and not 0."""
    if values:
        return Needs(f"{name}={' or '.join(values)}", lambda _, given: given[name] in values)
    return Needs(name, lambda _, given: given[name] not in (None, 0))


RESUMABLE = Resumable()
CRITIC = Needs("a critic", lambda row, _: row.needs_critic)
GROUPS = Needs("groups to compare", lambda row, _: row.needs_groups)
TOTAL_REWARDS = Needs("advantages of the kind group", lambda row, _: row.advantage == "group")
TURNS = Needs("turns to compare", lambda row, _: row.advantage in ("turn_group", "state_group"))
STATES = Needs("states to compare", lambda row, _: row.advantage == "state_group")
CRITIC_OR_STATES = Needs(
    "a critic or states to compare", lambda row, _: row.advantage in ("gae", "state_group")
)
NORMALIZED = Needs("normalized steps", lambda row, _: row.normalize)
# a surrogate from outside, whose name is None, may read what it likes
PPO_CLIP = Needs("PPO's clip", lambda row, _: row.surrogate_name in ("clipped", None))
SAPO_GATE = Needs("sapo's gate", lambda row, _: row.surrogate_name in ("sapo", None))
LOCAL = needs("engine", "local")
