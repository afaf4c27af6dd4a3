"""What becomes of the connections of a ZMQ socket, and why one to a prefill node does not come about.

ZMQ connects again and again and reports nothing. Its socket monitor reports that a connection failed; a connection of
our own to the address shows why.
"""

from __future__ import annotations

import asyncio
import enum
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from server.transfer.addresses import family_of, split_address

_WRONG_KEY = 0x11000001
"""``ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC``, which pyzmq does not name."""
_WRONG_MECHANISM = 0x11000002
"""``ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH``."""
_SIGNATURE_AND_VERSION = b"\xff" + bytes(8) + b"\x7f\x03\x00"
_GREETING_NBYTES = 64
_LOOK_S = 1.0


class Wire(enum.StrEnum):
    """What happened to a connection of a socket."""

    CONNECTED = "connected"
    """TCP only."""
    READY = "ready"
    """The ZMQ handshake is over."""
    LOST = "lost"
    NOT_CONNECTED = "not_connected"
    WRONG_KEY = "wrong_key"
    WRONG_MECHANISM = "wrong_mechanism"
    NOT_ADMITTED = "not_admitted"
    """The Gatekeeper of the other side, or of this one, said no."""
    BROKEN_OFF = "broken_off"
    """The other side closed in the middle of the handshake and said nothing."""
    NOT_ZMQ = "not_zmq"


@dataclass(frozen=True)
class WireEvent:
    """``fd`` is the connection's file descriptor where one was made (``CONNECTED``) or is gone (``LOST``)."""

    what: Wire
    fd: int = -1


_EVENTS = {
    zmq.Event.CONNECTED: Wire.CONNECTED,
    zmq.Event.ACCEPTED: Wire.CONNECTED,
    zmq.Event.HANDSHAKE_SUCCEEDED: Wire.READY,
    zmq.Event.DISCONNECTED: Wire.LOST,
    zmq.Event.CONNECT_RETRIED: Wire.NOT_CONNECTED,
    zmq.Event.HANDSHAKE_FAILED_AUTH: Wire.NOT_ADMITTED,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: Wire.BROKEN_OFF,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: Wire.NOT_ZMQ,
}


def wire_events(watched: zmq.asyncio.Socket) -> AsyncIterator[WireEvent]:
    """Everything that happens to the socket's connections from this call on, until :func:`end_wire_events`.

    To be called before the socket binds or connects.
    """
    return _events_of(watched, watched.get_monitor_socket(sum(_EVENTS)))


async def _events_of(watched: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> AsyncIterator[WireEvent]:
    try:
        while True:
            report = parse_monitor_message(await monitor.recv_multipart())
            number = report["event"]
            if number == zmq.Event.MONITOR_STOPPED:
                return
            event = _EVENTS[zmq.Event(number)]
            if event is Wire.NOT_ZMQ:
                event = {_WRONG_KEY: Wire.WRONG_KEY, _WRONG_MECHANISM: Wire.WRONG_MECHANISM}.get(report["value"], event)
            yield WireEvent(event, report["value"] if event in (Wire.CONNECTED, Wire.LOST) else -1)
    finally:
        end_wire_events(watched)  # first: ZMQ waits for ever for a reader that is gone, and holds a lock meanwhile
        monitor.close(0)


def end_wire_events(watched: zmq.asyncio.Socket) -> None:
    """Before the socket is closed."""
    if not watched.closed:
        watched.disable_monitor()


@dataclass(frozen=True)
class Finding:
    """Why there is no connection: one sentence, and whether the other side refuses us (``refused``) or is not there."""

    reason: str
    refused: bool = False
    gone: bool = False
    """The system there refuses connections to the port: the process that listened has ended."""


async def look_at(address: str, mechanism: str, event: Wire) -> Finding:
    """Connects to a prefill node's ``host:port`` without ZMQ and reads its ZMQ greeting, to say what ``event`` meant.

    ``mechanism`` is ours, ``NULL`` or ``CURVE``.
    """
    try:
        reader, writer = await _connect(address)
    except TimeoutError:
        return Finding(f"{address} did not take a connection within {_LOOK_S:g} s")
    except (OSError, ValueError) as error:
        return Finding(f"nobody listens at {address} ({_cause(error)})", gone=isinstance(error, ConnectionRefusedError))
    try:
        writer.write(_SIGNATURE_AND_VERSION)
        async with asyncio.timeout(_LOOK_S):
            greeting = await reader.readexactly(_GREETING_NBYTES)
    except TimeoutError:
        return Finding(f"{address} takes connections but says nothing: it is frozen, still loading, or no prefill node")
    except (OSError, asyncio.IncompleteReadError):
        return _no_zmq(address)
    finally:
        writer.close()
    return _read(address, mechanism, greeting, event)


async def refuses_connections(address: str) -> bool:
    """Whether the system at ``host:port`` says that nobody listens there; false for everything less certain."""
    try:
        _, writer = await _connect(address)
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):  # TimeoutError is an OSError
        return False
    writer.close()
    return False


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises :class:`TimeoutError`, another :class:`OSError`, or :class:`ValueError` for what is no address."""
    host, port = split_address(address)
    async with asyncio.timeout(_LOOK_S):
        return await asyncio.open_connection(host, port, family=family_of(host))


def _read(address: str, mechanism: str, greeting: bytes, event: Wire) -> Finding:
    theirs = greeting[12:32].rstrip(b"\0").decode("ascii", "replace")
    if greeting[:1] != _SIGNATURE_AND_VERSION[:1] or theirs not in ("NULL", "CURVE"):
        return _no_zmq(address)
    if theirs != mechanism:
        if theirs == "CURVE":
            return Finding(f"prefill {address} wants a key: start this decode node with its --auth-key-file", True)
        return Finding(f"prefill {address} has no key: start it with the --auth-key-file of this decode node", True)
    if mechanism == "CURVE" and event in (Wire.BROKEN_OFF, Wire.NOT_ADMITTED, Wire.WRONG_KEY):
        return Finding(f"prefill {address} has another key: the two --auth-key-file differ", True)
    if event is Wire.NOT_ADMITTED:
        return Finding(
            f"prefill {address} takes peers of its own machine only: give both nodes the same --auth-key-file", True
        )
    return Finding(f"the connection to prefill {address} broke and is tried again")


def _no_zmq(address: str) -> Finding:
    return Finding(f"{address} is not the bootstrap port of a prefill node: it does not speak ZMQ", True)


def _cause(error: OSError | ValueError) -> str:
    """The operating system's words: ``Connection refused``."""
    if isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
