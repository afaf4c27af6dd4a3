"""Where a node can be made to go wrong: :class:`Hooks`, which do nothing. ``--fault`` puts others in their place."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from server.cache.layout import Placement
from server.cache.prefix import CachedPage, PrefixCache, PrefixHit, page_key
from server.transfer.checks import Check
from server.transfer.engines.base import TransferEngine
from server.transfer.protocol import AnyMessage

Put = Callable[[bytes], None]
"""Hands one frame to a socket."""


@dataclass(frozen=True)
class Sending:
    """How the prefill node sends the state of one room, whose rows it reads at ``source``.

    Of the components ``unsent`` are not sent, ``unclaimed`` not claimed in ``Done``, and ``miscounted`` claimed with
    one row's bytes too few. ``skipped`` checks are not made. If it ``holds_pages``, nothing goes before the whole
    prompt is computed.
    """

    source: Placement
    unsent: frozenset[str] = frozenset()
    unclaimed: frozenset[str] = frozenset()
    miscounted: frozenset[str] = frozenset()
    skipped: frozenset[Check] = frozenset()
    holds_pages: bool = False


class Hooks:
    """What a node calls where something can be made to go wrong. ``key`` is a room's."""

    def describe(self) -> list[str]:
        """What is made to go wrong, for ``/server_info``."""
        return []

    def entered(self, phase: str) -> None:
        """A room has entered ``phase``."""

    def post(self, message: AnyMessage, frame: bytes, put: Put) -> None:
        """``message`` goes to the other node, as ``frame``."""
        put(frame)

    def transport(self, make_engine: Callable[[], TransferEngine]) -> Callable[[], TransferEngine]:
        """What makes the endpoints that the prefill node writes through."""
        return make_engine

    def sending(self, key: Hashable, n: int, placement: Placement) -> Sending:
        """The prefill node begins a room of ``n`` tokens in ``placement``."""
        return Sending(placement)

    def before_tail(self, key: Hashable, push: Callable[[], None], is_wanted: Callable[[], bool]) -> None:
        """The room's prompt is computed: ``push``, now or later, sends what is left, if it still ``is_wanted``."""
        push()

    def page_key(self, parent: bytes, ids: bytes) -> bytes:
        """The content key of a page (:func:`server.cache.prefix.page_key`)."""
        return page_key(parent, ids)

    def cache_hit(self, key: Hashable, hit: PrefixHit) -> PrefixHit | None:
        """The prefill node takes a part of a prompt from its cache: what it takes, if anything. Called again for the
        same room if there was no memory for it.
        """
        return hit

    def offering(self, key: Hashable, pages: Sequence[CachedPage], cache: PrefixCache) -> None:
        """The decode node offers ``pages`` of ``cache``, which are pinned."""

    def memory_free(self, key: Hashable) -> None:
        """The room's memory on the prefill node is given back."""

    def received(self, key: Hashable, n: int, placement: Placement, check: Callable[[frozenset[Check]], None]) -> None:
        """The state of a room of ``n`` tokens is in ``placement`` on the decode node: ``check``, now or later, makes
        every check but those that it is given.
        """
        check(frozenset())
