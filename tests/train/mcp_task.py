"""A task whose only tools are those of an MCP server: how many of an item lie on a shelf?

The server is a command, ``tests/tools/mcp/servers.py stock``; ``server("mcp:..")`` names another one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sorl_env import Example, Limits, Task
from sorl_env.rewards import exact_match

SERVERS = Path(__file__).parents[1] / "tools" / "mcp" / "servers.py"
STOCK = f"mcp:{sys.executable} {SERVERS} stock"
SHELVES = {"oak A 1": {"bolts": 7, "lamps": 3}, "elm B 2": {"bolts": 12, "lamps": 0}}


def _row(row: Mapping[str, Any]) -> Example:
    gold = (str(SHELVES[row["shelf"]][row["item"]]),)
    question = f"How many {row['item']} lie on shelf {row['shelf']} ?"
    return Example(f"{row['shelf']} {row['item']}", question, gold, metadata=dict(row))


def _embedded(_: str) -> list[Example]:
    return [_row({"shelf": shelf, "item": item}) for shelf, items in SHELVES.items() for item in items]


def _reward(example: Example, turns: Sequence[Any]) -> dict[str, float]:
    answers = [turn.content for turn in turns if turn.kind == "answer"]
    return {"exact_match": exact_match(answers[-1], example.golden_answers) if answers else 0.0}


def _expert(example: Example, observations: Sequence[str]) -> str | None:
    if not observations:
        return f"<think> look </think> <shelf> {example.metadata['shelf']} </shelf>"
    found = re.search(rf"{example.metadata['item']} (\d+)", observations[-1])
    return None if found is None else f"<think> {found[1]} </think> <answer> {found[1]} </answer>"


def server(reference: str = STOCK) -> Task:
    return Task(
        name="mcp_stock",
        prompt=lambda example: f"Look with <shelf> name </shelf> , then answer . {example.question}",
        reward=_reward,
        parse_row=_row,
        tools=[reference],
        embedded=_embedded,
        limits=Limits(
            3, max_prompt_tokens=64, max_new_tokens=24, max_observation_tokens=64, max_trajectory_tokens=320
        ),
        expert=_expert,
        vocabulary=lambda: [*SHELVES, "bolts", "lamps", "shelf", *map(str, range(20))],
    )


TASK = server()
