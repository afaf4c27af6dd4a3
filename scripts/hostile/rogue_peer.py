"""A decode node that misbehaves: registers with a real prefill node, reserves rooms, and does not play along."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq
import zmq.asyncio
from cluster import Node

from server.cache.layout import ArenaLayout
from server.cache.specs import CacheGeometry
from server.model.checkpoint import has_draft
from server.model.config import load_config
from server.model.state import state_components
from server.node.options import BUNDLED_MODEL
from server.transfer.engines.mooncake import MooncakeEngine
from server.transfer.frames import decode, encode, pack_tokens
from server.transfer.manifest import Manifest, ModelIdentity, TransportIdentity, build_manifest, new_incarnation
from server.transfer.protocol import (
    Abort,
    AnyMessage,
    Failed,
    Ping,
    Quiesced,
    Refused,
    Register,
    Registered,
    Registration,
    Reserve,
    RoomIds,
    RoomRequest,
    Sampling,
    Writes,
    room_ids,
)

REGISTRATION = 1
"""Every rogue registers once."""
NOWHERE = 1 << 40
"""An address at which no process has memory that Mooncake knows."""
PING_S = 1.0
PAGES, SLOTS = 32, 4
M = TypeVar("M")


class RogueFailed(Exception):
    """The prefill node did not answer as it must."""


def decode_manifest(info: dict[str, Any], session: str, *, draft: bool = False) -> Manifest:
    """What a decode node says that fits the prefill node whose ``/server_info`` is ``info``."""
    config = load_config(BUNDLED_MODEL)
    components = state_components(
        config, info["dtype"], 0, draft=draft, kv_dtype=info["kv_dtype"], index_dtype=info["index_dtype"]
    )
    geometry = CacheGeometry(info["page_size"], PAGES + 1, SLOTS + 1, config.sliding_window, 0, components)
    layout = ArenaLayout.from_geometry(geometry)
    return build_manifest(
        "decode",
        new_incarnation(),
        ModelIdentity(
            info["model_fingerprint"],
            info["tokenizer_fingerprint"],
            info["dtype"],
            info["kernels"],
            info["deterministic"],
            info["numerics"],
        ),
        TransportIdentity("mooncake", "any", "tcp"),
        layout,
        NOWHERE,
        spec_tokens=0,
        components=layout.names,
        session=session,
    )


@dataclass
class RoguePeer:
    """Registered at a prefill node, with memory at ``manifest.arena_base`` that may not be there."""

    manifest: Manifest
    prefill: str
    _socket: zmq.asyncio.Socket

    def send(self, message: AnyMessage) -> None:
        self._socket.send(encode(message), zmq.NOBLOCK)

    async def receive(self, kind: type[M], timeout_s: float) -> M:
        """The next message of ``kind``; others are passed over. Raises :class:`RogueFailed`."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    message = decode(await self._socket.recv())
                    if isinstance(message, kind):
                        return message
                    if isinstance(message, Refused):
                        raise RogueFailed(f"refused: {message}")
        except TimeoutError:
            raise RogueFailed(f"no {kind.__name__} within {timeout_s:g} s") from None

    def reserve(self, prompt: Sequence[int], room: int = 1) -> RoomIds:
        """Asks for ``prompt``; its room's ids."""
        ids = room_ids(Registration(self.prefill, self.manifest.incarnation, REGISTRATION), room, 1)
        sampling = Sampling(4, 0, 0.0, 1.0, 0, None, (), (), True, None)
        reserve = Reserve(
            **ids,
            slot=1,
            pages=tuple(range(1, 1 + -(-len(prompt) // self.manifest.page_size))),
            components=tuple(entry.name for entry in self.manifest.components),
            request=RoomRequest(f"rogue-{room}", pack_tokens(prompt), sampling),
            silence_s=30.0,
        )
        self.send(reserve)
        return ids

    async def refusal(self, ids: RoomIds, timeout_s: float) -> Failed:
        """How the prefill node fails the room; the room is ended on both sides when this returns."""
        failed = await self.receive(Failed, timeout_s)
        self.send(Abort(**ids, reason="the rogue has seen enough"))
        if failed.writes is Writes.SETTLING:
            await self.receive(Quiesced, timeout_s)
        return failed


async def _ping_for_ever(peer: RoguePeer) -> None:
    while True:
        peer.send(Ping(peer.manifest.incarnation, REGISTRATION))
        await asyncio.sleep(PING_S)


@asynccontextmanager
async def rogue_peer(
    prefill: Node,
    session: str = "",
    *,
    change: Callable[[Manifest], Manifest] = lambda manifest: manifest,
    timeout_s: float = 10.0,
) -> AsyncIterator[RoguePeer]:
    """A peer of the node ``prefill``, gone without a word at the end of the block.

    Without ``session`` it has a Mooncake endpoint of its own, in which nothing is registered. ``change`` makes another
    manifest of an acceptable one. Raises :class:`RogueFailed` if it is refused.
    """
    info = await asyncio.to_thread(prefill.info)
    engine = await asyncio.to_thread(MooncakeEngine, transport="tcp")
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    try:
        dealer.connect(f"tcp://{prefill.address}")
        manifest = change(decode_manifest(info, session or engine.session, draft=has_draft(BUNDLED_MODEL)))
        peer = RoguePeer(manifest, "", dealer)
        peer.send(Register(REGISTRATION, manifest))
        peer.prefill = (await peer.receive(Registered, timeout_s)).manifest.incarnation
        pinging = asyncio.create_task(_ping_for_ever(peer))
        try:
            yield peer
        finally:
            pinging.cancel()
    finally:
        dealer.close()
        context.term()
        await asyncio.to_thread(engine.close)


@asynccontextmanager
async def silent_port() -> AsyncIterator[str]:
    """``host:port`` that takes connections and answers nothing: a Mooncake endpoint whose process is frozen."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
