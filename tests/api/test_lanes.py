from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Iterator
from functools import partial

import pytest

from server.api.lanes import Lane, LaneLimits
from server.failure import Failure, RequestFailed
from tests.api.harness import WITHIN_S, until_async


class Gate:
    """A call that says when it has begun, and ends when it is told to."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.open.wait(WITHIN_S)
        return "through"


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


def lane(max_waiting: int = 8, wait_s: float = WITHIN_S, run_s: float = WITHIN_S) -> Lane:
    return Lane("test", LaneLimits(max_waiting, wait_s, run_s))


async def occupied(lane: Lane, gate: Gate) -> asyncio.Task[str]:
    task = asyncio.create_task(lane.run(1, gate))
    await until_async(gate.begun.is_set)
    return task


async def result_of(work: Awaitable[object]) -> str:
    try:
        return str(await work)
    except RequestFailed as failure:
        return f"{failure.kind} {failure.code}"


async def test_smaller_jobs_go_first(gate: Gate) -> None:
    jobs = lane()
    done: list[int] = []
    first = await occupied(jobs, gate)
    waiting = [asyncio.create_task(jobs.run(size, partial(done.append, size))) for size in (5, 3, 9, 1)]
    await until_async(lambda: jobs.n_waiting == 4)
    gate.open.set()
    assert await first == "through"
    await asyncio.gather(*waiting)
    assert done == [1, 3, 5, 9]


async def test_a_client_that_has_had_more_waits_for_those_that_have_had_less(gate: Gate) -> None:
    """Whatever the sizes, which say little of what a grammar costs."""
    jobs = lane()
    done: list[str] = []
    first = asyncio.create_task(jobs.run(1, gate, client="busy"))
    await until_async(gate.begun.is_set)
    waiting = [
        asyncio.create_task(jobs.run(size, partial(done.append, f"{client} {size}"), client=client))
        for client, size in (("busy", 1), ("busy", 2), ("new", 9), ("other", 8), ("busy", 3))
    ]
    await until_async(lambda: jobs.n_waiting == 5)
    gate.open.set()
    await asyncio.gather(first, *waiting)
    assert done == ["other 8", "new 9", "busy 1", "busy 2", "busy 3"]


async def test_a_client_cannot_fill_the_queue_for_others(gate: Gate) -> None:
    jobs = lane(max_waiting=2)
    first = asyncio.create_task(jobs.run(1, gate, client="busy"))
    await until_async(gate.begun.is_set)
    waiting = [asyncio.create_task(result_of(jobs.run(size, str, client="busy"))) for size in (1, 2)]
    await until_async(lambda: jobs.n_waiting == 2)
    assert await result_of(jobs.run(1, str, client="busy")) == "unavailable overloaded"
    new = asyncio.create_task(jobs.run(9, lambda: "done", client="new"))
    assert await waiting[1] == "unavailable overloaded", "its place is the new one's"
    gate.open.set()
    assert (await first, await waiting[0], await new) == ("through", "", "done")
    assert jobs.n_waiting == 0


async def test_what_a_client_has_had_is_forgotten(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.api.lanes.FORGOTTEN", 1e9)
    jobs = lane()
    await jobs.run(1, lambda: None, client="busy")
    first = asyncio.create_task(jobs.run(1, gate, client="third"))
    await until_async(gate.begun.is_set)
    done: list[str] = []
    waiting = [
        asyncio.create_task(jobs.run(size, partial(done.append, client), client=client))
        for client, size in (("new", 2), ("busy", 1))
    ]
    await until_async(lambda: jobs.n_waiting == 2)
    gate.open.set()
    await asyncio.gather(first, *waiting)
    assert done == ["busy", "new"]


async def test_no_more_jobs_wait_than_may(gate: Gate) -> None:
    jobs = lane(max_waiting=2)
    tasks = [await occupied(jobs, gate), *(asyncio.create_task(jobs.run(1, str)) for _ in range(2))]
    await until_async(lambda: jobs.n_waiting == 2)
    assert await result_of(jobs.run(1, str)) == "unavailable overloaded"
    gate.open.set()
    await asyncio.gather(*tasks)
    assert await jobs.run(1, lambda: "again") == "again"


async def test_a_turn_that_does_not_come_is_a_503(gate: Gate) -> None:
    jobs = lane(wait_s=0.05)
    first = await occupied(jobs, gate)
    assert await result_of(jobs.run(1, str)) == "unavailable overloaded"
    assert jobs.n_waiting == 0
    gate.open.set()
    await first


async def test_a_job_that_takes_too_long_is_given_up_with_a_504(gate: Gate) -> None:
    jobs, given_up = lane(run_s=0.05), []
    assert await result_of(jobs.run(1, gate, lambda: given_up.append(True))) == "deadline deadline"
    assert given_up == [True]
    gate.open.set()


async def test_a_caller_that_goes_away_takes_its_job_out_of_the_queue(gate: Gate) -> None:
    jobs = lane()
    done: list[int] = []
    first = await occupied(jobs, gate)
    gone, stays = (asyncio.create_task(jobs.run(i, partial(done.append, i))) for i in (1, 2))
    await until_async(lambda: jobs.n_waiting == 2)
    gone.cancel()
    await until_async(lambda: jobs.n_waiting == 1)
    gate.open.set()
    await asyncio.gather(first, stays)
    assert done == [2]
    assert gone.cancelled()


async def test_a_caller_that_goes_away_while_its_job_runs_gives_it_up(gate: Gate) -> None:
    jobs = lane()
    first = asyncio.create_task(jobs.run(1, gate, gate.open.set))
    await until_async(gate.begun.is_set)
    next_one = asyncio.create_task(jobs.run(1, lambda: "next"))
    first.cancel()
    assert await next_one == "next"
    assert gate.open.is_set(), "it was given up"


async def done_in(jobs: Lane, size: int) -> str:
    return await result_of(jobs.run(size, lambda: "done"))


@pytest.mark.parametrize("seed", range(20))
async def test_the_lane_is_free_after_any_mixture_of_cancellations(seed: int) -> None:
    rng, jobs = random.Random(seed), lane(max_waiting=4)
    tasks = []
    for _ in range(20):
        tasks.append(asyncio.create_task(done_in(jobs, rng.randrange(5))))
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        if rng.random() < 0.5:
            rng.choice(tasks).cancel()
    async with asyncio.timeout(WITHIN_S):
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await jobs.run(1, lambda: "free") == "free"
    assert jobs.n_waiting == 0


async def test_a_job_that_cannot_be_ended_costs_those_behind_it_their_wait_and_not_their_time_to_run(
    gate: Gate,
) -> None:
    jobs = lane(run_s=0.05)
    assert await result_of(jobs.run(1, gate)) == "deadline deadline"
    behind = asyncio.create_task(done_in(jobs, 1))
    await until_async(lambda: jobs.n_waiting == 1)
    await asyncio.sleep(0.2)
    assert not behind.done()
    gate.open.set()
    assert await behind == "done"


async def test_a_job_that_fails_is_not_given_up() -> None:
    jobs, given_up = lane(), []

    def fail() -> None:
        raise RequestFailed(Failure("invalid_text", "a lone surrogate"))

    assert await result_of(jobs.run(1, fail, lambda: given_up.append(True))) == "request invalid_text"
    assert given_up == []
