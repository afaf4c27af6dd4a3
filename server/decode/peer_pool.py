"""The prefill nodes that a decode node may use: their connections, which is asked next, and what is known of each."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from server.decode.dialer import MakeDialer, ZmqDialer
from server.decode.prefill_link import LinkEvent, PeerRegistered, PrefillLink
from server.decode.probe import Prober
from server.decode.settings import DecodeSettings
from server.decode.transport_sessions import TransportSessions
from server.node.context import NodeContext
from server.transfer.engines.base import TransferEngine
from server.transfer.manifest import Manifest, TransportIdentity, build_manifest
from server.transfer.protocol import ProbeDone
from server.transfer.rooms import PeerLost

UNWILLING_S = 1.0
"""A prefill node that refused a room because it is full, or ends, is taken last for this time."""


class PeerPool:
    """One link for each prefill node of the settings; there may be none.

    ``on_event`` gets what the links report, but for probes. ``outstanding`` counts the rooms under way with one.
    """

    def __init__(
        self,
        settings: DecodeSettings,
        context: NodeContext,
        incarnation: str,
        *,
        make_dialer: MakeDialer | None,
        on_event: Callable[[PrefillLink, LinkEvent], None],
        outstanding: Callable[[PrefillLink], int],
    ) -> None:
        self.prober = Prober(context.arena, settings.deadlines, context.clock)
        self.sessions = TransportSessions(context.make_transport, context.arena)
        self.components = tuple(name for name in context.arena.layout.names if name not in settings.own_components)
        """What is asked of the prefill nodes."""
        self._context = context
        self._clock = context.clock
        self._incarnation = incarnation
        self._spec_tokens = settings.spec_tokens
        self._on_event = on_event
        self._outstanding = outstanding
        self._unwilling_until: dict[PrefillLink, float] = {}
        zmq_dialer = partial(ZmqDialer, guard=settings.guard, deadlines=settings.deadlines, clock=context.clock)
        numbers = itertools.count(1)
        self.links = [
            PrefillLink(
                address,
                context,
                settings.deadlines,
                make_dialer=make_dialer or zmq_dialer,
                sessions=self.sessions,
                make_manifest=self._manifest,
                on_event=self._on_link_event,
                numbers=numbers,
            )
            for address in settings.prefill or ()
        ]

    def start(self) -> None:
        for link in self.links:
            link.start()

    async def close(self) -> None:
        """Ends the connections, not yet the transport sessions."""
        for link in self.links:
            await link.close()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """What the connections cannot live without."""
        return [task for link in self.links for task in link.tasks]

    def _manifest(self, engine: TransferEngine) -> Manifest:
        arena = self._context.arena
        return build_manifest(
            "decode",
            self._incarnation,
            self._context.identity,
            TransportIdentity.of(engine),
            arena.layout,
            arena.ptr,
            spec_tokens=self._spec_tokens,
            components=self.components,
            session=engine.session,
        )

    def _on_link_event(self, link: PrefillLink, event: LinkEvent) -> None:
        match event:
            case ProbeDone():
                self.prober.on_done(event)
                return
            case PeerRegistered():
                self._unwilling_until.pop(link, None)
            case PeerLost():
                self.prober.on_lost(link, event.failure)
            case _:
                pass
        self._on_event(link, event)

    @property
    def n_registered(self) -> int:
        return sum(link.registered for link in self.links)

    def pick(self, avoids: Collection[PrefillLink] = ()) -> PrefillLink | None:
        """The registered peer with the fewest rooms under way, but none of ``avoids``.

        One that has just refused a room comes last.
        """
        now = self._clock()
        willing = [link for link in self.links if link.registered and link not in avoids]
        return min(
            willing,
            key=lambda link: (self._unwilling_until.get(link, now) > now, self._outstanding(link)),
            default=None,
        )

    def is_unwilling(self, link: PrefillLink) -> None:
        """It has refused a room, as it would refuse any other now."""
        self._unwilling_until[link] = self._clock() + UNWILLING_S

    def has_any(self) -> bool:
        """Whether a peer is registered, or about to be again."""
        return any(link.registered or link.coming_back for link in self.links)

    def why_none(self) -> str:
        reasons = "; ".join(link.reason for link in self.links if not link.registered)
        return f"no prefill node is registered: {reasons}"

    async def ready(self) -> tuple[bool, str]:
        """Whether a probe write of every registered peer really arrives, and there is one; else why not."""
        return await self.prober.ready(self.links)

    def describe(self) -> list[dict[str, Any]]:
        """The peers as ``/server_info`` shows them."""
        return [
            {
                "address": link.address,
                "state": link.state,
                "reason": link.reason,
                "refused_field": link.refused_field,
                "incarnation": link.theirs.incarnation if link.theirs else None,
                "transport": link.transport,
                "rooms": self._outstanding(link),
            }
            for link in self.links
        ]
