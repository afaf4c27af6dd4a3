"""A wire between decode nodes and a prefill node that keeps, loses and repeats control messages."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from server.transfer.protocol import Pong, decode


@dataclass(frozen=True)
class Passed:
    """A frame that a decode node has sent over ``connection``. ``kind`` is its message's type."""

    connection: bytes
    kind: str
    frame: bytes


@dataclass
class Relay:
    """Decode nodes connect to ``address`` as if it were the prefill node.

    What decode nodes send is passed on, but messages of a kind in ``lose`` are lost and those of one in ``keep`` are
    ``kept``; all are in ``seen``. What the prefill node sends is passed on or lost, and counted in ``answers`` by
    its kind, without a ``Pong`` that says that a registration is over.
    """

    address: str
    seen: list[Passed] = field(default_factory=list)
    kept: list[Passed] = field(default_factory=list)
    keep: set[str] = field(default_factory=set)
    lose: set[str] = field(default_factory=set)
    answers: Counter[str] = field(default_factory=Counter)
    backs: dict[bytes, zmq.asyncio.Socket] = field(default_factory=dict)

    async def pass_on(self, passed: Passed) -> None:
        """Sends to the prefill node, now, what was kept, or once more what was seen."""
        await self.backs[passed.connection].send(passed.frame)

    async def take(self, passed: Passed) -> None:
        self.seen.append(passed)
        if passed.kind in self.keep:
            self.kept.append(passed)
        elif passed.kind not in self.lose:
            await self.pass_on(passed)


@asynccontextmanager
async def relay(bootstrap_port: int) -> AsyncIterator[Relay]:
    """In front of the prefill node at ``bootstrap_port``, also of the next one there."""
    context = zmq.asyncio.Context()
    front = context.socket(zmq.ROUTER)
    front.setsockopt(zmq.ROUTER_HANDOVER, 1)
    port = front.bind_to_random_port("tcp://127.0.0.1")
    wire = Relay(f"127.0.0.1:{port}")
    tasks: list[asyncio.Task[None]] = []

    def back_of(connection: bytes) -> zmq.asyncio.Socket:
        if connection not in wire.backs:
            back = context.socket(zmq.DEALER)
            back.setsockopt(zmq.ROUTING_ID, connection)
            back.setsockopt(zmq.RECONNECT_IVL, 20)
            back.connect(f"tcp://127.0.0.1:{bootstrap_port}")
            wire.backs[connection] = back
            tasks.append(asyncio.create_task(downwards(connection, back)))
        return wire.backs[connection]

    async def upwards() -> None:
        while True:
            connection, frame = await front.recv_multipart()
            back_of(connection)
            await wire.take(Passed(connection, type(decode(frame)).__name__, frame))

    async def downwards(connection: bytes, back: zmq.asyncio.Socket) -> None:
        while True:
            frame = await back.recv()
            message = decode(frame)
            if not isinstance(message, Pong) or message.registered:
                wire.answers[type(message).__name__] += 1
            if type(message).__name__ not in wire.lose:
                await front.send_multipart([connection, frame])

    tasks.append(asyncio.create_task(upwards()))
    try:
        yield wire
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for socket in (front, *wire.backs.values()):
            socket.close(0)
        context.term()
