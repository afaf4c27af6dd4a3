"""What the prefill node holds for one decode registration: a sender with its own transport engine, and probes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from server.cache.arena import Arena
from server.cache.layout import PROBE_NBYTES, Run
from server.prefill.bootstrap import DecodePeer
from server.prefill.kv_sender import Piece, Sender, SendJob, SendOutcome, SendResult
from server.threads import call_in_thread
from server.transfer.engines.base import TransferEngine, open_registered
from server.transfer.protocol import PROBE_BLOCK_NBYTES, Probe, ProbeDone, clip, registration_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProbeKey:
    """Names a probe write to the sender."""

    nonce: int
    decode: str


class PeerSender:
    """One registration of a decode process and the thread that writes into its memory.

    A new registration gets a new one. ``probe`` says how the last readiness probe ended: when (on ``time.monotonic()``)
    and what was wrong, if anything; None before the first. ``answered`` is what the decode node was told of it.
    """

    def __init__(
        self,
        peer: DecodePeer,
        arena: Arena,
        make_transport: Callable[[], TransferEngine],
        on_result: Callable[[SendResult], None],
    ) -> None:
        self.peer = peer
        self.probe: tuple[float, str] | None = None
        self.answered: ProbeDone | None = None
        self._arena = arena
        self._make_transport = make_transport
        self.sender = Sender(self._make_engine, peer.manifest.session, on_result, f"sender {peer.incarnation[:8]}")
        self.sender.start()

    def _make_engine(self) -> TransferEngine:
        return open_registered(self._make_transport, self._arena.ptr, self._arena.nbytes)

    def describe_probe(self) -> str:
        if self.probe is None:
            return f"{self.peer}: not probed yet"
        at, reason = self.probe
        words = reason or f"ok over {self.peer.manifest.transport_kind}/{self.peer.manifest.transport}"
        return f"{self.peer}: probe transfer {time.monotonic() - at:.1f} s ago: {words}"

    async def close(self, timeout_s: float) -> None:
        """Ends the thread; pieces still in flight after ``timeout_s`` are left to the decode node's fence."""
        if not await call_in_thread("close sender", self.sender.close, timeout_s):
            log.error("the sender thread of %s is stuck in the transport", self.peer)


class ProbeWriter:
    """Answers probes: writes a random block through the real sender, one at a time per lane of the probe region.

    A probe that comes again is answered once more and not written once more: the block of a late copy would land where
    another probe is under way by now. A decode node has one probe at a time, and counts their nonces upwards.
    """

    def __init__(self, arena: Arena, deadline_s: float, answer: Callable[[DecodePeer, ProbeDone], None]) -> None:
        self._arena = arena
        self._deadline_s = deadline_s
        self._answer = answer
        self._free_lanes = list(range(PROBE_NBYTES // PROBE_BLOCK_NBYTES))
        self._running: dict[ProbeKey, tuple[PeerSender, Probe, int, int]] = {}

    def start(self, target: PeerSender, probe: Probe) -> None:
        key = ProbeKey(probe.nonce, probe.decode)
        last = target.answered
        if key in self._running or (last is not None and probe.nonce < last.nonce):
            return
        if last is not None and probe.nonce == last.nonce:
            self._answer(target.peer, last)
            return
        if not self._free_lanes:
            self.refuse(target, probe, "too many probes at once")
            return
        lane = self._free_lanes.pop()
        offset, block = lane * PROBE_BLOCK_NBYTES, os.urandom(PROBE_BLOCK_NBYTES)
        self._arena.write(Run(offset, PROBE_BLOCK_NBYTES), block)
        self._running[key] = (target, probe, lane, xxhash.xxh3_64(block).intdigest())
        destination = target.peer.manifest.arena_base + probe.offset
        piece = Piece("probe", self._arena.ptr + offset, destination, PROBE_BLOCK_NBYTES)
        target.sender.send(SendJob(key, 0, (piece,), time.monotonic() + self._deadline_s))

    def on_result(self, key: ProbeKey, result: SendResult) -> None:
        running = self._running.pop(key, None)
        if running is None:
            return
        target, probe, lane, digest = running
        self._free_lanes.append(lane)
        target.sender.forget(key)
        reason = "" if result.outcome is SendOutcome.APPLIED else result.reason or result.outcome
        target.probe = (time.monotonic(), reason)
        target.answered = self._reply(target, probe, digest, reason)

    def refuse(self, target: PeerSender, probe: Probe, reason: str) -> None:
        """Answers without a write."""
        self._reply(target, probe, 0, reason)

    def _reply(self, target: PeerSender, probe: Probe, digest: int, reason: str) -> ProbeDone:
        done = ProbeDone(*registration_of(probe), probe.nonce, digest, clip(reason))
        self._answer(target.peer, done)
        return done
