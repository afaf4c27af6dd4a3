"""The TCP connections below one ZMQ socket: which are open, whose they are, and what of them is no message yet.

ZMQ bounds the parts of a message and the messages of a connection, but not the number of parts of a message that does
not end: it keeps them all. The kernel counts what a connection has received, so one that has sent far more since its
last complete message than any message may have is cut.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from server.memory import give_back_soon
from server.transfer.protocol import MAX_FRAME_NBYTES

UNFINISHED_AT_MOST_NBYTES = 8 * MAX_FRAME_NBYTES
"""Of all connections of a socket together, each counted from its last complete message."""
CHECK_S = 0.1
_BYTES_RECEIVED_AT = 128
"""Where ``tcpi_bytes_received`` (64 bits) lies in Linux's ``struct tcp_info``."""

_RESET = struct.pack("ii", 1, 0)
"""On closing, a sender whose data nobody reads gets an error at once; else it would wait for a minute."""

_Ends = tuple[Any, Any]


@dataclass
class _Connection:
    """``ends`` are its two addresses. ``base`` is what it had received, in bytes, at its last complete message."""

    ends: _Ends
    base: int = 0
    routing_id: bytes = b""


class Connections:
    """By file descriptor, as the socket's monitor reports them. ``port`` is the one that the socket is bound to or
    connects to: by the time that a descriptor is reported, it may already be that of something else.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: dict[int, _Connection] = {}
        self._was_over = False

    @property
    def fds(self) -> tuple[int, ...]:
        """The open connections."""
        return tuple(self._open)

    @property
    def peer_hosts(self) -> frozenset[str]:
        """The addresses at the other ends of the open connections."""
        return frozenset(connection.ends[1][0] for connection in self._open.values())

    def opened(self, fd: int) -> None:
        """ZMQ has accepted or made the connection ``fd``. Its first message may have been heard already."""
        with _borrowed(fd) as borrowed:
            ends = _ends(borrowed)
        is_known = fd in self._open and self._open[fd].ends == ends
        if ends is not None and self._port in (ends[0][1], ends[1][1]) and not is_known:
            self._open[fd] = _Connection(ends)

    def closed(self, fd: int) -> bytes:
        """The connection is gone. Whose it was, if that peer has no other; else an empty routing id."""
        gone = self._open.pop(fd, None)
        return gone.routing_id if gone is not None and not self.has(gone.routing_id) else b""

    def has(self, routing_id: bytes) -> bool:
        """Whether a message of the peer with this id has come over one of the open connections."""
        return any(connection.routing_id == routing_id for connection in self._open.values())

    def heard(self, fd: int, routing_id: bytes = b"") -> None:
        """A complete message came over ``fd`` from the peer with this id."""
        if fd not in self._open:
            self.opened(fd)
        connection = self._open.get(fd)
        if connection is not None:
            connection.routing_id = routing_id
            connection.base += _unfinished_nbytes(fd, connection)

    def cut_unfinished(self) -> list[int]:
        """To be called every :data:`CHECK_S`: ends the connections that hold most; how much each held, in bytes.

        Only if it was too much at the call before as well: messages that are complete are taken in between.
        """
        held = {fd: _unfinished_nbytes(fd, connection) for fd, connection in self._open.items()}
        too_much = sum(held.values()) - UNFINISHED_AT_MOST_NBYTES
        was_over, self._was_over = self._was_over, too_much > 0
        cut: list[int] = []
        for fd in sorted(held, key=held.__getitem__, reverse=True):
            if too_much <= 0 or not was_over:
                break
            too_much -= held[fd]
            cut.append(held[fd])
            with _borrowed(fd) as borrowed, contextlib.suppress(OSError):
                if borrowed is not None and _ends(borrowed) == self._open[fd].ends:
                    borrowed.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    borrowed.shutdown(socket.SHUT_RDWR)
        if cut:
            give_back_soon()
        return cut


def _unfinished_nbytes(fd: int, connection: _Connection) -> int:
    with _borrowed(fd) as borrowed:
        if borrowed is None or _ends(borrowed) != connection.ends:
            return 0
        info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED_AT + 8)
        if len(info) < _BYTES_RECEIVED_AT + 8:  # Linux before 4.1
            return 0
        received: int = struct.unpack_from("=Q", info, _BYTES_RECEIVED_AT)[0]
        return received - connection.base


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket | None]:
    """ZMQ's socket under a number of our own for a moment, so that ZMQ may close it meanwhile; None if it has."""
    copy = -1
    try:
        copy = os.dup(fd)
        borrowed = socket.socket(fileno=copy)
    except OSError:
        if copy >= 0:
            os.close(copy)
        yield None
        return
    with borrowed:
        yield borrowed


def _ends(borrowed: socket.socket | None) -> _Ends | None:
    try:
        if borrowed is None or borrowed.family not in (socket.AF_INET, socket.AF_INET6):
            return None  # the number is that of something else by now
        return borrowed.getsockname(), borrowed.getpeername()
    except OSError:
        return None
