"""What is done to the nodes of a soak run, each disturbance by its kind."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import subprocess
from typing import Any

import numpy as np
from cluster import HOST, Node, until_async
from cluster.oracle import OracleCluster
from cluster.relay import ControlRelay
from hostile import http_clients
from hostile.garbage import send_broken, send_frames
from hostile.rogue_peer import RogueFailed, rogue_peer, silent_port

from server.cache.layout import PROBE_NBYTES
from server.faults.spec import DECODE, MESSAGE_TYPES, MESSAGES, PREFILL
from server.transfer.engines.mooncake import describe_segment
from soaking.plan import EPISODE_S, HOSTILE, Event, Kind

TERMINATE_S = 60.0
"""For an orderly end, the running answers included."""
ROGUE_S = 30.0
FLOOD_PIECES = 3000
FLOOD_PIECE_NBYTES = 64


async def disturb(event: Event, nodes: OracleCluster) -> str | None:
    """Does ``event`` to its target; the clock has reached ``event.at_s``. What went wrong with the target, or None."""
    node = nodes.node(event.target)
    rng = random.Random(event.seed)
    match event.kind:
        case Kind.KILL:
            node.kill()
            await asyncio.sleep(rng.uniform(0, 1.5))
            node.start()
        case Kind.TERMINATE:
            wrong = await asyncio.to_thread(_terminate, node)
            node.start()
            return wrong
        case Kind.FREEZE_SHORT | Kind.FREEZE_LONG:
            node.freeze()
            await asyncio.sleep(event.for_s)
            node.thaw()
        case Kind.ZMQ_GARBAGE:
            await asyncio.to_thread(send_frames, node.address, rng)
        case Kind.HTTP_GARBAGE:
            await asyncio.to_thread(send_broken, node.url, rng.randint(5, 30), rng)
        case Kind.FAILED_WRITES:
            node.arm(*rng.choice(_WRITES))
        case Kind.LOST_MESSAGES:
            node.arm(*_message_faults(PREFILL if node in nodes.prefills else DECODE, rng))
        case Kind.FLOOD:
            return await _flood(nodes)
        case Kind.FLUSH:
            flushed = await asyncio.to_thread(node.http.post, "/flush_cache")
            return None if flushed.is_success else f"{node.name} answered {flushed.status_code} to /flush_cache"
        case kind if kind in HOSTILE:
            seconds = rng.uniform(1.0, EPISODE_S)
            treated = await asyncio.to_thread(http_clients.run, HOSTILE[kind], node.url, event.seed, seconds)
            errors = http_clients.server_errors(treated)
            return f"a hostile client of {node.name} got {errors[0]}" if errors else None
        case Kind.LATE_MESSAGES:
            await _late_messages(nodes.relay(node.name), rng)
        case Kind.BAD_ADDRESS | Kind.VANISHING_PEER | Kind.SILENT_PEER:
            return await _rogue(event.kind, node, rng)
    return None


def _terminate(node: Node) -> str | None:
    """SIGTERM, and an orderly end; what was wrong with it."""
    node.signal(signal.SIGTERM)
    try:
        code = node.wait_ended(TERMINATE_S)
    except subprocess.TimeoutExpired:
        node.kill()
        return f"{node.name} did not end within {TERMINATE_S:g} s after SIGTERM"
    return f"{node.name} ended with {code} after SIGTERM" if code else None


_WRITES = (["fail-writes:1"], ["fail-writes:swa:1"], ["late-writes:0.5:1"], ["delay-writes:1.5:2"], ["late-writes:2:2"])


def _message_faults(role: str, rng: random.Random) -> list[str]:
    """A few messages of random types. Of the pings only one: three in a row are a lost peer."""
    kinds = sorted(MESSAGES)
    faults = []
    for name in rng.sample(MESSAGE_TYPES[role], 4):
        count = 1 if name in ("Ping", "Pong") else rng.randint(1, 3)
        faults.append(f"{rng.choice(kinds)}:{name}:{count}")
    return faults


async def _rogue(kind: Kind, prefill: Node, rng: random.Random) -> str | None:
    prompt = [10 + rng.randrange(400) for _ in range(rng.randint(1, 600))]
    try:
        async with contextlib.AsyncExitStack() as stack:
            session = await stack.enter_async_context(silent_port()) if kind is Kind.SILENT_PEER else ""
            peer = await stack.enter_async_context(rogue_peer(prefill, session, timeout_s=ROGUE_S))
            ids = peer.reserve(prompt, room=rng.randrange(2**62))
            if kind is Kind.VANISHING_PEER:
                await asyncio.sleep(rng.uniform(0, 0.3))
                return None
            failed = await peer.refusal(ids, ROGUE_S)
            return (
                None
                if failed.code == "transfer_failed"
                else f"a rogue's room failed with {failed.code}: {failed.reason}"
            )
    except RogueFailed as error:
        return f"{kind} at {prefill.name}: {error}"


_MAY_BE_LATE = ("Abort", "Committed", "Rejected", "Reserved", "Done", "Failed", "Quiesced")
_HELD_S, _ANEW_S = 3.0, 30.0


async def _late_messages(relay: ControlRelay, rng: random.Random) -> None:
    """Holds messages back until the nodes have registered anew, and sends them then, with an old ``Register``."""
    relay.hold = {"Reserve", *rng.sample(_MAY_BE_LATE, 2)}
    n_before = relay.n_registrations
    with contextlib.suppress(TimeoutError):
        await until_async(lambda: relay.held, _HELD_S, "a message is held")
    relay.lose = {"Pong", "Progress", "ProbeDone", "Abort"}
    with contextlib.suppress(TimeoutError):
        await until_async(lambda: relay.n_registrations > n_before, _ANEW_S, "another registration")
    relay.lose = frozenset()
    await asyncio.sleep(rng.uniform(0, 1.5))
    relay.release()
    if rng.random() < 0.5:
        relay.send(rng.choice(relay.registers[:-1] or relay.registers))


async def _flood(nodes: OracleCluster) -> str | None:
    """One batch of more pieces than Mooncake queues, written by a stranger into D's probe region: it reports a failure
    and goes on writing. Only probes live there, and they must notice or not be hit.
    """
    sessions = [peer["session"] for node in nodes.prefills for peer in (await asyncio.to_thread(node.info))["peers"]]
    if not sessions:
        return "no decode node is registered"
    await asyncio.to_thread(_write_batch, sessions[0])
    return None


def _write_batch(session: str) -> None:
    from mooncake.engine import TransferEngine  # after server.transfer has set its log level

    (base, _), *_ = describe_segment(session, 5.0).regions
    source = np.zeros(FLOOD_PIECE_NBYTES, np.uint8)
    targets = [base + i * FLOOD_PIECE_NBYTES % PROBE_NBYTES for i in range(FLOOD_PIECES)]
    engine: Any = TransferEngine()
    engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "")
    engine.register_memory(source.ctypes.data, source.nbytes)
    sources, sizes = [source.ctypes.data] * FLOOD_PIECES, [FLOOD_PIECE_NBYTES] * FLOOD_PIECES
    engine.batch_transfer_sync_write(session, sources, targets, sizes)
    engine.transfer_sync_write(session, source.ctypes.data, base, FLOOD_PIECE_NBYTES)  # behind the batch's stragglers
