"""MiniHop with a tool that hangs for a fifth of the queries and a reward that raises for a tenth of the questions.

Only in the workers of a run: the cold start before it is spared.
"""

import dataclasses
import os
import time
import zlib

from sorl_env.task.registry import load_task

WORLD = {"entities": 240, "lookalikes": 4, "train_questions": 48, "test_questions": 16, "hops": [1, 2]}
MINIHOP = load_task("minihop", **WORLD)
IN_WORKER = "SORL_RUN_DIR" in os.environ


def _tools(settings):
    (found,) = MINIHOP.tools(settings) if callable(MINIHOP.tools) else MINIHOP.tools

    class Flaky:
        """The task's search."""

        name, description, schema = found.name, found.description, found.schema

        def __call__(self, query):
            if IN_WORKER and zlib.crc32(query.encode()) % 5 == 0:
                time.sleep(5)
            return found(query)

    return [Flaky()]


def _reward(example, turns):
    if IN_WORKER and zlib.crc32(example.id.encode()) % 10 == 0:
        raise ValueError(f"no reward for {example.id}")
    return MINIHOP.reward(example, turns)


TASK = dataclasses.replace(MINIHOP, name="flaky_minihop", tools=_tools, reward=_reward)
