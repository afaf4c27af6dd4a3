"""What every transport offers: register memory, write one piece into a peer's memory, ask what became of it."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from typing import NewType, Protocol

from server.transfer.engines.exposure import ports_on_all_interfaces

log = logging.getLogger(__name__)


class PieceStatus(enum.StrEnum):
    """What is known of one submitted piece. All but ``RUNNING`` are terminal: the ticket must not be polled again."""

    RUNNING = "running"
    APPLIED = "applied"
    """Every byte is in the peer's memory."""
    REFUSED = "refused"
    """The peer is alive and turned the piece away: none of its bytes will be written."""
    UNKNOWN = "unknown"
    """No answer (connection lost, timed out): bytes may have been written and may still be written later."""


Ticket = NewType("Ticket", int)
"""Names one submitted piece to the engine that took it."""


class TransferError(Exception):
    """A transport could not do what was asked; the message says what to do about it."""


class TransportUnavailable(TransferError):
    """The transport's library is missing, cannot be loaded, or is a version or mixture of builds not to be used."""


class TransportMisconfigured(TransferError):
    """An environment variable or option would make the transport unsafe, or the transport could not start with it."""


class RegistrationFailed(TransferError):
    """Memory could not be registered or unregistered."""


class SubmitFailed(TransferError):
    """The transport did not take the piece: none of its bytes will be written."""


class EngineClosed(SubmitFailed):
    """The engine was closed."""


class TransferEngine(Protocol):
    """One transport endpoint of this process. Methods may be called from one thread at a time."""

    @property
    def kind(self) -> str:
        """``"mooncake"``, ``"loopback"``."""
        ...

    @property
    def version(self) -> str: ...

    @property
    def session(self) -> str:
        """What a peer passes to :meth:`submit` to write into this engine's registered memory: ``"host:port"``."""
        ...

    @property
    def transport(self) -> str:
        """The transport really in use (``"tcp"``, ``"rdma"``, ``"memory"``), not the one that was asked for."""
        ...

    def register(self, ptr: int, nbytes: int) -> None:
        """Let peers write into, and :meth:`submit` read from, ``[ptr, ptr + nbytes)``.

        Raises :class:`RegistrationFailed`.
        """
        ...

    def unregister(self, ptr: int) -> None:
        """Refuse new writes into the region at ``ptr``. This is no fence: writes that have begun go on to their end.

        Raises :class:`RegistrationFailed`.
        """
        ...

    def submit(self, session: str, src: int, dst: int, nbytes: int) -> Ticket:
        """Start writing ``nbytes`` at ``src`` to the peer's address ``dst``.

        May block for a few seconds at the first piece for ``session``. Raises :class:`SubmitFailed` if it took nothing.
        """
        ...

    def poll(self, ticket: Ticket) -> PieceStatus:
        """The piece's status now. After a terminal answer the ticket is gone."""
        ...

    def close(self) -> None:
        """End the endpoint. This is the fence: when it returns, no peer's write lands through it any more."""
        ...


def open_registered(make_engine: Callable[[], TransferEngine], ptr: int, nbytes: int) -> TransferEngine:
    """A new endpoint with one region registered; closed again if that fails. Raises what either raises."""
    engine = make_engine()
    try:
        engine.register(ptr, nbytes)
    except Exception:
        engine.close()
        raise
    if engine.kind != "loopback":
        log.info("transfer endpoint %s; ports open on all interfaces: %s", engine.session, ports_on_all_interfaces())
    return engine
