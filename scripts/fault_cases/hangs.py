"""Hangs, leaks and misleading errors, as they happened elsewhere, staged here. Each play returns what fired."""

from __future__ import annotations

import asyncio
import pickle
import random
import signal
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import zmq
from cluster.asking import End, Outcome
from hostile.rogue_peer import rogue_peer, silent_port

from fault_cases.reports import Seen, staged
from fault_cases.stage import Stage, expect, question
from server.transfer.addresses import split_address
from server.transfer.frames import seal

LONG = 700
TRIES = 5
"""For what has to be caught while it lasts."""
KNOWN_S = 20.0
"""A dead or frozen peer is known within this time: it may be silent for 3.5 s."""


@staged(
    ("sgl-28651",),
    happened="prefill aborts, decode gets no message and waits 300 s",
    here="the other side gets a message at once, and again until it has answered",
    tests=("tests/nodes/test_failures.py",),
)
async def prefill_gives_up(stage: Stage) -> Seen:
    """P fails a room, and the message that says so is lost once."""
    stage.arm(prefill=["fail-writes:swa:1", "drop-message:Failed:1"])
    outcome = await stage.ask(question(100, 20))
    expect(outcome.status == 502 and outcome.error.get("component") == "swa", f"no message: {outcome}")
    expect(outcome.error.get("code") == "transfer_failed", f"known by a deadline, not by a message: {outcome}")
    return [f"the decode node knows after {outcome.seconds:.2f} s, though the first Failed was lost: HTTP 502, swa"]


@staged(
    ("sgl-27162", "sgl-33043"),
    happened="one exception ends a worker or the bootstrap thread; everything after it hangs",
    here="frames that cannot be handled are dropped and counted, an exception fails its room alone",
    tests=("tests/nodes/test_failures.py",),
)
async def exceptions_in_workers(stage: Stage) -> Seen:
    """Frames with a wrong byte, in both directions, at every step of a room."""
    seen = []
    for role, message in (
        ("prefill", "Reserved"),
        ("prefill", "Done"),
        ("decode", "Reserve"),
        ("decode", "Committed"),
        ("decode", "Ping"),
    ):
        before = _dropped(stage)
        stage.arm(**{role: [f"corrupt-message:{message}:1"]})
        await stage.right(question(100, 21))
        await stage.wait(f"the corrupt {message} is dropped and counted", partial(_has_dropped, stage, before + 1))
        stage.arm()
        await stage.right(question(100, 22))
        seen.append(f"a corrupt {message}: dropped, counted and sent again, the answer is right")
    return seen


@staged(
    ("sgl-31800",),
    happened="no deadline while transferring; slots leak",
    here="every phase has a deadline",
)
async def deadline_while_transferring(stage: Stage) -> Seen:
    """Writes that do not begin for 120 s; the transfer's deadline is 12 s."""
    stage.arm(prefill=["delay-writes:120:1"])
    outcome = await stage.ask(question(100, 23))
    expect(outcome.end is End.REFUSED and outcome.seconds < 60, f"no deadline: {outcome} after {outcome.seconds:.1f} s")
    seconds = await stage.free_again()
    return [f"HTTP {outcome.status} {outcome.error['message']!r}; all memory free {seconds:.1f} s later"]


@staged(
    ("sgl-13054", "sgl-35823"),
    happened="a restarted peer stays blacklisted for ever",
    here="the next request after the restart works",
    tests=("tests/e2e/test_processes.py", "tests/nodes/test_mooncake_traps.py"),
)
async def restarted_peer(stage: Stage) -> Seen:
    """P kills itself in the middle of a prompt and comes back on the same ports."""
    stage.arm(prefill=["kill:transfer"])
    outcome = await stage.ask(question(LONG, 24))
    stage.arm()
    expect(outcome.error.get("code") == "peer_lost", f"expected peer_lost: {outcome}")
    seconds = await stage.restart_prefill()
    return [
        f"HTTP {outcome.status} peer_lost after {outcome.seconds:.1f} s; served again {seconds:.1f} s after its start"
    ]


