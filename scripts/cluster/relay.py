"""A relay on the control connection between a decode and a prefill node, which can hold messages back and repeat them.

The network may do all of this to a connection that breaks and comes back; a relay does it on demand.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

from cluster.ports import HOST
from server.transfer.addresses import split_address
from server.transfer.frames import ProtocolError, decode
from server.transfer.protocol import Pong, Registered

_GREETING_NBYTES = 64
_LONG, _COMMAND = 0x02, 0x04
"""Flags of a ZMTP frame: eight bytes of length instead of one; not a message, but ZMQ's own."""
_MAX_SEEN = 10_000


class To(enum.Enum):
    """Which way a message goes."""

    PREFILL = "to prefill"
    DECODE = "to decode"


@dataclass(frozen=True)
class Passed:
    """A message of the type ``kind``, as the ZMTP frame that it is on the wire."""

    to: To
    kind: str
    frame: bytes


class ControlRelay:
    """Relays between one decode node, which connects to :attr:`address`, and the prefill node at ``target``.

    ``hold`` and ``lose`` are types of messages, in either direction; ``held`` are those held back, in their order. What
    is held outlives its connection: it is sent over the one there is then, or the next one. Without a key only.
    """

    def __init__(self, target: str) -> None:
        self.hold: Collection[str] = frozenset()
        self.lose: Collection[str] = frozenset()
        self.held: list[Passed] = []
        self.seen: deque[Passed] = deque(maxlen=_MAX_SEEN)
        """What the decode node has sent lately, also what was held back or lost."""
        self.registers: list[Passed] = []
        """Every different ``Register`` that it has sent."""
        self.answers: Counter[str] = Counter()
        """What the prefill nodes have sent, by type, without a ``Pong`` that says that a registration is over."""
        self._granted: set[tuple[str, int]] = set()
        self._target = split_address(target)
        self._writers: dict[To, asyncio.StreamWriter] = {}
        self._waiting: dict[To, list[bytes]] = {to: [] for to in To}
        self._server: asyncio.Server | None = None

    @property
    def n_registrations(self) -> int:
        """Registrations that the prefill nodes have granted."""
        return len(self._granted)

    @property
    def connected(self) -> bool:
        return bool(self._writers) and not any(writer.is_closing() for writer in self._writers.values())

    @property
    def address(self) -> str:
        if self._server is None:
            raise RuntimeError("the relay is not started")
        return f"{HOST}:{self._server.sockets[0].getsockname()[1]}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, HOST, 0)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for writer in self._writers.values():
                writer.close()

    def release(self) -> int:
        """Sends what was held back; the number of messages. ``hold`` is empty afterwards."""
        self.hold = frozenset()
        held, self.held = self.held, []
        for passed in held:
            self.send(passed)
        return len(held)

    def send(self, passed: Passed) -> None:
        """Sends a message, now, between those of the connection; without one, first over the next connection."""
        if self.connected:
            self._writers[passed.to].write(passed.frame)
        else:
            self._waiting[passed.to].append(passed.frame)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        ways = [self._pass(To.PREFILL, reader, back, writer), self._pass(To.DECODE, there, writer, back)]
        try:
            _, pending = await asyncio.wait(map(asyncio.ensure_future, ways), return_when=asyncio.FIRST_COMPLETED)
            for way in pending:
                way.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        finally:
            for each in (writer, back):
                each.close()

    async def _pass(
        self, to: To, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: asyncio.StreamWriter
    ) -> None:
        """Everything that goes one way, until the connection ends."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            left = _GREETING_NBYTES
            while left and (data := await reader.read(left)):
                writer.write(data)
                left -= len(data)
            while True:
                head = await reader.readexactly(1)
                size = await reader.readexactly(8 if head[0] & _LONG else 1)
                content = await reader.readexactly(int.from_bytes(size, "big"))
                frame = head + size + content
                if not head[0] & _COMMAND:
                    self._connected(to, writer, answers)
                if head[0] & _COMMAND or self._passes(to, frame, content):
                    writer.write(frame)
                    await writer.drain()

    def _connected(self, to: To, writer: asyncio.StreamWriter, answers: asyncio.StreamWriter) -> None:
        """The connection of the last message is the one that there is; what waits for one goes first."""
        back = To.DECODE if to is To.PREFILL else To.PREFILL
        self._writers |= {to: writer, back: answers}
        for frame in self._waiting[to]:
            writer.write(frame)
        self._waiting[to].clear()

    def _passes(self, to: To, frame: bytes, content: bytes) -> bool:
        """Whether a message goes on now."""
        try:
            message = decode(content)
        except ProtocolError:
            return True
        passed = Passed(to, type(message).__name__, frame)
        if to is To.PREFILL:
            self.seen.append(passed)
            if passed.kind == "Register" and passed not in self.registers:
                self.registers.append(passed)
        elif not isinstance(message, Pong) or message.registered:
            self.answers[passed.kind] += 1
        if passed.kind in self.hold:
            self.held.append(passed)
        elif passed.kind not in self.lose:
            if isinstance(message, Registered):
                self._granted.add((message.manifest.incarnation, message.registration))
            return True
        return False


@asynccontextmanager
async def control_relay(target: str) -> AsyncIterator[ControlRelay]:
    """A relay that is closed at the end of the block."""
    relay = ControlRelay(target)
    await relay.start()
    try:
        yield relay
    finally:
        await relay.close()
