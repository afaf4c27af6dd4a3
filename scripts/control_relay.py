"""A relay on the control connection between a decode and a prefill node, which can hold messages back and repeat them.

The network may do all of this to a connection that breaks and comes back; a relay does it when it is told to.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from server.transfer.protocol import HEADER_NBYTES

HOST = "127.0.0.1"
_GREETING_NBYTES = 64
_LONG, _COMMAND = 0x02, 0x04
"""Flags of a ZMTP frame: eight bytes of length instead of one; not a message, but ZMQ's own."""


class To(enum.Enum):
    """Which way a message goes."""

    PREFILL = "to prefill"
    DECODE = "to decode"


class ControlRelay:
    """Relays between whoever connects to :attr:`address` and the prefill node at ``target`` (host:port).

    ``hold`` and ``lose`` are types of messages, in either direction; ``held`` are those held back, in their order. What
    is held outlives its connection: :meth:`release` sends it over the one there is then. Without a key only.
    """

    def __init__(self, target: str) -> None:
        self.hold: frozenset[str] = frozenset()
        self.lose: frozenset[str] = frozenset()
        self.held: list[tuple[To, bytes]] = []
        self.registers: list[bytes] = []
        """Every different ``Register`` that passed, as a frame."""
        self.n_registrations = 0
        """New registrations that the prefill node has granted."""
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._writers: dict[To, asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None

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
        for to, frame in held:
            self.send(to, frame)
        return len(held)

    def send(self, to: To, frame: bytes) -> None:
        """Puts a frame between those of the connection; it is lost if there is none."""
        if (writer := self._writers.get(to)) is not None and not writer.is_closing():
            writer.write(frame)

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
                if head[0] & _COMMAND or self._passes(to, frame, content, writer, answers):
                    writer.write(frame)
                    await writer.drain()

    def _passes(
        self, to: To, frame: bytes, content: bytes, writer: asyncio.StreamWriter, answers: asyncio.StreamWriter
    ) -> bool:
        """Whether a message goes on now. The connection of the last message is the one that there is."""
        back = To.DECODE if to is To.PREFILL else To.PREFILL
        self._writers |= {to: writer, back: answers}
        try:
            message = msgspec.msgpack.decode(content[HEADER_NBYTES:])
            kind = str(message["type"])
        except (msgspec.DecodeError, KeyError, TypeError):
            return True
        if kind == "Register" and frame not in self.registers:
            self.registers.append(frame)
        if kind in self.hold:
            self.held.append((to, frame))
            return False
        if kind in self.lose:
            return False
        self.n_registrations += kind == "Registered" and not message["resumed"]
        return True


@asynccontextmanager
async def control_relay(target: str) -> AsyncIterator[ControlRelay]:
    """A relay that is closed at the end of the block."""
    relay = ControlRelay(target)
    await relay.start()
    try:
        yield relay
    finally:
        await relay.close()
