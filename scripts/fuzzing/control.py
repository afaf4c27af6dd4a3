"""Sends frames of :mod:`hostile.frames` to both nodes of a pair, from several connections, and keeps account."""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
from hostile.frames import RAGGED, FrameFuzzer, Parts, fate_of
from hostile.garbage import send_raw
from hostile.rogue_peer import decode_manifest

from fuzzing.messages import REGISTRATION, ROOMS, from_decode, from_prefill
from server.transfer.frames import ProtocolError, decode, encode
from server.transfer.manifest import Manifest
from server.transfer.protocol import MAX_FRAME_NBYTES, AnyMessage, Refused, Register

N_CONNECTIONS = 4
SHARE_TO_DECODE = 0.2
REPLACED_EVERY, RAW_EVERY, OVERSIZE_EVERY = 5_000, 1_000, 20_000
"""Frames after which a connection is replaced, bytes that are no ZMQ are sent, and a frame beyond every cap is."""
ANSWER_S = 60.0
NOWHERE = "127.0.0.1:1"
"""A transport session that nobody has: what is written there fails."""


@dataclass
class Account:
    """What was sent to one node, by the fate that it must meet there."""

    sent: Counter[str] = field(default_factory=Counter)

    def add(self, parts: Parts) -> None:
        self.sent[fate_of(parts)] += 1

    @property
    def n_sent(self) -> int:
        return self.sent.total()

    def mistakes(self, before: dict[str, float], after: dict[str, float]) -> list[str]:
        """Where the node's own counters say otherwise. Frames of its real peer are understood, so they don't count."""

        def grown(name: str) -> float:
            return after.get(name, 0.0) - before.get(name, 0.0)

        found = []
        for kind in ("garbage", "corrupt", "malformed", "version", "oversize"):
            counted = grown(f"pd_control_frames_dropped_total{{reason={kind}}}")
            doubtful = self.sent[RAGGED] if kind == "malformed" else 0
            if not self.sent[kind] <= counted <= self.sent[kind] + doubtful:
                found.append(f"{kind}: {self.sent[kind]} sent, {counted:g} counted")
        if grown("pd_control_frames_received_total") < self.n_sent:
            found.append(f"{self.n_sent} sent, {grown('pd_control_frames_received_total'):g} received")
        if errors := grown("pd_control_frames_dropped_total{reason=error}"):
            found.append(f"{errors:g} exceptions while a frame was handled (see the log)")
        return found


