from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from server.api.http_connections import Body, ConnectionManager
from server.api.http_limits import HttpLimits, Refusal


class Gone:
    """A connection whose client has just left: nothing can be told to it, and it is not closed yet."""

    def refuse(self, refusal: Refusal) -> None: ...

    def give_way(self) -> None: ...


def test_a_client_that_has_just_left_does_not_hold_up_those_that_stay() -> None:
    manager = ConnectionManager(HttpLimits(max_held_body_nbytes=1 << 20), CollectorRegistry())
    gone, stays = Gone(), Gone()
    bodies = Body(nbytes=1 << 20), Body(nbytes=1 << 20)
    manager.hold(gone, bodies[0])
    with pytest.raises(Refusal) as refusal:
        manager.hold(stays, bodies[1])
    assert refusal.value.code == "too_many_bodies"
    for body in bodies:
        manager.release(body)
    manager.hold(stays, Body(nbytes=1 << 19))
