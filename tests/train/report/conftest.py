"""A run folder like one of training, written by the writers that training uses; a browser to look at its pages."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from sorl_env.tool import ToolCall
from sorl_env.trajectory import StopReason, Trajectory, Turn, write_jsonl
from sorl_train.config.settings import OptimConfig, RolloutConfig, TrainConfig, UpdateConfig
from sorl_train.report.page import SECTIONS
from sorl_train.run.folder import RunDir
from sorl_train.run.metrics_log import MetricsLog, TokenRecord, write_token_records

from .browser import PROGRAM, Browser

HOSTILE = (
    "(Vela</pre></details><script>document.title='owned'</script>\u2028"
    "<img src=x onerror=\"document.title='owned'\">"
)
PEOPLE = ["Orin Talmar", "Sela Quist", "Bram Odell", "Ivo Kestrel", "Mara Lunde"]
TOWNS = ["Varnholt", "Eskaby", "Tarn Hollow", "Lindeck", "Port Amsel"]


def make_trajectory(
    id: str,
    rng: np.random.Generator,
    *,
    right: bool = True,
    hostile: bool = False,
    stop: StopReason = StopReason.ANSWER,
) -> Trajectory:
    """Two searches and an answer; with another stop reason, a malformed last turn or an outage."""
    person, town = str(rng.choice(PEOPLE)), str(rng.choice(TOWNS))
    turns, start = [], 24
    for i, query in enumerate((f"{person} employer", "Vela Foundry town")):
        passage = HOSTILE if hostile else f"(Vela Foundry) Vela Foundry is a company. It is based in {town}."
        observation = (
            f"\n\n<information>\n(1) {person} works for Vela Foundry.\n(2) {passage}\n</information>\n\n"
        )
        call = ToolCall(
            "search", query, passage, latency_s=0.0004 + 0.003 * rng.random(), hits=3, attempts=1 + i
        )
        text = f"<think>I need the {'town' if i else 'employer'}.</think>\n<search>{query}</search>"
        times = {"generate_s": 0.4 + rng.random(), "tool_s": call.latency_s}
        turns.append(
            Turn(i, text, "tool", query, None, observation, {}, (call,), start, start + 14, i, **times)
        )
        start += 14 + 40
    reward = 1.0 if right and stop is StopReason.ANSWER else 0.0
    last = (), start, start + 11, 2
    if stop is StopReason.ANSWER:
        answer = town if right else "unknown"
        text = f"<think>It is based in {answer}.</think>\n<answer>{answer}</answer>"
        turns.append(Turn(2, text, "answer", answer, None, "", {"exact_match": reward}, *last))
    elif stop is StopReason.INVALID:
        text = f"<think>Surely</think> it is {town} <information>{town}</information> <answer>{town}"
        turns.append(Turn(2, text, "invalid", "", "unclosed", "", {"exact_match": 0.0}, *last))
    elif stop is StopReason.ERROR:
        out = "timed out after 30 s"
        call = ToolCall("search", "q", "", ok=False, error=out, latency_s=30.0, attempts=4)
        turns[-1] = dataclasses.replace(turns[-1], tool_calls=(call,), observation="")
    length = turns[-1].end
    turn_ids = np.full(length, -1, np.int16)
    for turn in turns:
        turn_ids[turn.start : turn.end] = turn.index
    return Trajectory(
        id=id, group_id=id.partition("/")[0], task="minihop", source="embedded", split="train",
        example_id=f"train-{rng.integers(2000)}",
        prompt=f"Search, then answer. In which town is the employer of {person} based?",
        token_ids=rng.integers(0, 900, length).astype(np.int32), action_mask=turn_ids >= 0, turn_ids=turn_ids,
        rollout_log_probs=np.where(turn_ids >= 0, -rng.random(length), 0.0).astype(np.float32),
        turns=tuple(turns), reward=reward, reward_items={} if stop is StopReason.ERROR else {"exact_match": reward},
        stop_reason=stop, seed=int(rng.integers(1 << 30)),
        error="search: timed out after 30 s" if stop is StopReason.ERROR else None,
    )  # fmt: skip


def make_token_record(trajectory: Trajectory, rng: np.random.Generator) -> TokenRecord:
    """Its texts cut into as many tokens as it has, with figures; every ninth token is clipped."""
    tokens: list[str] = []
    turn_of: list[int] = []
    for turn in trajectory.turns:
        number = turn.end - turn.start
        edges = np.linspace(0, len(turn.text), number + 1).astype(int)
        tokens += [turn.text[a:b] for a, b in itertools.pairwise(edges)]
        turn_of += [turn.index] * number
    log_ratio = 0.1 * rng.standard_normal(len(tokens))
    clipped = np.arange(len(tokens)) % 9 == 4
    log_ratio[clipped] = np.where(log_ratio[clipped] > 0, 0.4, -0.5)
    advantage = np.where(log_ratio > 0, 1.0, -1.0) * rng.random(len(tokens))
    figures = {"log_ratio": log_ratio, "ratio": np.exp(log_ratio), "advantage": advantage}
    figures["entropy"] = rng.exponential(0.4, len(tokens))
    plain = {name: [float(value) for value in values] for name, values in figures.items()}
    return TokenRecord(trajectory.id, tokens, turn_of, clipped=[int(value) for value in clipped], **plain)


def make_metrics(step: int, share: float, rng: np.random.Generator, collapse: bool) -> dict[str, float]:
    """All that figures draw, and some more, at ``share`` of the run; a collapsing run explodes after half of it."""
    blow = math.exp(max(0.0, share - 0.5) * 14) if collapse else 1.0
    success = (0.62 + 0.36 * (1 - math.exp(-4 * share))) / (1 + 0.02 * (blow - 1))
    noise = 0.03 * rng.standard_normal()
    norm = 0.8 * blow * math.exp(0.2 * rng.standard_normal())
    bias = 0.4 * norm
    drawn = (name for section in SECTIONS for figure in section.figures for name in figure.metrics)
    metrics = {name: 0.1 * share for name in drawn if not name.startswith("eval/")}
    others = "rollout/stop_answer rollout/replay_age_mean tool/calls loss/policy loss/trust_scale loss/clip_bias_other"
    metrics |= dict.fromkeys(others.split(), 1.0 + noise)
    metrics |= {
        "rollout/success": min(1.0, max(0.0, success - 0.05 + noise)),
        "rollout/reward_mean": min(1.0, max(0.0, success - 0.05 + noise)),
        "loss/grad_norm": norm,
        "loss/grad_norm_max": 1.6 * norm,
        "loss/clip_frac": min(0.6, 0.02 * blow**0.7),
        "loss/clip_bias_norm": bias,
        "loss/effective_lr": 3e-4 / max(1.0, bias),
        "loss/normalized_frac": float(bias > 1),
        "time/rollout_s": 1.8,
        "time/update_s": 1.1,
        "time/log_probs_s": 0.2,
        "time/step_s": 3.5,
    }
    if step % 10 == 0:
        evaluated = {"eval/success": success, "eval/valid_turn_rate": 0.995}
        metrics |= evaluated | {"time/eval_s": 2.0, "time/step_s": 5.5}
    return metrics


def make_run(
    path: Path,
    *,
    algo: str = "so_ppo",
    seed: int = 0,
    steps: int = 40,
    finished: bool = True,
    is_sample: bool = False,
    hostile: bool = False,
    tokens: bool = True,
    lr: float = 3e-4,
    batch: int = 12,
) -> Path:
    """A whole run folder. ``ppo`` collapses, with an alarm; ``hostile`` passages try to break out of the page."""
    rng = np.random.default_rng(seed)
    sections = {"update": UpdateConfig(steps=steps), "optim": OptimConfig(lr=lr)}
    config = TrainConfig(algo=algo, seed=seed, rollout=RolloutConfig(batch_size=128), **sections)
    run = RunDir.create(path, config)
    data = {"source": "embedded sample of minihop", "sha256": "0" * 64, "is_sample": is_sample}
    run.record("data", {"train": data})
    collapse = algo == "ppo"
    with closing(MetricsLog(run, tensorboard=False)) as log:
        log.log(0, {"eval/success": 0.62, "eval/valid_turn_rate": 0.98, "time/eval_s": 3.0})
        for step in range(1, steps + 1):
            log.log(step, make_metrics(step, step / steps, rng, collapse))
    if collapse:
        reason = "gradient norm 9 times its median"
        event = {"step": steps * 5 // 8, "kind": "collapse_alarm", "reason": reason}
        (path / "events.jsonl").write_text(json.dumps(event) + "\n")
    for step in sorted({1, *range(10, steps + 1, 10)}):
        stops = [StopReason.INVALID, StopReason.ANSWER, StopReason.ERROR, *[StopReason.ANSWER] * (batch - 3)]
        sampled = [
            make_trajectory(f"s{step}-p{i}/0", rng, right=i % 3 != 0, hostile=hostile, stop=stop)
            for i, stop in enumerate(stops)
        ]
        write_jsonl(run.trajectories / f"step_{step:06d}.jsonl", sampled)
        if tokens and step > 1:
            records = [make_token_record(t, rng) for t in sampled if not t.excluded]
            write_token_records(run.trajectories / f"step_{step:06d}.tokens.jsonl.gz", records)
    if finished:
        figures = {"cold_start_success": 0.62, "best_success": 0.98, "search_off_success": 0.012}
        figures |= {"final_success": 0.02 if collapse else 0.973, "wall_s": 231.4, "peak_rss_mb": 1840.5}
        run.write_summary(figures)
    return path


@pytest.fixture(name="make_run", scope="session")
def make_run_fixture() -> Callable[..., Path]:
    return make_run


@pytest.fixture(name="make_trajectory")
def make_trajectory_fixture() -> Callable[..., Trajectory]:
    return make_trajectory


@pytest.fixture
def batches(tmp_path: Path) -> Callable[..., Path]:
    """Writes trajectories with the given rewards, by file; a reward of None is an outage."""

    def write(**files: list[float | None]) -> Path:
        for name, rewards in files.items():
            batch = []
            for i, reward in enumerate(rewards):
                stop = StopReason.ERROR if reward is None else StopReason.ANSWER
                trajectory = make_trajectory(f"{name}-{i}/0", np.random.default_rng(i), stop=stop)
                batch.append(dataclasses.replace(trajectory, reward=reward or 0.0))
            write_jsonl(tmp_path / f"{name}.jsonl", batch)
        return tmp_path

    return write


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.process.terminate()
    started.process.wait(timeout=30)