@staged(
    ("sgl-40125",),
    happened="the same room twice crashes both processes",
    here="the second one is refused with 409",
    tests=("tests/nodes/test_routed_rooms.py",),
)
async def same_room_twice(stage: Stage) -> Seen:
    host, port = split_address(stage.prefill.address)
    room: dict[str, Any] = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": 77}
    asked = question(30, 25, **room)
    two = [asyncio.create_task(stage.ask(asked)) for _ in range(2)]  # nobody gives P its half: one of them waits
    done, waiting = await asyncio.wait(two, return_when=asyncio.FIRST_COMPLETED)
    for one in waiting:
        one.cancel()
    await asyncio.wait(two)
    second = done.pop().result()
    expect(second.status == 409 and bool(waiting), f"expected one HTTP 409: {second}")
    await stage.free_again()
    await stage.right(question(30, 26))
    return [f"HTTP 409 {second.error['code']} in {second.seconds:.2f} s; both nodes go on"]


@staged(
    ("sgl-26486",),
    happened="n > 1 shares one room",
    here="a room for each sample",
)
async def a_room_a_sample(stage: Stage) -> Seen:
    before = _committed(stage)
    await stage.right(question(40, 27, n=3, temperature=0.8, seed=5))
    await stage.wait("three rooms are committed for three samples", lambda: _committed(stage) == before + 3)
    return ["n = 3: three rooms, every sample as by one process"]


@staged(
    ("tks-1427",),
    happened="a deadline measured the peer's queue: healthy requests failed",
    here="deadlines count from the last sign of life",
)
async def deadline_of_a_queue(stage: Stage) -> Seen:
    """A queue of 7 s before P's two slots; D gives up what it hears nothing of for 4 s."""
    stage.arm(prefill=["delay-writes:1.4"])
    asked = [question(30 + i, 28, max_tokens=2) for i in range(10)]
    started = time.monotonic()
    outcomes = await asyncio.gather(*(stage.ask(one) for one in asked))
    seconds = time.monotonic() - started
    for one, outcome in zip(asked, outcomes, strict=True):
        await stage.compare(one, outcome)
    expect(seconds > 5.0, f"the queue was over in {seconds:.1f} s: this run shows nothing")
    return [f"ten rooms queued for up to {seconds:.1f} s with a silence deadline of 4 s: all answered"]


@staged(
    ("llmd-2427", "tt-3988"),
    happened="no prefill ready: decode computes alone, silently; even the PD tests never used prefill",
    here="503; every answer names its prefill node, and tests look",
    tests=("tests/e2e/test_refusals.py",),
)
async def no_prefill(stage: Stage) -> Seen:
    stage.prefill.kill()
    known_s = await stage.wait("the loss is known", lambda: not stage.decode.is_ok("/ready"), KNOWN_S)
    outcome = await stage.ask(question(20, 29))
    expect(outcome.status == 503 and outcome.error.get("code") == "no_prefill", f"expected no_prefill: {outcome}")
    await stage.restart_prefill()
    answered = await stage.right(question(20, 29))
    return [
        f"known after {known_s:.1f} s; HTTP 503 no_prefill in {outcome.seconds:.2f} s",
        f"after the restart x-pd-prefill is {answered.prefill}",
    ]


@staged(
    ("trt-12542", "trt-16402"),
    happened="wedged while /health said 200",
    here="/ready makes a real transfer",
    tests=("tests/e2e/test_processes.py",),
)
async def ready_is_a_transfer(stage: Stage) -> Seen:
    """P is frozen: its process and its ports are there."""
    stage.prefill.freeze()
    try:
        seconds = await stage.wait("/ready says no", lambda: not stage.decode.is_ok("/ready"), KNOWN_S)
        expect(await asyncio.to_thread(stage.decode.is_ok, "/health"), "/health of the decode node says no")
        said = (await asyncio.to_thread(stage.decode.http.get, "/ready")).json()["error"]["message"]
    finally:
        stage.prefill.thaw()
    return [f"/ready is 503 after {seconds:.1f} s: {said}"]


@staged(
    ("trt-12313",),
    happened="cancelled requests leak blocks",
    here="free counts return to the start after aborts in every phase",
    tests=("tests/e2e/test_aborts.py",),
)
async def cancels(stage: Stage) -> Seen:
    """Forty clients go away at random moments."""
    rng = random.Random(30)

    async def one(seed: int) -> Outcome:
        await asyncio.sleep(rng.uniform(0, 3))
        asked = question(rng.randrange(1, LONG), seed, max_tokens=200)
        return await stage.ask(asked, stream=rng.random() < 0.5, abort_s=rng.uniform(0, 1.5))

    outcomes = await asyncio.gather(*(one(seed) for seed in range(40)))
    n_aborted = sum(outcome.end is End.ABORTED for outcome in outcomes)
    seconds = await stage.free_again()
    await stage.right(question(LONG, 31))
    return [f"{n_aborted} aborts: every slot and page of both nodes free after {seconds:.1f} s"]


