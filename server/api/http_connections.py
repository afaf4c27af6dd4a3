"""What all HTTP connections of a node share: how many there are, and the memory of the bodies that they hold."""

from __future__ import annotations

import logging
import resource
import time
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge

from server.api.http_limits import REFUSALS, SMALL_BODY_NBYTES, HttpLimits, Refusal
from server.api.reading_turns import ReadingTurns
from server.memory import give_back_soon

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 10.0
_OTHER_FILES = 512
"""Open files of a node beside its HTTP connections: control connections, Mooncake's sockets, logs."""
_TRIM_NBYTES = 16 << 20
"""Bodies that are worth a search for free memory, when the last of them is gone."""


class Connection(Protocol):
    """One HTTP connection as its manager sees it."""

    def refuse(self, refusal: Refusal) -> None:
        """Answers with ``refusal`` where an answer can still be sent, and closes."""
        ...

    def give_way(self) -> None:
        """Closes at once: another connection needs the place."""
        ...


@dataclass(eq=False)
class Body:
    """What is held of one request's body, until the request is over."""

    free_nbytes: int = SMALL_BODY_NBYTES
    """What of it does not count against ``max_held_body_nbytes``."""
    nbytes: int = 0
    """Received so far, without chunk framing."""
    held_nbytes: int = 0
    """What of it counts at present."""


class ConnectionManager:
    """Admits connections and bodies. All methods run in the event loop.

    At a limit, whoever has waited longest for the rest of its own request loses: that is a silent or slow client, and
    never one whose request is complete.
    """

    def __init__(self, limits: HttpLimits, registry: CollectorRegistry) -> None:
        self.limits = limits
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}
        """Connections without a request under way, the longest waiting first."""
        self._refused: dict[Connection, None] = {}
        """Connections that have been refused, and are open only until their clients know."""
        self._growing: dict[Connection, None] = {}
        """Connections whose bodies are large and incomplete, the oldest first."""
        self.turns = ReadingTurns()
        self._held_nbytes = self._most_held_nbytes = 0
        self._logged_at = -_LOG_EVERY_S
        self._refusals = Counter(
            "pd_http_refused",
            "HTTP requests and connections cut off at a limit, by reason.",
            ["reason"],
            registry=registry,
        )
        for code in REFUSALS:
            self._refusals.labels(reason=code)
        connections = Gauge("pd_http_connections", "Open HTTP connections.", registry=registry)
        connections.set_function(lambda: len(self._open) + len(self._refused))
        bodies = Gauge("pd_http_held_body_bytes", "Bytes of large request bodies in memory.", registry=registry)
        bodies.set_function(lambda: self._held_nbytes)

    def opened(self, connection: Connection) -> None:
        """Takes ``connection`` on; at the limit, in place of the one that has waited longest for a request, if any."""
        is_full = len(self._open) >= self.limits.max_connections
        oldest = next(iter(self._waiting), None)
        self._open.add(connection)
        self._waiting[connection] = None
        if is_full and oldest is not None:
            oldest.give_way()
        elif is_full:
            connection.refuse(self.limits.refusal("too_many_connections"))

    def closed(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._refused.pop(connection, None)
        self._waiting.pop(connection, None)
        self._growing.pop(connection, None)

    def waits(self, connection: Connection) -> None:
        """``connection`` has no request under way."""
        self._waiting.setdefault(connection)

    def has_request(self, connection: Connection) -> None:
        """The head of a request has come on ``connection``."""
        self._waiting.pop(connection, None)

    def hold(self, connection: Connection, body: Body) -> None:
        """Counts what ``body`` has grown by. Where there is no memory left the oldest incomplete body is refused.

        :raises Refusal: it is this one.
        """
        growth = max(0, body.nbytes - body.free_nbytes) - body.held_nbytes
        if growth <= 0:
            return
        body.held_nbytes += growth
        self._held_nbytes += growth
        self._most_held_nbytes = max(self._most_held_nbytes, self._held_nbytes)
        self._growing.setdefault(connection)
        while self._held_nbytes > self.limits.max_held_body_nbytes:
            oldest = next(iter(self._growing))
            if oldest is connection:
                raise self.limits.refusal("too_many_bodies")
            oldest.refuse(self.limits.refusal("too_many_bodies"))
            self._growing.pop(oldest, None)  # one whose client has just gone refuses nothing

    def is_growing(self, connection: Connection) -> bool:
        """Whether ``connection`` is in the middle of a large body."""
        return connection in self._growing

    def body_ended(self, connection: Connection) -> None:
        """The body of ``connection`` is complete, or nobody wants the rest."""
        self._growing.pop(connection, None)

    def release(self, body: Body) -> None:
        """The request of ``body`` is over. May be called more than once."""
        self._held_nbytes -= body.held_nbytes
        body.held_nbytes = 0
        if not self._held_nbytes and self._most_held_nbytes >= _TRIM_NBYTES:
            self._most_held_nbytes = 0
            give_back_soon()

    def closes(self, connection: Connection) -> None:
        """``connection`` has been refused, and counts no more. Few are waited for: the oldest of too many is closed."""
        self.closed(connection)
        self._refused[connection] = None
        if len(self._refused) > self.limits.max_refused:
            next(iter(self._refused)).give_way()

    def count_refusal(self, refusal: Refusal) -> None:
        """Counts a refusal, and logs one from time to time: a client must not be able to fill the log."""
        self._refusals.labels(reason=refusal.code).inc()
        now = time.monotonic()
        if now - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = now
            logger.warning("HTTP: %s (%s; pd_http_refused_total counts all of them)", refusal.message, refusal.code)


def allow_open_files(max_connections: int) -> None:
    """Raises the process's limit of open files, as far as it may, so that connections alone cannot reach it."""
    needed = max_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < needed:
            logger.warning(
                "%d open files are allowed: too few for %d HTTP connections (ulimit -n, --max-connections)",
                allowed,
                max_connections,
            )
