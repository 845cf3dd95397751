"""Environment steps per second: episodes of search, search, answer, next to the search environments of gem-llm and
skyrl-gym.

The retrieval call of each is stubbed by the same three 88-word passages; everything else is the environment's own
code: parsing, formatting of passages, history, reward, info, reset. One core, seconds of processor time, medians of
interleaved rounds, so that a busy machine blurs no comparison.

    python benchmarks/env_throughput.py --json env_throughput.json --require-peers
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym

from sorl_env import Toolbox, ToolSettings, load_examples, load_task

ENV_ID = "sorl/HotpotQA-v0"
INSTALL = "pip install gem-llm==0.1.0 skyrl-gym==0.4.0 datasets"
WANTED_RATIO = 3.0
QUESTIONS = load_examples(load_task("hotpotqa")).examples

WORDS = (
    "the river rises in the northern hills and flows past three old market towns before it meets the sea near a "
    "harbour that was built by a family of traders in the seventeenth century and later served the railway company "
    "which carried slate and timber to the coast until the line was closed after the war when most of the workers "
    "had already moved to the mills of the next valley where a museum now shows their tools and letters and a model "
    "of the first engine"
).split()[:88]
PASSAGES = [
    {"id": title, "contents": f'"{title}"\n{" ".join(WORDS)}'}
    for title in ("Afon Lwyd", "Harbour of the Traders", "Slate and Timber Railway")
]
THINK = (
    "<think>I should find out where the river meets the sea and who built the harbour there first.</think>\n"
)
EPISODE = (
    THINK + "<search>river that meets the sea near an old harbour</search>",
    THINK + "<search>family of traders who built the harbour</search>",
    THINK + "<answer>the seventeenth century</answer>",
)

Run = Callable[[int], int]  # plays about that many steps, returns how many


def play(env: Any, steps: int) -> int:
    """Episodes in an environment with Gymnasium's interface."""
    episodes = steps // len(EPISODE)
    for _ in range(episodes):
        env.reset()
        for action in EPISODE:
            _, _, terminated, _, _ = env.step(action)
        assert terminated
    return episodes * len(EPISODE)


def stub_index(toolbox: Toolbox) -> None:
    """The search over the corpus in process finds the passages at once."""
    from sorl_tools.corpus import Passage

    found = [(Passage.from_row(row), 1.0) for row in PASSAGES]
    (search,) = toolbox.tools
    search.retrieve = lambda query, top_k=None: found  # type: ignore[attr-defined]


def stub_network(toolbox: Toolbox) -> None:
    """The retrieval server answers at once; HTTP client, JSON, deadline and threads stay."""
    import httpx

    def reply(request: httpx.Request) -> httpx.Response:
        found = [{"document": row, "score": 1.0} for row in PASSAGES]
        body = json.dumps({"result": [found] * len(json.loads(request.content)["queries"])}).encode()
        return httpx.Response(200, stream=httpx.ByteStream(body))  # unread, as one from a network is

    (search,) = toolbox.tools
    search._client = httpx.Client(transport=httpx.MockTransport(reply))  # type: ignore[attr-defined]


def sorl(stub: Callable[[Toolbox], None], **options: Any) -> Run:
    env = gym.make(ENV_ID, **options)
    stub(env.unwrapped.toolbox)  # type: ignore[attr-defined]
    return lambda steps: play(env, steps)


def gem() -> Run:
    """gem-llm: its ``QaEnv`` with its ``SearchTool``."""
    from datasets import Dataset
    from gem.envs.qa_env import QaEnv
    from gem.tools.search_tool import SearchTool
    from gem.tools.tool_env_wrapper import ToolEnvWrapper

    rows = [{"question": one.question, "answer": list(one.golden_answers)} for one in QUESTIONS]
    tool = SearchTool(search_url="http://127.0.0.1:1")
    found = [{"document": row} for row in PASSAGES]
    tool._search = lambda query: tool._passages2string(found)
    env = ToolEnvWrapper(QaEnv(dataset=Dataset.from_list(rows)), tools=[tool])
    return lambda steps: play(env, steps)


def skyrl() -> Run:
    """skyrl-gym: its ``search`` environment; an episode is a new one, as in its generator."""
    import skyrl_gym
    from skyrl_gym.envs.search.env import SearchEnvConfig
    from skyrl_gym.tools import search

    found = {"result": [[{"document": row} for row in PASSAGES]]}
    search.call_search_api = lambda **request: (found, None)
    config = SearchEnvConfig()
    episodes = [
        (
            [{"role": "user", "content": one.question}],
            {"reward_spec": {"ground_truth": {"target": list(one.golden_answers)}}, "max_turns": 4},
        )
        for one in QUESTIONS
    ]

    def run(steps: int) -> int:
        count = steps // len(EPISODE)
        for number in range(count):
            prompt, extras = episodes[number % len(episodes)]
            env = skyrl_gym.make("search", env_config=config, extras=extras)
            env.init(prompt)
            for action in EPISODE:
                out = env.step(action)
            assert out["done"]
        return count * len(EPISODE)

    return run


def measure(runs: dict[str, Run], rounds: int, seconds: float) -> dict[str, float]:
    """Median steps per second of each, in interleaved rounds of about ``seconds`` each."""
    steps = {name: _steps_within(run, seconds) for name, run in runs.items()}
    gc.collect()
    gc.freeze()  # what one contestant's libraries keep in memory must not slow the garbage collection of the others
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            started = time.process_time()
            played = run(steps[name])
            rates[name].append(played / (time.process_time() - started))
    return {name: statistics.median(values) for name, values in rates.items()}


def _steps_within(run: Run, seconds: float) -> int:
    steps = 384
    while True:
        started = time.process_time()
        run(steps)
        if time.process_time() - started > seconds / 2:
            return steps
        steps *= 2


def build() -> tuple[dict[str, Run], list[str]]:
    """The contestants, and which of the others are not installed."""
    runs, missing = {"sorl": sorl(stub_index)}, []
    for name, make in PEERS.items():
        try:
            runs[name] = make()
        except ModuleNotFoundError as error:
            missing.append(f"{name} (no module {error.name})")
    settings = ToolSettings(search_url="http://127.0.0.1:1")
    return runs | {"sorl, server": sorl(stub_network, tool_settings=settings)}, missing


PEERS: dict[str, Callable[[], Run]] = {"gem-llm": gem, "skyrl-gym": skyrl}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.1, help="of one round of one environment, about")
    parser.add_argument("--require-peers", action="store_true", help="fail when a peer is not installed")
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

    logging.disable(logging.WARNING)  # gem-llm switches the logs of every library on
    runs, missing = build()
    for line in missing:
        print(f"not installed: {line}; {INSTALL}", file=sys.stderr)
    if missing and args.require_peers:
        return 2
    rates = measure(runs, args.rounds, args.seconds)
    figures = summarize(rates)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def summarize(rates: dict[str, float]) -> dict[str, Any]:
    print(f"{'environment':32} {'steps/s':>10} {'us/step':>9}")
    for name, rate in rates.items():
        print(f"{name:32} {rate:10,.0f} {1e6 / rate:9.1f}")
    fastest = max((rate for name, rate in rates.items() if name in PEERS), default=None)
    ratio = None if fastest is None else rates["sorl"] / fastest
    if ratio is not None:
        print(f"\nsorl to the faster peer: {ratio:.2f} (wanted: {WANTED_RATIO:g})")
    steps = {name: round(rate, 1) for name, rate in rates.items()}
    return {"steps_per_s": steps, "ratio_to_faster_peer": ratio, "python": platform.python_version()}


if __name__ == "__main__":
    sys.exit(main())