@staged(
    ("dyn-4917",),
    happened="SIGTERM on prefill drops transfers in flight",
    here="drain, then exit code 0",
)
async def drain(stage: Stage) -> Seen:
    """SIGTERM for P while a transfer is held back."""
    asked = question(LONG, 32)
    for _ in range(TRIES):
        stage.arm(prefill=["delay-writes:5:1"])
        asking = asyncio.create_task(stage.ask(asked))
        if await stage.seen(lambda: stage.prefill.counts("slots")["reserved"] == 1, asking):
            break
    stage.prefill.signal(signal.SIGTERM)
    code = await asyncio.to_thread(stage.prefill.wait_ended, 60.0)
    await stage.compare(asked, await asking)
    expect(code == 0, f"P ended with {code}")
    await stage.restart_prefill()
    return ["the transfer under way ends, the answer is right, the exit code is 0"]


@staged(
    ("sgl-19900",),
    happened="an unreachable peer froze decode",
    here="other requests go on",
)
async def unreachable_peer(stage: Stage) -> Seen:
    """D has a second prefill node that never answers; P is given a decode node whose Mooncake port never answers."""
    peers = (await asyncio.to_thread(stage.decode.info))["peers"]
    others = [peer["state"] for peer in peers if peer["address"] != stage.prefill.address]
    expect(others != ["registered"], "the peer that never answers is registered")
    async with silent_port() as silent, rogue_peer(stage.prefill, silent) as rogue:
        ids = rogue.reserve(list(range(10, 60)))
        await asyncio.gather(*(stage.right(question(40 + i, 33)) for i in range(4)))
        failed = await rogue.refusal(ids, 60.0)
    expect(failed.code == "transfer_failed", f"the room of the silent node failed with {failed.code}")
    return [f"four requests beside them are right; the silent node's room: {failed.reason}"]


@staged(
    ("sgl-7338",),
    happened="'might be dead' where the cause was elsewhere",
    here="the reason is the cause, with the values",
)
async def reason_is_the_cause(stage: Stage) -> Seen:
    stage.arm(prefill=["miscount:swa:1"])
    outcome = await stage.ask(question(100, 34))
    said = str(outcome.error.get("message"))
    expect("swa" in said and "bytes" in said and "dead" not in said, f"not the cause: {said}")
    return [f"HTTP {outcome.status}: {said}"]


class _Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self.path, "w"))


@staged(
    ("CVE-2025-32444",),
    happened="pickle on a ZMQ port runs a stranger's code (and four more like it)",
    here="typed, size-capped messages; nothing is unpickled; frames of strangers are dropped and counted",
    tests=("tests/transfer/test_protocol.py",),
)
async def pickle_on_the_port(stage: Stage) -> Seen:
    """A pickle that runs code, bare, behind the protocol's head, and as several frames; then a huge frame."""
    before = _dropped(stage)
    with tempfile.TemporaryDirectory() as directory, zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        trap = Path(directory) / "sprung"
        payload = pickle.dumps(_Trap(str(trap)))
        dealer.setsockopt(zmq.LINGER, 1000)
        dealer.connect(f"tcp://{stage.prefill.address}")
        for frames in ([payload], [b"PD\x01" + payload], [seal(payload)], [payload, payload]):
            dealer.send_multipart(frames)
        await stage.wait("four frames are dropped and counted", partial(_has_dropped, stage, before + 4))
        dealer.send(b"\0" * (9 << 20))  # over the cap: the connection ends, nothing else
        expect(not trap.exists(), "the pickle was run")
    await stage.right(question(30, 35))
    return ["four frames dropped and counted, nothing unpickled, a frame of 9 MiB not read; the pair goes on"]


def _dropped(stage: Stage) -> int:
    """Frames that both nodes have dropped. A frame is sent when its time has come, and counted after that."""
    return stage.nodes.totals("pd_control_frames_dropped_total").total()


def _has_dropped(stage: Stage, least: int) -> bool:
    return _dropped(stage) >= least


def _committed(stage: Stage) -> float:
    return stage.decode.samples("pd_rooms_total").get(("committed", ""), 0.0)
