"""The transport sessions of a decode node: one for each prefill node, never the same twice while there are others."""

from __future__ import annotations

import pytest

from server.cache.arena import Arena
from server.cache.layout import ArenaLayout
from server.decode.transport_sessions import TransportSessions
from server.transfer.engines.base import EngineClosed
from server.transfer.engines.loopback import LoopbackEngine
from tests.transfer.support import make_geometry


async def test_a_session_is_not_called_like_one_before() -> None:
    """A prefill node that was frozen since an earlier registration would write to it."""
    names = iter(("a", "a", "b", "a", "b", "c", "c", "a", "b", "c"))
    made: list[LoopbackEngine] = []

    def transport() -> LoopbackEngine:
        made.append(LoopbackEngine())
        made[-1].session = next(names)
        return made[-1]

    sessions = TransportSessions(transport, Arena(ArenaLayout.from_geometry(make_geometry())))
    peers = ("first", "first", "second")
    assert [(await sessions.open(peer)).session for peer in peers] == ["a", "b", "c"]
    assert (await sessions.open("first")).session == "a", "no other one is to be had: the oldest"
    await sessions.close()
    assert sessions.engines == {}
    for engine in made:
        with pytest.raises(EngineClosed):
            engine.submit("a", 0, 0, 1)
