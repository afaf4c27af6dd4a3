"""The decode node's side of one control connection, to one prefill node, kept registered for ever."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from server.decode.dialer import MakeDialer
from server.decode.room import Fenced
from server.decode.transport_sessions import TransportSessions
from server.failure import Failure
from server.node.context import NodeContext
from server.transfer.diagnosis import Finding
from server.transfer.engines.base import TransferEngine
from server.transfer.frames import ProtocolError, VersionMismatch, decode, encode
from server.transfer.log_limit import LogLimit
from server.transfer.manifest import AUTH, Manifest, Mismatch, compare, refusal_label
from server.transfer.protocol import (
    AnyMessage,
    FromPrefill,
    PeerMessage,
    Ping,
    Pong,
    Refused,
    Register,
    Registered,
    Registration,
    registration_of,
)
from server.transfer.rooms import TICK_S, Deadlines, Heartbeat, PeerLost, Resend

log = logging.getLogger(__name__)

_REGISTER_FIRST_S = 0.1
_REGISTER_CAP_S = 1.0


class LinkState(enum.StrEnum):
    """Where the connection to a prefill node stands."""

    CONNECTING = "connecting"
    REGISTERED = "registered"
    REFUSED = "refused"


@dataclass(frozen=True)
class PeerRegistered:
    """Both sides have accepted each other."""


LinkEvent = PeerRegistered | PeerLost | Fenced | PeerMessage
"""``Fenced``: the peer's transport session is closed; nothing that it submitted before can land any more."""


