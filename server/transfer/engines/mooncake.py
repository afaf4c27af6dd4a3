"""Mooncake Transfer Engine behind the :class:`~server.transfer.engines.base.TransferEngine` interface.

What was measured on ``mooncake-transfer-engine-non-cuda`` 0.3.13.post1 over TCP and binds this file:

* A status id is a raw pointer, freed with the answer 1 or -1. It is polled to its first terminal answer, never again.
* -1 has several causes. The receiver refused the address, or no connection was made: nothing is written. Or the
  connection broke, or there was no progress for 30 s (``MC_TCP_PROGRESS_TIMEOUT_SEC``): what is in the receiver's
  socket buffers **is still written** when it runs again (30 MiB were). The id does not tell which, and a later write
  that succeeds proves nothing of it. So a -1 is ``REFUSED`` only if the peer, asked again and alive, had the target
  registered neither at the first contact nor now; anything else is ``UNKNOWN``.
* The receiver checks an address once, when a write begins. ``unregister`` stops no write that has begun (512 MiB ran to
  their end after it) and refuses every write that begins later. Destroying the engine joins its I/O thread: no byte
  lands after :meth:`MooncakeEngine.close` has returned.
* The first write to a session opens it with a call that blocks for up to a minute on a frozen peer, so the peer is
  asked for a sign of life first.
* A batch of writes has one status for all of them, and a failed one says nothing of the writes that still go on. So
  pieces are submitted one by one. That costs little: the first submission takes 60 us, because it wakes Mooncake's
  thread, each further one 6 us.
* A write may have any size (512 MiB was tried, and is as fast as small ones): large pieces need no splitting.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from packaging.version import Version

from server.transfer.addresses import is_ipv6, join_address, split_address
from server.transfer.engines.base import (
    EngineClosed,
    PieceStatus,
    RegistrationFailed,
    SubmitFailed,
    Ticket,
    TransferError,
    TransportMisconfigured,
    TransportUnavailable,
)

log = logging.getLogger(__name__)

WHEELS = WHEEL_WITH_CUDA, WHEEL_WITHOUT_CUDA = ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")
"""Two builds of one module. Only the first one moves memory of a GPU, which it knows by its address alone: regions are
registered without naming a device, and of a pair each side looks at its own addresses (``memory_location.cpp``).
"""
MIN_VERSION = "0.3.12.post1"
"""Before it, a TCP write was reported done before it was applied."""
ACKNOWLEDGED_TCP_PROTOCOL = 2
"""The first TCP framing in which the receiver acknowledges an applied write."""

PEER_ANSWER_TIMEOUT_S = 2.0
"""How long a peer's RPC port may take to describe its memory; a live peer takes about 10 ms."""
MAX_DESCRIPTION_NBYTES = 1 << 20

DESCRIBE_REQUEST = b"\x01{}"
"""Mooncake's metadata request (type 1) with an empty description of the asker."""
WAKE_LISTENER_AFTER_S = (0.03, 0.2)
"""The second is for a machine so busy that the destructor has not begun at the first."""

_initialize_lock = threading.Lock()


@dataclass(frozen=True)
class Wheel:
    """The installed build of Mooncake."""

    name: str
    version: str


@dataclass(frozen=True)
class SegmentDescription:
    """What an engine says of itself on its RPC port."""

    protocol: str
    tcp_protocol_version: int
    data_port: int
    regions: tuple[tuple[int, int], ...]
    """Registered memory as (address, bytes)."""

    def contains(self, address: int, nbytes: int) -> bool:
        return any(start <= address and address + nbytes <= start + length for start, length in self.regions)


def installed_wheel() -> Wheel:
    """The one installed Mooncake wheel. Raises :class:`TransportUnavailable` for none, both, or one that is too old."""
    found = []
    for name in WHEELS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(Wheel(name, importlib.metadata.version(name)))
    if not found:
        raise TransportUnavailable(
            f"Mooncake is not installed: pip install '{WHEEL_WITHOUT_CUDA}>={MIN_VERSION}' ({WHEEL_WITH_CUDA} for CUDA)"
        )
    if len(found) > 1:
        raise TransportUnavailable(
            f"{' and '.join(WHEELS)} are both installed, with files of the same names: uninstall both, install one"
        )
    wheel = found[0]
    if Version(wheel.version) < Version(MIN_VERSION):
        raise TransportUnavailable(
            f"{wheel.name} {wheel.version} reports writes done before they are applied: install >= {MIN_VERSION}"
        )
    return wheel


