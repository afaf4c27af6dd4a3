"""The prefill nodes that a decode node may use: which is asked next, and what is known of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

from server.decode.prefill_link import PrefillLink

UNWILLING_S = 1.0
"""A prefill node that refused a room with 503 (it is full, or ends) is taken last for this time."""


class PeerPool:
    """``links``, with their load: ``outstanding`` counts the rooms under way with one."""

    def __init__(
        self,
        links: Sequence[PrefillLink],
        outstanding: Callable[[PrefillLink], int],
        clock: Callable[[], float],
    ) -> None:
        self._links = links
        self._outstanding = outstanding
        self._clock = clock
        self._unwilling_until: dict[PrefillLink, float] = {}

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """What the connections cannot live without."""
        return [task for link in self._links for task in link.tasks]

    @property
    def n_registered(self) -> int:
        return sum(link.registered for link in self._links)

    def pick(self, avoids: Collection[PrefillLink] = ()) -> PrefillLink | None:
        """The registered peer with the fewest rooms under way, but none of ``avoids``.

        One that has just refused a room comes last.
        """
        now = self._clock()
        willing = [link for link in self._links if link.registered and link not in avoids]
        return min(
            willing,
            key=lambda link: (self._unwilling_until.get(link, now) > now, self._outstanding(link)),
            default=None,
        )

    def is_unwilling(self, link: PrefillLink) -> None:
        """It has refused a room, as it would refuse any other now."""
        self._unwilling_until[link] = self._clock() + UNWILLING_S

    def is_new(self, link: PrefillLink) -> None:
        """It has registered: what was known of it is void."""
        self._unwilling_until.pop(link, None)

    def has_any(self) -> bool:
        """Whether a peer is registered, or about to be again."""
        return any(link.registered or link.coming_back for link in self._links)

    def why_none(self) -> str:
        reasons = "; ".join(link.reason for link in self._links if not link.registered)
        return f"no prefill node is registered: {reasons}"

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
            for link in self._links
        ]
