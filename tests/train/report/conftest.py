"""A run folder like one of training, written by the writers that training uses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sorl_env.tool import ToolCall
from sorl_env.trajectory import StopReason, Trajectory, Turn
from sorl_env.trajectory_io import write_jsonl
from sorl_train.config import RolloutConfig, TrainConfig, UpdateConfig
from sorl_train.metrics_log import MetricsLog
from sorl_train.run_dir import RunDir

HOSTILE = "(Vela</pre></details><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
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
    if stop is StopReason.ANSWER:
        answer = town if right else "unknown"
        text = f"<think>It is based in {answer}.</think>\n<answer>{answer}</answer>"
        turns.append(
            Turn(2, text, "answer", answer, None, "", {"exact_match": reward}, (), start, start + 11, 2)
        )
    elif stop is StopReason.INVALID:
        text = f"<think>Surely</think> it is {town} <information>{town}</information> <answer>{town}"
        turns.append(
            Turn(2, text, "invalid", "", "unclosed", "", {"exact_match": 0.0}, (), start, start + 11, 2)
        )
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


def make_metrics(step: int, share: float, rng: np.random.Generator, collapse: bool) -> dict[str, float]:
    """Metrics of one step at ``share`` of the run; a collapsing run explodes after half of it."""
    blow = math.exp(max(0.0, share - 0.5) * 14) if collapse else 1.0
    success = (0.62 + 0.36 * (1 - math.exp(-4 * share))) / (1 + 0.02 * (blow - 1))
    noise = 0.03 * rng.standard_normal()
    bias = 0.4 * blow * math.exp(0.5 * rng.standard_normal())
    norm = 0.8 * blow * math.exp(0.2 * rng.standard_normal())
    metrics = {
        "rollout/success": min(1.0, max(0.0, success - 0.05 + noise)),
        "rollout/valid_turn_rate": min(1.0, 0.99 / (1 + 0.01 * (blow - 1))),
        "rollout/excluded_rate": 0.0,
        "rollout/reward_mean": min(1.0, max(0.0, success - 0.05 + noise)),
        "rollout/num_turns": 2.9 + 0.1 * noise,
        "rollout/response_tokens": 42 + 30 * noise,
        "rollout/stop_answer": min(1.0, success),
        "tool/calls": float(240 + rng.integers(20)),
        "loss/policy": 0.02 * noise,
        "loss/grad_norm": norm,
        "loss/grad_norm_normalized": norm / max(1.0, bias),
        "loss/clip_frac": min(0.6, 0.02 * blow**0.7),
        "loss/clip_bias_norm": bias,
        "loss/clip_bias_scalar": 0.01 * bias,
        "loss/normalizer": 1 / max(1.0, bias),
        "loss/normalized_frac": float(bias > 1),
        "loss/approx_kl": 0.002 * blow * (1 + abs(noise)),
        "loss/ref_kl": 0.05 * share * blow,
        "loss/entropy": 0.4 * (1 - 0.7 * share),
        "rollout/mismatch_kl": 1e-6 * (1 + rng.random()),
        "time/rollout_s": 1.8 + 0.2 * rng.random(),
        "time/update_s": 1.1 + 0.1 * rng.random(),
        "time/log_probs_s": 0.2,
        "time/tokens_per_s": 4800 + 500 * noise,
        "time/rollout_tokens_per_s": 9000 + 500 * noise,
        "time/step_s": 3.5,
    }
    if step % 10 == 0:
        metrics |= {
            "eval/success": success,
            "eval/valid_turn_rate": 0.995,
            "time/eval_s": 2.0,
            "time/step_s": 5.5,
        }
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
) -> Path:
    """A whole run folder. ``ppo`` collapses; ``hostile`` passages try to break out of the page."""
    rng = np.random.default_rng(seed)
    config = dataclasses.replace(
        TrainConfig(),
        algo=algo,
        seed=seed,
        update=UpdateConfig(steps=steps),
        rollout=RolloutConfig(batch_size=128),
    )
    run = RunDir.create(path, config)
    run.record(
        "data",
        {"train": {"source": "embedded sample of minihop", "sha256": "0" * 64, "is_sample": is_sample}},
    )
    collapse = algo == "ppo"
    with MetricsLog(run, tensorboard=False) as log:
        log.log(0, {"eval/success": 0.62, "eval/valid_turn_rate": 0.98, "time/eval_s": 3.0})
        for step in range(1, steps + 1):
            log.log(step, make_metrics(step, step / steps, rng, collapse))
    for step in {1, *range(10, steps + 1, 10)}:
        stops = [StopReason.INVALID, StopReason.ANSWER, StopReason.ERROR, *[StopReason.ANSWER] * 9]
        batch = [
            make_trajectory(f"{step}-{i}/0", rng, right=i % 3 != 0, hostile=hostile, stop=stop)
            for i, stop in enumerate(stops)
        ]
        write_jsonl(run.trajectories / f"step_{step:06d}.jsonl", batch)
    if finished:
        figures = {
            "cold_start_success": 0.62,
            "final_success": 0.02 if collapse else 0.973,
            "best_success": 0.98,
        }
        run.write_summary(figures | {"search_off_success": 0.012, "wall_s": 231.4, "peak_rss_mb": 1840.5})
    return path


@pytest.fixture(name="make_run", scope="session")
def make_run_fixture() -> Callable[..., Path]:
    return make_run


@pytest.fixture(name="make_trajectory")
def make_trajectory_fixture() -> Callable[..., Trajectory]:
    return make_trajectory
