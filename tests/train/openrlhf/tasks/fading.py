"""MiniHop whose prompts can no longer be made once a file is there."""

import dataclasses
from pathlib import Path

from sorl_env.task.registry import load_task

WORLD = {"entities": 240, "lookalikes": 4, "train_questions": 48, "test_questions": 16, "hops": [1, 2]}


def make(gone):
    task = load_task("minihop", **WORLD)

    def prompt(example):
        if Path(gone).exists():
            raise RuntimeError("the questions are gone")
        return task.prompt(example)

    return dataclasses.replace(task, name="fading_minihop", prompt=prompt)
