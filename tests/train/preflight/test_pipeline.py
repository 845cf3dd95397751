"""The simulation of asynchronous pipelines (benchmarks/pipeline.py), by hand."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("simpy", reason="needs pip install -e '.[dev]'")
PIPELINE = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "pipeline.py"))
Costs, Layout = PIPELINE["Costs"], PIPELINE["Layout"]
# Two turns: 10 and 30 tokens read, 32 and 8 written.
LENGTHS = [[(10, 32), (30, 8)]]
COSTS = Costs(read=0.1, step=0.05, seat=0.0, tool=1.0, train=0.01, batch=0.2, weights=0.5)
SAMPLING = 40 * 0.1 + 40 * 0.05 + 1.0  # all trajectories at once: 7 seconds


def run(steps: int = 12, costs: Any = COSTS, **layout: Any) -> Any:
    return PIPELINE["Pipeline"](Layout(**({"engines": 1, "batch": 5} | layout)), costs, LENGTHS).run(steps)


def training(batch: int) -> float:
    return batch * 80 * 0.01 + 0.2


def test_a_synchronous_step_is_the_sum_of_its_phases() -> None:
    found = run().figures()
    assert found["step_s"] == pytest.approx(SAMPLING + training(5) + 0.5)
    assert found["staleness"] == 0 and found["trainer_waits"] == pytest.approx(SAMPLING / found["step_s"])


@pytest.mark.parametrize("batch", [5, 20])  # the engines, the trainer is slower
def test_one_step_off_takes_the_longer_phase_and_then_the_weights(batch: int) -> None:
    found = run(queue=1, batch=batch).figures()
    assert found["step_s"] == pytest.approx(max(SAMPLING, training(batch)) + 0.5)
    assert found["staleness"] == 1


def test_partial_rollouts_go_on_while_weights_arrive() -> None:
    found = run(queue=1, partial=True, batch=5).figures()
    assert found["step_s"] < max(SAMPLING, training(5)) + 0.5 and 0 < found["staleness"] < 1


@pytest.mark.parametrize("queue", [1, 2, 4])
def test_staleness_is_at_most_what_the_queue_holds(queue: int) -> None:
    pipeline = run(steps=20, queue=queue, batch=20)  # the trainer is slower, so the queue is full
    assert pipeline.staleness[-1] == queue == max(pipeline.staleness)


def test_the_retriever_the_seats_and_company_in_an_engine() -> None:
    assert run(calls=1).figures()["step_s"] == pytest.approx(SAMPLING + 4 * 1.0 + training(5) + 0.5)
    # one seat: ten turns one after another, the last call while others are decoded
    alone = run(seats=1, costs=COSTS._replace(tool=0.0)).figures()["step_s"]
    assert alone == pytest.approx(5 * (SAMPLING - 1.0) + training(5) + 0.5)
    slower = run(costs=COSTS._replace(seat=0.01)).figures()["step_s"]
    assert slower == pytest.approx(run().figures()["step_s"] + 40 * 0.01 * 5)
    assert run(engines=5, costs=COSTS._replace(seat=0.01)).figures()["step_s"] == pytest.approx(
        slower - 40 * 0.04
    )


def test_longer_trajectories_stay_within_the_limit() -> None:
    made = PIPELINE["longer"](LENGTHS * 200, 500)
    written = [tokens for turns in made for _, tokens in turns]
    assert max(written) == 500 and 8 * 20 < sum(written) / 400 < 12 * 20
