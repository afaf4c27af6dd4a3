"""A multipart message that does not end: ZMQ keeps its parts without a limit, so its connection is cut."""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from server.transfer.auth import Guard, PeerKeys
from server.transfer.connections import CHECK_S, UNFINISHED_AT_MOST_NBYTES, Connections
from tests.nodes.support import FAST, NodeUnderTest, Pair, answer, expected, request
from tests.support.waiting import until

PART_NBYTES = 1 << 17
N_PARTS = 16 * UNFINISHED_AT_MOST_NBYTES // PART_NBYTES
"""What came before the last complete message was read does not count, so far more than the limit is sent."""
PART = b"\x03" + struct.pack(">Q", PART_NBYTES) + bytes(PART_NBYTES)
"""ZMTP 3: flags "more" and "long", the size, the body."""
CUT_S = 10.0


def hello(socket_type: bytes) -> bytes:
    """ZMTP 3.0 without a key: the greeting and the command READY."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(socket_type)) + socket_type
    return greeting + bytes([4, len(ready)]) + ready


async def send_without_end(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, socket_type: bytes, *, complete_first: bool = False
) -> int:
    """Bytes of a message whose last part never comes that went out before the other side cut the connection."""
    n_sent = 0
    try:
        writer.write(hello(socket_type))
        await reader.readexactly(64)
        await reader.readexactly((await reader.readexactly(2))[1])  # its READY: now messages may follow
        if complete_first:
            writer.write(b"\x00\x05hello")
        for _ in range(N_PARTS):
            writer.write(PART)
            await writer.drain()
            n_sent += len(PART)
        while await reader.read(1 << 16):
            pass
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()
    return n_sent


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def test_a_message_without_end_to_the_prefill_node_is_cut_and_its_memory_given_back(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    before = resident_nbytes()
    for complete_first in (False, True):
        reader, writer = await asyncio.open_connection("127.0.0.1", p.node.bootstrap_port)
        sending = asyncio.create_task(send_without_end(reader, writer, b"DEALER", complete_first=complete_first))
        assert await answer(d.node, request(20)) == expected(request(20)), "answered beside it"
        assert await asyncio.wait_for(sending, CUT_S) > PART_NBYTES
    await until(lambda: resident_nbytes() - before < UNFINISHED_AT_MOST_NBYTES / 2, CUT_S, "memory goes back")
    assert p.metric("pd_control_frames_dropped_total", reason="oversize") == 2
    assert d.metric("pd_fences_total") == 0, "the registered peer is not touched"


async def test_a_message_without_end_to_the_decode_node_is_cut(pair: Pair) -> None:
    """From whoever listens where the prefill node should."""
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        n_sent = await send_without_end(reader, writer, b"ROUTER")
        if n_sent > PART_NBYTES and not ended.done():
            ended.set_result(n_sent)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        p = await pair.prefill()
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        d = await pair.decode(p, address, deadlines=replace(FAST, register_s=60.0), wait=False)
        await asyncio.wait_for(ended, CUT_S)
        await until(lambda: registered(d) == 1)
        assert await answer(d.node, request(20)) == expected(request(20))
        await pair.stop(d)


def registered(d: NodeUnderTest) -> int:
    return sum(peer["state"] == "registered" for peer in d.node.server_info()["peers"])


@pytest.mark.parametrize("guard", [Guard(), Guard(PeerKeys.derive("a" * 32))], ids=["no key", "key"])
async def test_many_large_messages_that_end_are_no_reason_to_cut(pair: Pair, guard: Guard) -> None:
    p = await pair.prefill(guard=guard)
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    guard.secure_decode(dealer)
    dealer.connect(f"tcp://127.0.0.1:{p.node.bootstrap_port}")
    try:
        n, nbytes = 40, 2 << 20
        assert n * nbytes > UNFINISHED_AT_MOST_NBYTES
        for _ in range(n):
            await dealer.send(bytes(nbytes))
        await until(lambda: p.metric("pd_control_frames_dropped_total", reason="garbage") == n)
        (before,) = p.node.socket.connections
        await asyncio.sleep(4 * CHECK_S)  # long enough for a wrong cut: two checks
        assert p.node.socket.connections == (before,)
        assert p.metric("pd_control_frames_dropped_total", reason="oversize") == 0
    finally:
        dealer.close(0)
        context.term()


def test_a_number_that_is_something_elses_by_now_is_no_connection() -> None:
    one, other = socket.socketpair()
    with one, other:
        connections = Connections(8998)
        connections.opened(one.fileno())
        connections.heard(one.fileno(), b"peer")
        assert not connections.has(b"peer")
