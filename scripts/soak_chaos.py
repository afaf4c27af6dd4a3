"""What is done to the nodes of a soak run, each disturbance by its kind."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Callable
from typing import Any

import hostile_clients
import numpy as np
import zmq
from control_relay import ControlRelay, To
from quickstart import HOST
from rogue_peer import RogueFailed, deaf_port, rogue_peer
from soak_nodes import Field, until
from soak_plan import EPISODE_S, HOSTILE, Event, Kind

from server.cache.layout import PROBE_NBYTES
from server.faults.spec import DECODE, MESSAGE_TYPES, MESSAGES, PREFILL
from server.transfer.engines.mooncake import describe_segment
from server.transfer.protocol import HEADER_NBYTES, Ping, encode, seal

TERMINATE_S = 60.0
"""For an orderly end, the running answers included."""
ROGUE_S = 30.0
FLOOD_PIECES = 3000
FLOOD_PIECE_NBYTES = 64


async def disturb(event: Event, field: Field) -> str | None:
    """Does ``event`` to its target; the clock has reached ``event.at_s``. What went wrong with the target, or None."""
    node = field.node(event.target)
    rng = random.Random(event.seed)
    match event.kind:
        case Kind.KILL:
            node.kill()
            await asyncio.sleep(rng.uniform(0, 1.5))
            node.start()
        case Kind.TERMINATE:
            code = await node.terminate(TERMINATE_S)
            node.start()
            return (
                None
                if code == 0
                else f"{node.name} ended with {code} after SIGTERM (None: not within {TERMINATE_S:g} s)"
            )
        case Kind.FREEZE_SHORT | Kind.FREEZE_LONG:
            node.freeze()
            await asyncio.sleep(event.for_s)
            node.thaw()
        case Kind.ZMQ_GARBAGE:
            await asyncio.to_thread(_zmq_garbage, field.bootstrap(node.name), rng)
        case Kind.HTTP_GARBAGE:
            await asyncio.to_thread(_http_garbage, node.url.removeprefix("http://"), rng)
        case Kind.FAILED_WRITES:
            node.arm(*rng.choice(_WRITES))
        case Kind.LOST_MESSAGES:
            node.arm(*_message_faults(PREFILL if node in field.prefills else DECODE, rng))
        case Kind.FLOOD:
            return await _flood(field)
        case kind if kind in HOSTILE:
            seconds = rng.uniform(1.0, EPISODE_S)
            treated = await asyncio.to_thread(hostile_clients.run, HOSTILE[kind], node.url, event.seed, seconds)
            wrong = [how for how in treated if how.startswith("HTTP 5") and how != "HTTP 503"]
            return f"a hostile client of {node.name} got {wrong[0]}" if wrong else None
        case Kind.LATE_MESSAGES:
            await _late_messages(field.relay(node.name), rng)
        case Kind.BAD_ADDRESS | Kind.VANISHING_PEER | Kind.SILENT_PEER:
            return await _rogue(event.kind, field.bootstrap(node.name), rng)
    return None


_WRITES = (["fail-writes:1"], ["fail-writes:swa:1"], ["late-writes:0.5:1"], ["delay-writes:1.5:2"], ["late-writes:2:2"])


def _message_faults(role: str, rng: random.Random) -> list[str]:
    """A few messages of random types. Of the pings only one: three in a row are a lost peer."""
    kinds = sorted(MESSAGES)
    faults = []
    for name in rng.sample(MESSAGE_TYPES[role], 4):
        count = 1 if name in ("Ping", "Pong") else rng.randint(1, 3)
        faults.append(f"{rng.choice(kinds)}:{name}:{count}")
    return faults


async def _rogue(kind: Kind, bootstrap: str, rng: random.Random) -> str | None:
    prompt = [10 + rng.randrange(400) for _ in range(rng.randint(1, 600))]
    try:
        async with contextlib.AsyncExitStack() as stack:
            session = await stack.enter_async_context(deaf_port()) if kind is Kind.SILENT_PEER else ""
            peer = await stack.enter_async_context(rogue_peer(bootstrap, session, timeout_s=ROGUE_S))
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
        return f"{kind} at {bootstrap}: {error}"


_MAY_BE_LATE = ("Abort", "Committed", "Rejected", "Reserved", "Done", "Failed", "Quiesced")
_HELD_S, _ANEW_S = 3.0, 30.0


async def _late_messages(relay: ControlRelay, rng: random.Random) -> None:
    """Holds messages back until the nodes have registered anew, and sends them then, with an old ``Register``."""
    relay.hold = frozenset({"Reserve", *rng.sample(_MAY_BE_LATE, 2)})
    n_before = relay.n_registrations
    await until(lambda: _missing(bool(relay.held)), _HELD_S)
    relay.lose = frozenset({"Pong", "Progress", "ProbeDone", "Abort"})
    await until(lambda: _missing(relay.n_registrations > n_before), _ANEW_S)
    relay.lose = frozenset()
    await asyncio.sleep(rng.uniform(0, 1.5))
    relay.release()
    if rng.random() < 0.5:
        relay.send(To.PREFILL, rng.choice(relay.registers[:-1] or relay.registers))


async def _missing(is_so: bool) -> str:
    return "" if is_so else "missing"


async def _flood(field: Field) -> str | None:
    """One batch of more pieces than Mooncake queues, written by a stranger into D's probe region: it reports a failure
    and goes on writing. Only probes live there, and they must notice or not be hit.
    """
    sessions = [peer["session"] for node in field.prefills for peer in (await node.info())["peers"]]
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


# --- garbage ----------------------------------------------------------------------------------------------------------


def _zmq_garbage(address: str, rng: random.Random) -> None:
    host, port = address.rsplit(":", 1)
    for _ in range(rng.randint(1, 8)):  # not even ZMQ
        _shout((host, int(port)), rng.randbytes(rng.randint(1, 4000)))
    frame = encode(Ping(f"{rng.getrandbits(128):032x}", 1))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 1000)
        dealer.connect(f"tcp://{address}")
        for _ in range(rng.randint(100, 1000)):
            dealer.send_multipart(rng.choice(_FRAMES)(rng, frame))


_FRAMES: tuple[Callable[[random.Random, bytes], list[bytes]], ...] = (
    lambda rng, frame: [rng.randbytes(rng.randint(0, 300))],
    lambda rng, frame: [frame[: rng.randrange(len(frame))]],
    lambda rng, frame: [seal(rng.randbytes(rng.randint(0, 300)))],
    lambda rng, frame: [_flip(rng, frame)],
    lambda rng, frame: [seal(_flip(rng, frame[HEADER_NBYTES:]))],
    lambda rng, frame: [frame[:2] + rng.randbytes(1) + frame[3:]],
    lambda rng, frame: [frame] * rng.randint(2, 5),
    lambda rng, frame: [frame],
)


def _flip(rng: random.Random, frame: bytes) -> bytes:
    data = bytearray(frame)
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _http_garbage(address: str, rng: random.Random) -> None:
    host, port = address.rsplit(":", 1)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    shouts = (
        rng.randbytes(rng.randint(1, 4000)),
        head[: rng.randrange(len(head))],
        head + b"Content-Length: 100\r\n\r\n{",
        head + b"Content-Length: 99999999999\r\n\r\n" + rng.randbytes(1000),
        head + b"Content-Length: 7\r\n\r\n[[[[[[[",
        head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + rng.randbytes(100),
        head + b"X: " + b"a" * 100_000,
        b"BREW /coffee HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /" + rng.randbytes(50) + b" HTTP/9.9\r\n\r\n",
    )
    for _ in range(rng.randint(5, 30)):
        _shout((host, int(port)), rng.choice(shouts))


def _shout(address: tuple[str, int], data: bytes) -> None:
    """Connects, says ``data`` and goes away, whatever the other side thinks of it."""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=5.0) as connection:
        connection.sendall(data)