class ToPrefill:
    """Several DEALER connections to the bootstrap port. One half of them registers as decode nodes that fit."""

    def __init__(self, address: str, info: dict[str, Any], decode_incarnation: str, rng: random.Random) -> None:
        self.account = Account()
        self._address, self._rng = address, rng
        self._context = zmq.Context()
        self._prefill = info["incarnation"]
        self._manifests = [decode_manifest(info, NOWHERE) for _ in range(N_CONNECTIONS)]
        self._sockets = [self._open() for _ in range(N_CONNECTIONS)]
        stolen = msgspec.structs.replace(self._manifests[0], incarnation=decode_incarnation)
        self._unfit = msgspec.structs.replace(stolen, model="another")
        messages = from_decode(self._prefill, decode_incarnation, self._unfit, ROOMS)
        messages += [
            Register(REGISTRATION, stolen),
            *from_prefill(self._prefill, decode_incarnation, self._unfit, ROOMS[:1]),
        ]
        self._noisy = FrameFuzzer(rng, messages)
        self._peers = [FrameFuzzer(rng, _in_registration(self._prefill, m)) for m in self._manifests]
        self._n = 0

    def send_one(self) -> None:
        self._n += 1
        index = self._rng.randrange(N_CONNECTIONS)
        if self._n % REPLACED_EVERY == 0:
            self._replace(index)
        if self._n % RAW_EVERY == 0:
            send_raw(self._address, self._rng)
        if self._n % OVERSIZE_EVERY == 0:
            self._send_oversize()
        is_peer = index < N_CONNECTIONS // 2
        if is_peer and self._n % 500 < N_CONNECTIONS:
            self._send(index, (encode(Register(REGISTRATION, self._manifests[index])),))
        parts = (self._peers[index] if is_peer and self._rng.random() < 0.5 else self._noisy).draw()
        self._send(index, parts)
        if self._n % 100 == 0:
            self._drain()

    def settle(self) -> None:
        """Returns when the node has taken every frame. Raises :class:`TimeoutError` if it does not answer."""
        for index in range(N_CONNECTIONS):
            self._ask(index)

    def close(self) -> None:
        for each in self._sockets:
            each.close(0)
        self._context.term()

    def _open(self) -> zmq.Socket[bytes]:
        opened = self._context.socket(zmq.DEALER)
        opened.setsockopt(zmq.SNDTIMEO, round(ANSWER_S * 1000))
        opened.connect(f"tcp://{self._address}")
        return opened

    def _replace(self, index: int) -> None:
        self._ask(index)
        self._sockets[index].close(0)
        self._sockets[index] = self._open()

    def _send(self, index: int, parts: Parts) -> None:
        self._sockets[index].send_multipart(parts)
        self.account.add(parts)

    def _ask(self, index: int) -> None:
        """A question and its own answer: frames of one connection are taken in their order."""
        question = secrets.token_hex(8)
        self._send(index, (encode(Register(REGISTRATION, msgspec.structs.replace(self._unfit, model=question))),))
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            if self._sockets[index].poll(1000):
                with contextlib.suppress(ProtocolError):
                    answer = decode(self._sockets[index].recv())
                    if isinstance(answer, Refused) and answer.theirs == question:
                        return
        raise TimeoutError(f"the prefill node did not answer within {ANSWER_S:g} s")

    def _drain(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(zmq.Again):
                while True:
                    each.recv(zmq.NOBLOCK)

    def _send_oversize(self) -> None:
        """ZMQ itself ends such a connection, so it gets one of its own, and is not in the account."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as throwaway:
            throwaway.setsockopt(zmq.LINGER, 1000)
            throwaway.connect(f"tcp://{self._address}")
            throwaway.send(bytes(MAX_FRAME_NBYTES + 1))


class ToDecode:
    """A prefill node that the decode node was given, and that never says anything which fits."""

    def __init__(self, rng: random.Random) -> None:
        self.account = Account()
        self._rng = rng
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDTIMEO, round(ANSWER_S * 1000))
        self.address = f"127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._routing_id = b""

    def begin(self, prefill_info: dict[str, Any], decode_incarnation: str) -> None:
        """Waits for the decode node's ``Register``."""
        self._routing_id = self._register()
        manifest = decode_manifest(prefill_info, NOWHERE)
        manifest = msgspec.structs.replace(manifest, role="prefill", model="another", session="")
        messages = from_prefill(prefill_info["incarnation"], decode_incarnation, manifest, ROOMS)
        messages += from_decode(prefill_info["incarnation"], decode_incarnation, manifest, ROOMS[:1])
        self._fuzzer = FrameFuzzer(self._rng, messages)

    def send_one(self) -> None:
        parts = self._fuzzer.draw()
        if sum(map(len, parts)) > 200_000:
            return  # over the cap that ZMQ has on this side: it would end the connection
        self._socket.send_multipart((self._routing_id, *parts))
        self.account.add(parts)
        with contextlib.suppress(zmq.Again):
            while True:
                self._socket.recv_multipart(zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()

    def _register(self) -> bytes:
        if not self._socket.poll(round(ANSWER_S * 1000)):
            raise TimeoutError(f"the decode node did not register within {ANSWER_S:g} s")
        return self._socket.recv_multipart()[0]


def _in_registration(prefill: str, manifest: Manifest) -> list[AnyMessage]:
    """All that a decode node says once it is registered, and ``Register`` no more."""
    messages = from_decode(prefill, manifest.incarnation, manifest, ROOMS)
    return [message for message in messages if not isinstance(message, Register)]


def attack(to_prefill: ToPrefill, to_decode: ToDecode, n_frames: int, rng: random.Random) -> Iterator[int]:
    """Sends ``n_frames``, about one in five to the decode node; yields how many were sent."""
    for n_sent in range(1, n_frames + 1):
        (to_decode if rng.random() < SHARE_TO_DECODE else to_prefill).send_one()
        yield n_sent
    to_prefill.settle()
