"""One ZMQ handshake with a prefill node and nothing more: whether it is there and takes this node's key."""

from __future__ import annotations

import asyncio
import contextlib

import zmq
import zmq.asyncio

from server.transfer.addresses import is_ipv6, split_address
from server.transfer.auth import Guard
from server.transfer.diagnosis import Finding, Wire, end_wire_events, look_at, wire_events

HANDSHAKE_S = 3.0
_ON_THE_WAY = (Wire.CONNECTED, Wire.LOST)


async def try_handshake(address: str, guard: Guard) -> Finding | None:
    """Why no connection to ``host:port`` comes about within :data:`HANDSHAKE_S`; None if one does. Nothing is sent."""
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.IPV6, is_ipv6(split_address(address)[0]))
    guard.secure_decode(dealer)
    events = wire_events(dealer)
    event = Wire.NOT_CONNECTED
    try:
        dealer.connect(f"tcp://{address}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HANDSHAKE_S):
                async for happened in events:
                    if happened.what is Wire.READY:
                        return None
                    if happened.what not in _ON_THE_WAY:
                        event = happened.what
                        break
        return await look_at(address, guard.mechanism, event)
    finally:
        end_wire_events(dealer)
        dealer.close()
        context.destroy()
