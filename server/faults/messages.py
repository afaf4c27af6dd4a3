"""The last step of every outgoing control message: encoded and handed to the socket, unless a fault is in the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from server.faults.spec import FaultKind, FaultSet
from server.transfer.protocol import AnyMessage, encode

REORDER_WAIT_S = 1.0
"""How long a message that is to go behind the next one waits for one."""
MAX_LATE = 64
"""Messages that wait for a later registration; of more the oldest are lost."""

Put = Callable[[bytes], None]


class Outbox:
    """One node's outgoing messages. Without faults nothing but :func:`encode`."""

    def __init__(self, faults: FaultSet | None = None) -> None:
        self._faults = faults or FaultSet()
        self._held: list[tuple[Put, bytes]] = []
        self._late: list[tuple[int, Put, bytes]] = []

    def send(self, message: AnyMessage, put: Put) -> None:
        """Encodes ``message`` and hands it to ``put``. Raises :class:`ProtocolError` for one over its cap."""
        frame = encode(message)
        if not self._faults.is_on:
            put(frame)
            return
        kinds = {fault.kind for fault in self._faults.strike_message(type(message).__name__)}
        if FaultKind.CORRUPT_MESSAGE in kinds:
            middle = len(frame) // 2
            frame = frame[:middle] + bytes((frame[middle] ^ 0xFF,)) + frame[middle + 1 :]
        if FaultKind.LATE_MESSAGE in kinds:
            self._late.append((message.registration, put, frame))
            del self._late[:-MAX_LATE]
            return
        if FaultKind.REORDER_MESSAGE in kinds:
            self._held.append((put, frame))
            asyncio.get_running_loop().call_later(REORDER_WAIT_S, self._release)
            return
        if FaultKind.DROP_MESSAGE not in kinds:
            put(frame)
        if FaultKind.DUPLICATE_MESSAGE in kinds:
            put(frame)
        self._release()
        self._release_late(message.registration)

    def _release_late(self, registration: int) -> None:
        due = [late for late in self._late if late[0] < registration]
        self._late = [late for late in self._late if late[0] >= registration]
        for _, put, frame in due:
            put(frame)

    def _release(self) -> None:
        held, self._held = self._held, []
        for put, frame in held:
            put(frame)
