"""Interrupts while an event loop runs: the process ends, wherever they arrive."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from sorl_env.commands.command import interrupt_on, run_async


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Handlers as they were."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def kill_self(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


# Many tasks that wait for each other, as rollouts wait for the sampler, until a signal arrives at a random moment.
BUSY = """
import asyncio, random, signal, sys
from sorl_env.commands.command import interrupt, run_async

async def relay(wake, then):
    while True:
        await wake.wait()
        wake.clear()
        then.set()

async def main():
    wakes = [asyncio.Event() for _ in range(50)]
    tasks = [asyncio.ensure_future(relay(a, b)) for a, b in zip(wakes, wakes[1:] + wakes[:1])]
    for wake in wakes[::10]:
        wake.set()
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

signal.signal(signal.SIGALRM, interrupt)
draws = random.Random(int(sys.argv[1]))
for _ in range(int(sys.argv[2])):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.003 + 0.003 * draws.random())
        run_async(main())
    except KeyboardInterrupt:
        continue
    raise SystemExit("it ended without the interrupt")
print("all ended")
"""


def test_an_interrupt_at_any_moment_ends_the_loop() -> None:
    """A handler that raises hangs in one of some hundred."""
    command = [sys.executable, "-c", BUSY, "0", "300"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "all ended\n"), done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_runs_is_cancelled_and_can_tidy_up(number: signal.Signals) -> None:
    interrupt_on(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tidied = []

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.01, kill_self, number)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            tidied.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_async(main())
    assert tidied == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_more_interrupts_end_what_ignores_that_it_is_cancelled() -> None:
    """The second one ends the loop, which then cancels what is left once more; the third one ends that."""
    interrupt_on(signal.SIGTERM)

    async def stubborn() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, kill_self, signal.SIGTERM)
        loop.call_later(0.05, kill_self, signal.SIGTERM)
        loop.call_later(0.1, kill_self, signal.SIGTERM)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                continue

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_async(stubborn())
    assert time.monotonic() - started < 30


def test_an_interrupt_that_is_swallowed_is_raised_at_the_end() -> None:
    interrupt_on(signal.SIGTERM)

    async def main() -> str:
        kill_self(signal.SIGTERM)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "ended as if nothing had happened"
        return "slept"

    with pytest.raises(KeyboardInterrupt):
        run_async(main())
    assert run_async(asyncio.sleep(0, "the next one runs")) == "the next one runs"


def test_results_errors_and_other_threads() -> None:
    async def fails(error: BaseException) -> None:
        raise error

    assert run_async(asyncio.sleep(0, 3)) == 3
    for error in (ValueError("broken"), asyncio.CancelledError()):  # not an interrupt: they reach the caller
        with pytest.raises(type(error)):
            run_async(fails(error))
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(run_async(asyncio.sleep(0, 5))))
    thread.start()
    thread.join()
    assert found == [5]
