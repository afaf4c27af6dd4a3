"""Bytes that are hardly HTTP, or no ZMQ, and frames that nobody should send, for any server."""

from __future__ import annotations

import contextlib
import random
import socket
from urllib.parse import urlsplit

import zmq

from hostile.frames import FrameFuzzer
from server.transfer.addresses import split_address
from server.transfer.manifest import new_incarnation
from server.transfer.protocol import Ping

CONNECT_S = 10.0


def send_raw(address: str, rng: random.Random) -> None:
    """Bytes that are no ZMQ, or begin like it and go on otherwise."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    begin = rng.choice((b"", b"GET / HTTP/1.1\r\n\r\n", greeting[: rng.randrange(64)], greeting))
    _say(split_address(address), begin + rng.randbytes(rng.choice((0, 1, 100, 10_000))))


def send_frames(address: str, rng: random.Random) -> None:
    """Some connections that are no ZMQ, and one with hundreds of frames of a stranger."""
    for _ in range(rng.randint(1, 8)):
        send_raw(address, rng)
    fuzzer = FrameFuzzer(rng, [Ping(new_incarnation(), 1)])
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 1000)
        dealer.connect(f"tcp://{address}")
        for _ in range(rng.randint(100, 1000)):
            dealer.send_multipart(fuzzer.draw())


def send_broken(url: str, n: int, rng: random.Random) -> None:
    """``n`` connections with bytes that are no HTTP, that end in the middle, or that are not what they say."""
    body = b'{"prompt": [20, 30], "max_tokens": 2}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    whole = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    kinds = (
        lambda: rng.randbytes(rng.choice((1, 100, 5000))),
        lambda: whole[: rng.randrange(len(whole))],
        lambda: head + b"Content-Length: 1000000\r\n\r\n" + body,
        lambda: head + b"Content-Length: -5\r\n\r\n" + body,
        lambda: head + b"Content-Length: 99999999999999999999\r\n\r\n" + body,
        lambda: head + b"Content-Length: 7\r\n\r\n[[[[[[[",
        lambda: head + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n" + body,
        lambda: head + b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\n" + body,
        lambda: head + b"X: " + b"a" * 100_000,
        lambda: b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        lambda: b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
        lambda: b"GET /" + rng.randbytes(50) + b" HTTP/9.9\r\n\r\n",
        lambda: b"BREW /coffee HTTP/1.1\r\nHost: x\r\n\r\n",
        lambda: whole * 3,
    )
    parts = urlsplit(url)
    for _ in range(n):
        _say((parts.hostname or "", parts.port or 80), rng.choice(kinds)(), listens=rng.random() < 0.5)


def _say(address: tuple[str, int], data: bytes, *, listens: bool = False) -> None:
    """Connects, says ``data``, perhaps listens for a moment, and goes away."""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=CONNECT_S) as connection:
        connection.sendall(data)
        if listens:
            connection.settimeout(0.2)
            connection.recv(100)