class PrefillLink:
    """One prefill node at ``address`` (``host:bootstrap_port``).

    Registers, pings every second and, when the peer is lost, fences its transport session and starts again, for ever.
    ``make_manifest`` says what is registered for a session of ``sessions``. ``numbers`` counts the registrations of
    this process upwards; every attempt with a new transport session takes one. ``on_event`` is called in the event
    loop; it must not block.
    """

    def __init__(
        self,
        address: str,
        context: NodeContext,
        deadlines: Deadlines,
        *,
        make_dialer: MakeDialer,
        sessions: TransportSessions,
        make_manifest: Callable[[TransferEngine], Manifest],
        on_event: Callable[[PrefillLink, LinkEvent], None],
        numbers: Iterator[int],
    ) -> None:
        self.address = address
        self.state = LinkState.CONNECTING
        self.reason = f"{address} has not answered yet"
        self.refused_field = ""
        self.ours: Manifest | None = None
        self.theirs: Manifest | None = None
        self.dialer = make_dialer(address, self._on_frames, self._on_trouble, self._on_connected)
        self._deadlines = deadlines
        self._clock = context.clock
        self._metrics = context.metrics
        self._sessions = sessions
        self._make_manifest = make_manifest
        self._on_event = on_event
        self._hooks = context.hooks
        self._numbers = numbers
        self._number = 0
        self._started = self._clock()
        self._heartbeat = Heartbeat(deadlines.peer_s, self._started)
        self._changed = asyncio.Event()
        self._lost: Failure | None = None
        self._why_lost = ""
        self._logged = ""
        """What was last logged. Two nodes that are started together need not find each other at once."""
        self._back_by = 0.0
        self._heard = float("-inf")
        self._log_limit = LogLimit(log)
        self._task: asyncio.Task[None] | None = None

    @property
    def registered(self) -> bool:
        return self.state is LinkState.REGISTERED and self._lost is None

    @property
    def registration(self) -> Registration | None:
        """The one that is valid now, for the messages to the peer; None while there is none."""
        if not self.registered or self.ours is None or self.theirs is None:
            return None
        return Registration(self.theirs.incarnation, self.ours.incarnation, self._number)

    @property
    def transport(self) -> str | None:
        """The transport and the wire that it really uses, such as ``mooncake/tcp``; None without a session."""
        return f"{self.ours.transport_kind}/{self.ours.transport}" if self.ours else None

    @property
    def coming_back(self) -> bool:
        """Whether the peer is alive and registers anew right now: a request may wait for it."""
        return not self.registered and self._clock() < self._back_by

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """What the connection cannot live without."""
        return [*([self._task] if self._task is not None else []), *self.dialer.tasks]

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"peer {self.address}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.dialer.end()

    def send(self, message: AnyMessage) -> None:
        """Queues a message; it is lost if the connection is. Raises :class:`ProtocolError` for one over its cap."""
        self._hooks.post(message, encode(message), self.dialer.send)

    def lose(self, failure: Failure) -> None:
        """Ends the registration of a living peer: its rooms fail, its session is fenced, a new registration begins."""
        if self.registered:
            self._begin_another(failure)

    def _begin_another(self, failure: Failure) -> None:
        """Ends what there is of a registration with a living peer."""
        self._back_by = self._clock() + self._deadlines.connect_s
        self._end(failure)

    @property
    def _is_over(self) -> bool:
        """A property: the type checker would go on with the None that :meth:`_register` has set."""
        return self._lost is not None

    def _end(self, failure: Failure) -> None:
        if self._lost is None:
            self._lost = failure
            self._changed.set()

    async def _run(self) -> None:
        while True:
            try:
                engine = await self._sessions.open(self.address)
                self._on_event(self, Fenced())
                self.ours, self._number = self._make_manifest(engine), next(self._numbers)
                await self._register(self.ours)
                await self._live_until_lost()
            except Exception as error:
                log.exception("the connection to prefill %s failed", self.address)
                self._lost = Failure("peer_lost", f"the connection to prefill {self.address} failed: {error}")
                await asyncio.sleep(_REGISTER_CAP_S)
            await self._start_over()

    async def _start_over(self) -> None:
        failure = self._lost or Failure("peer_lost", f"prefill {self.address} is lost")
        log.warning("%s", failure.reason)
        self.state, self.reason, self.theirs = LinkState.CONNECTING, failure.reason, None
        self._why_lost = failure.reason
        self.dialer.close()
        try:
            self._on_event(self, PeerLost(failure))
            await self._sessions.fence(self.address)
            self._metrics.fenced()
            self._on_event(self, Fenced())
        except Exception:
            log.exception("losing prefill %s could not be handled", self.address)

    async def _register(self, ours: Manifest) -> None:
        """Connects and repeats ``Register`` until it is accepted, also after a refusal: the peer may be restarted.

        Returns without that if the peer says that this registration is over.
        """
        self._lost = None
        self.dialer.open()
        self.send(Register(self._number, ours))
        resend, opened = self._register_again(), self._clock()
        while not self.registered:
            await self._wait_for_change(_REGISTER_FIRST_S)
            now = self._clock()
            if self._must_open_again(now - opened, now - max(opened, self._heard)):
                self.dialer.open()
                resend, opened = self._register_again(), now
            if self._is_over:
                await asyncio.sleep(_REGISTER_CAP_S)  # a peer that says so again and again costs little
                return
            if not self.registered and resend.due(now):
                self.send(Register(self._number, ours))
        log.info("registered with prefill %s", self.address)
        self._why_lost = self._logged = ""
        self._on_event(self, PeerRegistered())

    def _register_again(self) -> Resend:
        return Resend(_REGISTER_FIRST_S, _REGISTER_CAP_S, self._clock())

    def _must_open_again(self, opened_s: float, silent_s: float) -> bool:
        """Whether ZMQ has given up, or the phase connect or register is over its deadline; then the reason says so."""
        if self.registered:
            return False
        is_connected, register_s = self.dialer.connected, self._deadlines.register_s
        if silent_s <= (register_s if is_connected else self._deadlines.connect_s):
            return self.dialer.given_up and opened_s > _REGISTER_CAP_S
        if is_connected:
            self._explain(f"prefill {self.address} is connected, but did not answer Register within {register_s:g} s")
        else:
            self.dialer.look()
        return True

    async def _live_until_lost(self) -> None:
        self._heartbeat = Heartbeat(self._deadlines.peer_s, self._clock())
        next_ping = 0.0
        while self._lost is None:
            now = self._clock()
            if now >= next_ping and self.ours is not None:
                self.send(Ping(self.ours.incarnation, self._number))
                next_ping = now + self._deadlines.ping_s
            if self._heartbeat.tick(now, TICK_S):
                silent_s = self._heartbeat.silent_for(now)
                self._end(Failure("peer_lost", f"prefill {self.address} was silent for {silent_s:.1f} s"))
            else:
                await self._wait_for_change(TICK_S)

    async def _wait_for_change(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):  # not wait_for: it may swallow the cancel that close() waits for
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()

    def _on_frames(self, frames: list[bytes]) -> None:
        self._metrics.received()
        self._heard = self._clock()
        try:
            self._take(frames)
        except Exception:
            log.exception("a control message of prefill %s could not be handled", self.address)
            self._metrics.dropped("error")

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 1:
            self._metrics.dropped("garbage")
            return
        try:
            message = decode(frames[0])
        except ProtocolError as error:
            self._metrics.dropped(error.kind)
            if isinstance(error, VersionMismatch):
                self._refuse("protocol_version", f"prefill {self.address}: {error}")
            return
        match message:
            case Registered() | Pong() if message.registration != self._number:
                self._metrics.dropped("stale")
            case Refused() if message.registration not in (0, self._number):
                self._metrics.dropped("stale")
            case Registered():
                self._on_registered(message)
            case Refused():
                values = f"prefill has {message.ours}, decode has {message.theirs}"
                words = f"prefill {self.address} refused this decode node: {message.field} differs: {values}"
                self._refuse(message.field, words)
            case Pong():
                self._on_pong(message)
            case PeerMessage():
                self._on_peer_message(message)
            case _:
                self._metrics.dropped("direction")

    def _on_registered(self, message: Registered) -> None:
        if self.ours is None or self._lost is not None:
            return
        if self.theirs is not None:
            if message.manifest.incarnation != self.theirs.incarnation:
                self.lose(Failure("peer_lost", f"prefill {self.address} has restarted"))
            return
        mismatch: Mismatch | None = compare(self.ours, message.manifest)
        if mismatch is not None:
            values = f"prefill has {mismatch.theirs}, decode has {mismatch.ours}"
            self._refuse(mismatch.field, f"decode refuses prefill {self.address}: {mismatch.field} differs: {values}")
            return
        self.theirs = message.manifest
        self.state, self.reason, self.refused_field = LinkState.REGISTERED, "", ""
        self._changed.set()

    def _on_pong(self, pong: Pong) -> None:
        """A ``Pong`` before ``Registered`` is the answer to a ``Register`` that came too late."""
        if self.theirs is not None and pong.prefill != self.theirs.incarnation:
            self.lose(Failure("peer_lost", f"prefill {self.address} has restarted"))
        elif not pong.registered:
            forgotten = Failure("peer_lost", f"prefill {self.address} has forgotten this registration")
            self._begin_another(forgotten)
        elif self.registered:
            self._heartbeat.heard(self._clock())

    def _on_peer_message(self, message: PeerMessage) -> None:
        if registration_of(message) != self.registration:
            self._metrics.dropped("stale")
        elif not isinstance(message, FromPrefill):
            self._metrics.dropped("direction")
        else:
            self._heartbeat.heard(self._clock())
            self._on_event(self, message)

    def _refuse(self, field: str, reason: str) -> None:
        if not self.registered and self.reason != reason:
            self._log_limit.warning("refused", reason)
            self._metrics.refused(refusal_label(field))
            self.state, self.reason, self.refused_field, self._back_by = LinkState.REFUSED, reason, field, 0.0

    def _on_trouble(self, finding: Finding) -> None:
        """There is no connection: a verdict of the process that was connected before is void."""
        if self.registered and finding.gone:
            self._end(Failure("peer_lost", f"prefill {self.address} is gone: {finding.reason}"))
        if self.registered or self.state is LinkState.REGISTERED:
            return
        if finding.refused:
            self._refuse(AUTH, finding.reason)
        else:
            self._explain(finding.reason)

    def _on_connected(self) -> None:
        """If a connection has come back: is this the process that we know?"""
        if self.registered and self.ours is not None:
            self.send(Ping(self.ours.incarnation, self._number))

    def _explain(self, reason: str) -> None:
        is_more = self._why_lost and reason not in self._why_lost
        words = f"{self._why_lost}; now: {reason}" if is_more else self._why_lost or reason
        if words != self.reason:
            self.state, self.reason, self.refused_field = LinkState.CONNECTING, words, ""
        is_new = not self._why_lost and self._clock() - self._started < self._deadlines.connect_s
        if words != self._logged and not is_new:
            self._logged = words
            log.warning("%s", words)
