"""Clients that cost a server much and themselves little, by kind. What they do is drawn from a seed.

Every kind is bounded in time, connections and bytes. A server must refuse them or wait for them without harm to anybody
else; each client says how it was treated, as ``HTTP 400``, ``closed`` (without a word) or ``left`` (it went away).
"""

from __future__ import annotations

import contextlib
import enum
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import chain, repeat
from typing import Any
from urllib.parse import urlsplit

MIB = 1 << 20
CONNECT_S = 10.0
ANSWER_S = 60.0
"""For the answer to a whole request."""
N_CLIENTS = 6
N_HELD = 60
"""Connections that are held open at the same time."""
DRIP_S = 0.25
MAX_HEAD_NBYTES = 32 * MIB
"""A head grows until the server closes the connection, or to this size."""
GROWTH = 1.1
"""What a node's memory may be of what it was, when an attack is over and has been cleared away."""

Address = tuple[str, int]


class Attack(enum.StrEnum):
    BODIES = "bodies"
    """Bodies of megabytes: prompts that cannot fit, and bodies over the limit."""
    LISTS = "lists"
    """Lists and maps of very many small values."""
    HEADERS = "headers"
    """Heads and trailers without end, one header or a URL of megabytes."""
    SLOW = "slow"
    """Heads and bodies that come a few bytes at a time, or all but the end."""
    SILENT = "silent"
    """Connections on which nothing is said, and answers that nobody reads."""


def run(attack: Attack, url: str, seed: int, seconds: float) -> Counter[str]:
    """Attacks for about ``seconds``, at least one round of each client; how the clients were treated."""
    parts = urlsplit(url)
    address = (parts.hostname or "127.0.0.1", parts.port or 80)
    until = time.monotonic() + seconds
    treated: Counter[str] = Counter()
    lock = threading.Lock()

    is_held = attack in (Attack.SLOW, Attack.SILENT)

    def client(number: int) -> None:
        rng = random.Random(f"{attack} {seed} {number}")
        while True:
            outcome = _CLIENTS[attack](address, rng, until)
            with lock:
                treated[outcome] += 1
            if is_held or time.monotonic() > until:
                return

    n_clients = N_HELD if is_held else N_CLIENTS
    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(n_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return treated


def server_errors(treated: Counter[str]) -> list[str]:
    """Answers that are a fault of the server's. (503: it has no room for so many clients.)"""
    return [how for how in treated if how.startswith("HTTP 5") and how != "HTTP 503"]


# --- bodies and lists -------------------------------------------------------------------------------------------------


def _prompt(prompt: Any, **fields: Any) -> bytes:
    return _post("/v1/completions", {"prompt": prompt, "max_tokens": 1, **fields})


def _chat(content: str) -> bytes:
    return _post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 1})


def _post(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body, separators=(",", ":")).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + data


_BODIES: tuple[Callable[[], bytes], ...] = (
    lambda: _prompt("a" * 4_000_000),
    lambda: _prompt("7 apples and " * 400_000),
    lambda: _prompt("\u00e9\U0001f98a" * 350_000),
    lambda: _chat("a" * 5_000_000),
    lambda: _prompt("a" * 12_000_000),
    lambda: _prompt(["a" * 1_000_000] * 5),
)
_LISTS: tuple[Callable[[], bytes], ...] = (
    lambda: _prompt(["a"] * 400_000),
    lambda: _prompt([[20]] * 1_000_000),
    lambda: _prompt(["a" * 16_384] * 256),
    lambda: _prompt([20] * 2_000_000, echo=True),
    lambda: _prompt("x", stop_token_ids=[20] * 1_000_000),
    lambda: _prompt("x", logit_bias={str(i): 0 for i in range(300_000)}),
    lambda: _post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 150_000}),
)


@cache
def _made(make: Callable[[], bytes]) -> bytes:
    """A request that is made once for all clients."""
    return make()


