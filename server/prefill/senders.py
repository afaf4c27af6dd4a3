"""What writes into the decode nodes' memory: one sender for each registration."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping

from server.node.context import NodeContext
from server.prefill.decode_peer import DecodePeer
from server.prefill.kv_sender import KVSender, Sender, SendResult
from server.transfer.engines.base import TransferEngine, open_registered

log = logging.getLogger(__name__)

_CLOSE_S = 5.0

MakeSender = Callable[[DecodePeer, Callable[[SendResult], None]], Sender]
"""Builds and starts the sender for a peer. It reports every batch to the function, from any thread."""


class Senders(Mapping[DecodePeer, Sender]):
    """The senders of all registered decode nodes, by peer.

    ``on_result`` gets the results of all of them, in the event loop in which this is built. ``make_sender`` None: a
    :class:`KVSender`, a thread with a transport endpoint of ``context.make_transport``.
    """

    def __init__(
        self, context: NodeContext, on_result: Callable[[SendResult], None], make_sender: MakeSender | None = None
    ) -> None:
        self._senders: dict[DecodePeer, Sender] = {}
        self._on_result = on_result
        self._clock = context.clock
        self._arena = context.arena
        self._make_transport = context.hooks.transport(context.make_transport)
        self._make_sender = make_sender or self._start_thread
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    def __getitem__(self, peer: DecodePeer) -> Sender:
        return self._senders[peer]

    def __iter__(self) -> Iterator[DecodePeer]:
        return iter(self._senders)

    def __len__(self) -> int:
        return len(self._senders)

    @property
    def threads(self) -> list[threading.Thread]:
        """What moves the rooms' state."""
        return [sender.thread for sender in self._senders.values() if sender.thread is not None]

    def start(self, peer: DecodePeer) -> None:
        """A decode node has registered: it gets its own sender."""
        self._senders[peer] = self._make_sender(peer, self._in_loop)

    def end(self, peer: DecodePeer, on_closed: Callable[[DecodePeer], None]) -> None:
        """A registration is over: its sender is closed, then ``on_closed`` is called."""
        task = asyncio.create_task(self._end(peer, self._senders.pop(peer), on_closed))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Closes all senders, and waits for those that are being closed."""
        await asyncio.gather(*(self._close(peer, sender) for peer, sender in self._senders.items()), *self._tasks)

    def _start_thread(self, peer: DecodePeer, on_result: Callable[[SendResult], None]) -> KVSender:
        name = f"sender {peer.incarnation[:8]}"
        sender = KVSender(self._open_transport, peer.manifest.session, on_result, name, clock=self._clock)
        sender.start()
        return sender

    def _open_transport(self) -> TransferEngine:
        return open_registered(self._make_transport, self._arena.ptr, self._arena.nbytes)

    def _in_loop(self, result: SendResult) -> None:
        """Takes a sender's result (in its thread)."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_result, result)

    async def _end(self, peer: DecodePeer, sender: Sender, on_closed: Callable[[DecodePeer], None]) -> None:
        await self._close(peer, sender)
        on_closed(peer)

    @staticmethod
    async def _close(peer: DecodePeer, sender: Sender) -> None:
        """Pieces still in flight after :data:`_CLOSE_S` are left to the decode node's fence."""
        if not await sender.aclose(_CLOSE_S):
            log.error("the sender thread of %s is stuck in the transport", peer)
