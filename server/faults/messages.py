"""Faults of control messages: lost, doubled, out of order, late or damaged on their way out."""

from __future__ import annotations

import asyncio

from server.faults.hooks import Put
from server.faults.spec import FaultKind, FaultSet
from server.transfer.protocol import AnyMessage

REORDER_WAIT_S = 1.0
"""How long a message that is to go behind the next one waits for one."""
MAX_LATE = 64
"""Messages that wait for a later registration; of more the oldest are lost."""


class MessageFaults:
    """What is held back of one node's outgoing messages."""

    def __init__(self, faults: FaultSet) -> None:
        self._faults = faults
        self._held: list[tuple[Put, bytes]] = []
        self._late: list[tuple[int, Put, bytes]] = []

    def post(self, message: AnyMessage, frame: bytes, put: Put) -> None:
        kinds = {fault.kind for fault in self._faults.of_message(type(message).__name__)}
        if FaultKind.CORRUPT_MESSAGE in kinds:
            middle = len(frame) // 2
            frame = frame[:middle] + bytes((frame[middle] ^ 0xFF,)) + frame[middle + 1 :]
        if FaultKind.LATE_MESSAGE in kinds:
            self._late = [*self._late, (message.registration, put, frame)][-MAX_LATE:]
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
        due = [late for late in self._late if late[0] < message.registration]
        self._late = [late for late in self._late if late[0] >= message.registration]
        for _, late_put, late_frame in due:
            late_put(late_frame)

    def _release(self) -> None:
        held, self._held = self._held, []
        for put, frame in held:
            put(frame)