def _whole(requests: Sequence[Callable[[], bytes]], address: Address, rng: random.Random, _until: float) -> str:
    leaves = rng.random() < 0.25
    return _say(address, [_made(rng.choice(requests))], leaves=leaves)


# --- headers ----------------------------------------------------------------------------------------------------------

_BEGIN = b"GET /health HTTP/1.1\r\nHost: x\r\n"
_CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
_SMALL = b"".join(b"X-%d: y\r\n" % i for i in range(5000))
_HEADS: tuple[tuple[bytes, bytes], ...] = (
    (_BEGIN, _SMALL),
    (_BEGIN + b"X: ", b"a" * 65_536),
    (b"GET /", b"a" * 65_536),
    (b"GET /health?", b"a=b&" * 16_384),
    (_CHUNKED, _SMALL),
    (_BEGIN + b"Cookie: ", b"a=b; " * 13_107),
)
"""How an endless head begins, and how it goes on."""


def _headers(address: Address, rng: random.Random, _until: float) -> str:
    begin, more = rng.choice(_HEADS)
    return _say(address, chain([begin], repeat(more, MAX_HEAD_NBYTES // len(more))), leaves=False)


# --- slow and silent clients ------------------------------------------------------------------------------------------


def _slow(address: Address, rng: random.Random, until: float) -> str:
    whole, big = _prompt([20, 30]), _made(_BODIES[0])
    pieces, pause_s = rng.choice(
        (
            ([big[:-1]], 0.0),
            ([whole[i : i + 1] for i in range(len(whole) - 1)], DRIP_S),
            ([whole[: whole.index(b"\r\n\r\n") - 1]], 0.0),
            ([big[:2000], *[big[2000 + i : 2001 + i] for i in range(5000)]], DRIP_S),
        )
    )
    return _say(address, pieces, leaves=True, pause_s=pause_s, until=until)


def _silent(address: Address, rng: random.Random, until: float) -> str:
    stream = _prompt([20, 30], stream=True).replace(b"Connection: close", b"X: y") * 20
    try:
        with socket.create_connection(address, timeout=CONNECT_S) as connection:
            connection.sendall(rng.choice((b"", b"", b"\r\n", stream)))
            time.sleep(max(0.0, until - time.monotonic()))
    except OSError:
        return "not connected"
    return "left"


_CLIENTS: dict[Attack, Callable[[Address, random.Random, float], str]] = {
    Attack.BODIES: partial(_whole, _BODIES),
    Attack.LISTS: partial(_whole, _LISTS),
    Attack.HEADERS: _headers,
    Attack.SLOW: _slow,
    Attack.SILENT: _silent,
}


def _say(address: Address, pieces: Iterable[bytes], *, leaves: bool, pause_s: float = 0.0, until: float = 0.0) -> str:
    """Says ``pieces``, each after ``pause_s``. Then reads the answer; one that ``leaves`` stays silent until ``until``
    and goes away. Ends as soon as the server does.
    """
    try:
        connection = socket.create_connection(address, timeout=CONNECT_S)
    except OSError:
        return "not connected"
    with connection:
        connection.settimeout(ANSWER_S)
        is_open = True
        try:
            for piece in pieces:
                connection.sendall(piece)
                if pause_s and not (is_open := _waits(connection, pause_s)):
                    break
                if until and time.monotonic() > until:
                    break
        except OSError:
            is_open = False
        if leaves and is_open and _waits(connection, until - time.monotonic()):
            return "left"
        return _answer(connection)


def _waits(connection: socket.socket, seconds: float) -> bool:
    """Whether the server says nothing for ``seconds``."""
    connection.settimeout(max(seconds, 1e-3))
    try:
        connection.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return True
    except OSError:
        pass
    finally:
        connection.settimeout(ANSWER_S)
    return False


def _answer(connection: socket.socket) -> str:
    with contextlib.suppress(OSError):
        head = connection.recv(4096).split()
        if len(head) > 1 and head[0].startswith(b"HTTP/"):
            return f"HTTP {head[1].decode('ascii', 'replace')}"
    return "closed"
