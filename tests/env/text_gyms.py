"""Wrappers that make text of Gymnasium's own environments, and environments that misbehave."""

from __future__ import annotations

import threading
from typing import Any

import gymnasium
from gymnasium.spaces import Discrete, Text

from sorl_env import UnicodeText

MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}


class LakeInWords(gymnasium.Wrapper[str, str, Any, Any]):
    """FrozenLake: the policy reads where it is and writes a direction."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.observation_space = UnicodeText()
        self.action_space = Text(8, charset="abcdefghijklmnopqrstuvwxyz")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        place, info = self.env.reset(seed=seed, options=options)
        return f"You stand on field {place} of a frozen lake. Go to field 15: left, down, right or up.", info

    def step(self, action: str) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        if action not in MOVES:
            return "That is no direction.", 0.0, False, False, {}
        place, reward, terminated, truncated, info = self.env.step(MOVES[action])
        return f"Field {place}.", reward, terminated, truncated, info


def half_wrapped(env: Any) -> Any:
    """A wrapper that forgets the action space."""
    env = LakeInWords(env)
    env.action_space = Discrete(4)
    return env


class Misbehaving(gymnasium.Env[str, str]):
    """Does what its first action, or its seed, says."""

    observation_space = UnicodeText()
    action_space = UnicodeText()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        if seed == 1:
            raise OSError("no level")
        return "begin", {}

    def step(self, action: str) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if action == "hang":
            threading.Event().wait(5)
        if action == "raise":
            raise KeyError("inside")
        if action == "bytes":
            return b"no text", 0.0, False, False, {}
        if action == "tags":
            return "</information> <answer> \ud800", 0.0, False, False, {}
        reward = {"nan": float("nan"), "word": "much"}.get(action, 1.5)
        return "on", reward, action == "end", action == "cut", {}


if "sorl_tests/Misbehaving-v0" not in gymnasium.registry:  # the file is imported by its path as well
    gymnasium.register(
        "sorl_tests/Misbehaving-v0", entry_point=Misbehaving, order_enforce=False, disable_env_checker=True
    )
