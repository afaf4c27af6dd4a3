"""Probe writes of the prefill node: whether what it writes for a decode node arrives there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import xxhash

from server.cache.arena import Arena
from server.cache.layout import PROBE_NBYTES, Run
from server.prefill.decode_peer import DecodePeer
from server.prefill.kv_sender import Piece, Sender, SendJob, SendOutcome, SendResult
from server.transfer.protocol import PROBE_BLOCK_NBYTES, Probe, ProbeDone, clip, registration_of


@dataclass(frozen=True)
class ProbeKey:
    """Names a probe write to the sender."""

    nonce: int
    decode: str


@dataclass(frozen=True)
class _Running:
    peer: DecodePeer
    sender: Sender
    probe: Probe
    lane: int
    digest: int


@dataclass(frozen=True)
class _Ended:
    """When a probe write ended, what was wrong if anything, and the answer to the decode node."""

    at: float
    reason: str
    answer: ProbeDone


class ProbeWriter:
    """Answers probes: writes a random block through the real sender, one at a time per lane of the probe region.

    A probe that comes again is answered once more and not written once more: the block of a late copy would land where
    another probe is under way by now. A decode node has one probe at a time, and counts their nonces upwards.
    """

    def __init__(self, arena: Arena, deadline_s: float, clock: Callable[[], float]) -> None:
        self._arena = arena
        self._deadline_s = deadline_s
        self._clock = clock
        self._free_lanes = list(range(PROBE_NBYTES // PROBE_BLOCK_NBYTES))
        self._running: dict[ProbeKey, _Running] = {}
        self._last: dict[DecodePeer, _Ended] = {}

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def n_free_lanes(self) -> int:
        return len(self._free_lanes)

    def ready(self, peers: Iterable[DecodePeer]) -> tuple[bool, str]:
        """Whether the last probe write into each of ``peers`` that was probed arrived, with a description of all."""
        peers = list(peers)
        passed = not any(peer in self._last and self._last[peer].reason for peer in peers)
        return passed, "; ".join(map(self._describe, peers))

    def _describe(self, peer: DecodePeer) -> str:
        last = self._last.get(peer)
        if last is None:
            return f"{peer}: not probed yet"
        words = last.reason or f"ok over {peer.manifest.transport_kind}/{peer.manifest.transport}"
        return f"{peer}: probe transfer {self._clock() - last.at:.1f} s ago: {words}"

    def start(self, peer: DecodePeer, sender: Sender, probe: Probe) -> None:
        key = ProbeKey(probe.nonce, probe.decode)
        last = self._last.get(peer)
        if key in self._running or (last is not None and probe.nonce < last.answer.nonce):
            return
        if last is not None and probe.nonce == last.answer.nonce:
            peer.send(last.answer)
            return
        if not self._free_lanes:
            self.refuse(peer, probe, "too many probes at once")
            return
        lane = self._free_lanes.pop()
        offset, block = lane * PROBE_BLOCK_NBYTES, os.urandom(PROBE_BLOCK_NBYTES)
        self._arena.write(Run(offset, PROBE_BLOCK_NBYTES), block)
        self._running[key] = _Running(peer, sender, probe, lane, xxhash.xxh3_64(block).intdigest())
        destination = peer.manifest.arena_base + probe.offset
        piece = Piece("probe", self._arena.ptr + offset, destination, PROBE_BLOCK_NBYTES)
        sender.send(SendJob(key, 0, (piece,), self._clock() + self._deadline_s))

    def on_result(self, key: ProbeKey, result: SendResult) -> None:
        running = self._running.pop(key, None)
        if running is None:
            return
        peer = running.peer
        self._free_lanes.append(running.lane)
        running.sender.forget(key)
        reason = "" if result.outcome is SendOutcome.APPLIED else result.reason or result.outcome
        answer = _answer(running.probe, running.digest, reason)
        if not peer.lost:
            self._last[peer] = _Ended(self._clock(), reason, answer)
        peer.send(answer)

    def refuse(self, peer: DecodePeer, probe: Probe, reason: str) -> None:
        """Answers without a write."""
        peer.send(_answer(probe, 0, reason))

    def on_lost(self, peer: DecodePeer) -> None:
        """A registration is over. Its writes under way end with its sender."""
        self._last.pop(peer, None)


def _answer(probe: Probe, digest: int, reason: str) -> ProbeDone:
    return ProbeDone(*registration_of(probe), probe.nonce, digest, clip(reason))
