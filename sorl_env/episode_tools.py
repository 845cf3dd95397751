"""Tools that keep state: each episode gets its own, made at the reset.

Most tools answer from their argument alone, and all episodes share one object. A tool whose replies depend on earlier
calls of the episode (a notebook, a shell, a simulated user) offers ``new_episode(seed)``, which returns the object that
serves one episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from sorl_env.tool import ToolOutcome, ToolRequest
from sorl_env.toolbox import Toolbox


class EpisodeTools:
    """The tools of one environment. During an episode, stateful tools are the episode's own; the others are shared.

    Attributes:
        shared: the toolbox that all environments of a task share.
        box: serves the running episode. It is ``shared`` between episodes, and where no tool keeps state.
    """

    def __init__(self, shared: Toolbox) -> None:
        self.shared = shared
        self.box = shared

    def begin(self, seed: int) -> None:
        """Make the episode's own tools; they take their random draws from ``seed``."""
        self.end()
        if self.shared.stateful:
            self.box = self.shared.for_episode(seed)

    def end(self) -> None:
        """Close the episode's own tools, if it has any."""
        if self.box is not self.shared:
            ended, self.box = self.box, self.shared
            ended.close(only=ended.stateful)


def draw_tool_seeds(shared: Toolbox, generator: np.random.Generator, count: int) -> list[int]:
    """Seeds for the tools of ``count`` episodes; nothing is drawn where no tool keeps state."""
    if not shared.stateful:
        return [0] * count
    return [int(seed) for seed in generator.integers(2**31, size=count)]


def call_each(pairs: Sequence[tuple[Toolbox, ToolRequest]]) -> list[ToolOutcome]:
    """Serve the requests of many environments of one task, each with its toolbox; outcomes in the same order.

    Requests to shared tools go out as one batch. Requests to an episode's own tools run side by side in threads, or one
    after the other where the tool is ``inline``.
    """
    if not pairs:
        return []
    outcomes: dict[int, ToolOutcome] = {}
    shared = [index for index, (box, request) in enumerate(pairs) if request.tool not in box.stateful]
    if shared:
        served = pairs[shared[0]][0].call_batch([pairs[index][1] for index in shared])
        outcomes.update(zip(shared, served, strict=True))
    own = [index for index in range(len(pairs)) if index not in outcomes]
    threaded = [index for index in own if not pairs[index][0].is_inline(pairs[index][1].tool)]
    for index in own:
        if index not in threaded:
            outcomes[index] = pairs[index][0].call(pairs[index][1])
    if threaded:
        with ThreadPoolExecutor(min(len(threaded), pairs[0][0].max_threads)) as pool:
            results = pool.map(lambda index: pairs[index][0].call(pairs[index][1]), threaded)
            outcomes.update(zip(threaded, results, strict=True))
    return [outcomes[index] for index in range(len(pairs))]
