"""The client that costs little: it reads an answer's bytes when they are there, however they were cut."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest
from benchmark.client import ask_all, decode, run_client
from benchmark.measurement import BenchFailed

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(n_tokens: int) -> bytes:
    return b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": n_tokens}}).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def answered(pieces: Sequence[bytes], n_tokens: int) -> list[int]:
    """What the client counts when a server sends these pieces, one after the other."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        ((stream, _),) = await ask_all(f"http://127.0.0.1:{port}", [(1, 2)], n_tokens)
    assert stream.times_s == sorted(stream.times_s)
    return stream.counts


def counts(pieces: Sequence[bytes], n_tokens: int) -> list[int]:
    return run_client(answered(pieces, n_tokens))


def test_every_event_is_counted() -> None:
    whole = HEAD + chunk(event(1)) + chunk(b": waiting\n\n") + chunk(event(2) + event(4)) + chunk(DONE) + chunk(b"")
    assert counts([whole], 4) == [1, 2, 4]


def test_events_are_whole_wherever_they_are_cut() -> None:
    body = event(1) + event(3) + DONE
    whole = HEAD + chunk(body[:20]) + chunk(body[20:]) + chunk(b"")
    assert counts([whole[i : i + 7] for i in range(0, len(whole), 7)], 3) == [1, 3]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nbusy", "503 Service Unavailable.*busy"),
        (HEAD + chunk(b'data: {"error": {"message": "lost"}}\n\n') + chunk(b""), "lost"),
        (HEAD + chunk(event(1)), "has 1 tokens, expected 2"),
        (b"", "answered ''"),
    ],
)
def test_an_answer_that_is_none_fails_by_name(answer: bytes, reason: str) -> None:
    with pytest.raises(BenchFailed, match=reason):
        counts([answer], 2)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(BenchFailed, match=r"http://127.0.0.1:1 cannot be reached"):
        decode("http://127.0.0.1:1", [(1,)], 1)