def _load_engine_class() -> Any:
    """Mooncake's ``TransferEngine`` class (the wheel carries no type information, hence ``Any``)."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        if ".so" not in str(error):
            raise TransportUnavailable(f"Mooncake cannot be imported: {error}") from error
        raise TransportUnavailable(
            f"Mooncake needs a system library that is missing ({error}): apt-get install libibverbs1 libnuma1 libcurl4"
        ) from error
    return TransferEngine


@contextlib.contextmanager
def _force_tcp(forced: bool) -> Iterator[None]:
    """``MC_FORCE_TCP`` for the time of one ``initialize``: it alone chooses the transport, and only there."""
    before = os.environ.get("MC_FORCE_TCP")
    if forced:
        os.environ["MC_FORCE_TCP"] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("MC_FORCE_TCP", None)
        else:
            os.environ["MC_FORCE_TCP"] = before


def _choose_family(host: str) -> None:
    """Whether Mooncake speaks IPv6 or IPv4: one of the two in a process, by an environment variable that it reads once.

    With it a peer's IPv4 address is not understood any more, without it no IPv6 address is.
    """
    is_set = "MC_USE_IPV6" in os.environ  # to any value: Mooncake looks at nothing more
    if is_ipv6(host):
        os.environ["MC_USE_IPV6"] = "1"
    elif is_set:
        raise TransportMisconfigured(
            f"MC_USE_IPV6 is set, and then Mooncake cannot reach IPv4 addresses such as {host}: unset it, or give both "
            "nodes IPv6 addresses"
        )


def describe_segment(session: str, timeout_s: float) -> SegmentDescription:
    """Ask the engine at ``session`` what it is and which memory it has registered (Mooncake's own metadata request).

    Raises :class:`OSError` if it does not answer in time and :class:`ValueError` if the answer is not understood.
    """
    deadline = time.monotonic() + timeout_s
    with socket.create_connection(split_address(session), timeout=timeout_s) as connection:
        connection.sendall(struct.pack("<Q", len(DESCRIBE_REQUEST)) + DESCRIBE_REQUEST)
        (length,) = struct.unpack("<Q", _receive(connection, 8, deadline))
        if not 1 < length <= MAX_DESCRIPTION_NBYTES:
            raise ValueError(
                f"{session} announced a description of {length} bytes (1 .. {MAX_DESCRIPTION_NBYTES} are read)"
            )
        answer = _receive(connection, length, deadline)
    try:
        fields = json.loads(answer[1:])
        return SegmentDescription(
            protocol=str(fields["protocol"]),
            tcp_protocol_version=int(fields.get("tcp_proto_version", 1)),
            data_port=int(fields.get("tcp_data_port", 0)),
            regions=tuple((int(buffer["addr"]), int(buffer["length"])) for buffer in fields.get("buffers") or ()),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{session} described itself in an unknown form: {answer[:200]!r}") from error


def _receive(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    received = bytearray()
    while len(received) < nbytes:
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        block = connection.recv(nbytes - len(received))
        if not block:
            raise ConnectionError(f"connection closed after {len(received)} of {nbytes} bytes")
        received += block
    return bytes(received)


@dataclass(frozen=True)
class _Write:
    session: str
    dst: int
    nbytes: int


class MooncakeEngine:
    """One Mooncake ``TransferEngine``. What it knows of a session is never refreshed: a restarted peer needs a new one.

    Both its ports listen on every interface whatever ``host`` is, and nothing is authenticated: trust the network.
    """

    kind = "mooncake"

    def __init__(self, host: str = "127.0.0.1", *, transport: Literal["tcp", "auto"] = "auto") -> None:
        """``host`` is the name under which peers reach this process; ``auto`` takes RDMA if there is a card, else TCP.
        Where it is an IPv6 address, ``transport`` ends in 6 (``tcp6``): the peers of one pair must agree on that.

        Raises :class:`TransportUnavailable` or :class:`TransportMisconfigured`.
        """
        if os.environ.get("MC_TCP_PROTO") == "1":
            raise TransportMisconfigured(
                "MC_TCP_PROTO=1 turns off the acknowledgement that a write was applied: unset it"
            )
        self.wheel = installed_wheel()
        self.version = f"{self.wheel.version} ({self.wheel.name})"
        _choose_family(host)
        engine = _load_engine_class()()
        with _initialize_lock, _force_tcp(transport == "tcp"):
            code = engine.initialize(host, "P2PHANDSHAKE", "tcp", "")
        if code != 0:
            raise TransportMisconfigured(
                f"Mooncake could not start on host {host!r} (code {code}); MC_LOG_LEVEL=INFO says why"
            )
        self._engine = engine
        self.session = join_address(host, engine.get_rpc_port())
        self._rpc_port: int = engine.get_rpc_port()
        self._protocol = self._protocol_in_use()
        self.transport = f"{self._protocol}6" if is_ipv6(host) else self._protocol
        self._peers: dict[str, SegmentDescription] = {}
        self._writes: dict[Ticket, _Write] = {}
        self._silent_until: dict[str, float] = {}
        if transport == "tcp" and self._protocol != "tcp":
            raise TransportMisconfigured(f"TCP was asked for, but Mooncake uses {self._protocol}")

    def _protocol_in_use(self) -> str:
        try:
            own = describe_segment(f"127.0.0.1:{self._rpc_port}", PEER_ANSWER_TIMEOUT_S)
        except (OSError, ValueError) as error:
            log.warning("Mooncake does not say which transport it uses: %s", error)
            return "unknown"
        if own.protocol == "tcp" and own.tcp_protocol_version < ACKNOWLEDGED_TCP_PROTOCOL:
            raise TransportUnavailable("this Mooncake build does not acknowledge applied writes over TCP")
        return own.protocol

    def register(self, ptr: int, nbytes: int) -> None:
        code = self._open_engine().register_memory(ptr, nbytes)
        if code != 0:
            raise RegistrationFailed(
                f"Mooncake refused to register {nbytes} bytes at {ptr:#x} (code {code}; -7 = overlap, -1 = empty)"
            )

    def unregister(self, ptr: int) -> None:
        code = self._open_engine().unregister_memory(ptr)
        if code != 0:
            raise RegistrationFailed(f"Mooncake refused to unregister the region at {ptr:#x} (code {code})")

    def submit(self, session: str, src: int, dst: int, nbytes: int) -> Ticket:
        engine = self._open_engine()
        if nbytes <= 0:
            raise SubmitFailed(f"a piece has at least one byte, not {nbytes}")
        if session not in self._peers:
            self._peers[session] = self._first_contact(session)
        ticket = Ticket(engine.transfer_submit_write(session, src, dst, nbytes))
        if ticket == 0:
            raise SubmitFailed(f"Mooncake did not take a write of {nbytes} bytes to {session}")
        self._writes[ticket] = _Write(session, dst, nbytes)
        return ticket

    def poll(self, ticket: Ticket) -> PieceStatus:
        code = self._open_engine().transfer_check_status(ticket)
        if code == 0:
            return PieceStatus.RUNNING
        write = self._writes.pop(ticket)
        if code == 1:
            return PieceStatus.APPLIED
        if code == -1 and self._was_refused(write):
            return PieceStatus.REFUSED
        return PieceStatus.UNKNOWN

    def close(self) -> None:
        """End the engine; when this returns, no peer's write lands through it any more.

        Mooncake's destructor keeps the interpreter lock while it joins a thread that sits in ``accept`` for up to a
        second. So that thread is given connections to read from, which other processes close in a moment: this process
        stands still for 30 ms and not for a second.

        Raises :class:`TransferError` if another thread is inside the engine; then it is as open as before.
        """
        if self._engine is None:
            return
        wakers = [waker for delay_s in WAKE_LISTENER_AFTER_S if (waker := self._wake_listener_after(delay_s))]
        try:
            engine, self._engine = self._engine, None
            if sys.getrefcount(engine) > 2:  # the local name and the argument
                self._engine = engine
                raise TransferError(f"{self.session} cannot be closed: another thread is using its engine")
            del engine  # runs the destructor
            self._writes.clear()
        finally:
            for waker in wakers:
                waker.kill()
                waker.wait()

    def _wake_listener_after(self, delay_s: float) -> subprocess.Popen[bytes] | None:
        try:
            with socket.create_connection(("127.0.0.1", self._rpc_port), timeout=1.0) as connection:
                command = ["sleep", str(delay_s)]
                return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=connection.fileno())
        except OSError as error:
            log.debug("closing Mooncake takes up to a second: %s", error)
            return None

    def _open_engine(self) -> Any:
        if self._engine is None:
            raise EngineClosed("the Mooncake engine is closed")
        return self._engine

    def _first_contact(self, session: str) -> SegmentDescription:
        try:
            peer = describe_segment(session, PEER_ANSWER_TIMEOUT_S)
        except (OSError, ValueError) as error:
            raise SubmitFailed(f"the Mooncake engine at {session} does not answer: {error}") from error
        if peer.protocol == "tcp" and peer.tcp_protocol_version < ACKNOWLEDGED_TCP_PROTOCOL:
            raise SubmitFailed(
                f"the Mooncake engine at {session} does not acknowledge applied writes: it needs >= {MIN_VERSION}"
            )
        return peer

    def _was_refused(self, write: _Write) -> bool:
        """Whether a failed write can only have been turned away for its address, by a peer that is alive.

        Memory that was registered once does not count: a write into it may have begun before it was unregistered.
        """
        if self._protocol != "tcp" or time.monotonic() < self._silent_until.get(write.session, 0.0):
            return False
        at_first = self._peers[write.session]
        try:
            now = describe_segment(write.session, PEER_ANSWER_TIMEOUT_S)
        except (OSError, ValueError):
            self._silent_until[write.session] = time.monotonic() + PEER_ANSWER_TIMEOUT_S
            return False
        is_same_process = now.data_port == at_first.data_port
        was_registered = any(peer.contains(write.dst, write.nbytes) for peer in (at_first, now))
        return is_same_process and not was_registered
