"""ZMQ sockets of the control connection: frames are read without starving other tasks, and sent without waiting."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator

import zmq
import zmq.asyncio

log = logging.getLogger(__name__)

FRAMES_A_TURN = 32


async def frames_of(socket: zmq.asyncio.Socket) -> AsyncIterator[tuple[list[bytes], int]]:
    """Every message of a socket with the file descriptor it came from, for ever. Other tasks get their turn however
    fast a peer sends.

    ``recv_multipart`` does not return to the event loop while there are messages.
    """
    for n_received in itertools.count(1):
        frames = await socket.recv_multipart(copy=False)
        yield [frame.bytes for frame in frames], _source_of(frames[-1])
        if n_received % FRAMES_A_TURN == 0:
            await asyncio.sleep(0)


def _source_of(frame: zmq.Frame) -> int:
    """The file descriptor of its connection, or -1."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def post(socket: zmq.asyncio.Socket, frames: list[bytes]) -> None:
    """Sends without waiting; what cannot be queued now is lost, and the protocol sends it again."""
    sending: asyncio.Future[object] = asyncio.ensure_future(socket.send_multipart(frames, flags=zmq.NOBLOCK))
    sending.add_done_callback(_ignore_loss)


def _ignore_loss(sent: asyncio.Future[object]) -> None:
    if not sent.cancelled() and sent.exception() is not None:
        log.debug("a control message was lost: %s", sent.exception())
