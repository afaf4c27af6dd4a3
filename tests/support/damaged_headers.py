"""Safetensors files with a damaged header: seeded, and each of its kind."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable

HUGE = (-1, 0, 1, 7, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 10**30)


def damaged(image: bytes, seed: int) -> bytes:
    """``image`` of a safetensors file, with one to three kinds of damage in its header or its length."""
    rng = random.Random(seed)
    for damage in rng.sample(KINDS, rng.randint(1, 3)):
        n_header = int.from_bytes(image[:8], "little")
        head, rest = image[8 : 8 + n_header], image[8 + n_header :]
        image = damage(rng, head, rest)
    return image


def whole(head: bytes, rest: bytes) -> bytes:
    """A file with this header and these tensors."""
    return len(head).to_bytes(8, "little") + head + rest


def _other_byte(rng: random.Random, head: bytes, rest: bytes) -> bytes:
    at = rng.randrange(max(1, len(head)))
    return whole(head[:at] + bytes([rng.randrange(256)]) + head[at + 1 :], rest)


def _other_length(rng: random.Random, head: bytes, rest: bytes) -> bytes:
    n = rng.choice([*HUGE, len(head) - 1, len(head) + 1, len(head) + len(rest), 99_999_999, rng.getrandbits(64)])
    return (n % (1 << 64)).to_bytes(8, "little") + head + rest


def _cut(rng: random.Random, head: bytes, rest: bytes) -> bytes:
    image = whole(head, rest)
    return image[: rng.randrange(len(image))]


def _longer(rng: random.Random, head: bytes, rest: bytes) -> bytes:
    return whole(head, rest) + rng.randbytes(rng.choice([1, 8, 4096]))


def _other_number(rng: random.Random, head: bytes, rest: bytes) -> bytes:
    numbers = list(re.finditer(rb"\d+", head))
    if not numbers:
        return whole(head, rest)
    place = rng.choice(numbers)
    new = rng.choice([*map(str, HUGE), "1.5", "1e9", "null", '"8"', "[]", "NaN", "true", str(rng.randrange(10_000))])
    return whole(head[: place.start()] + new.encode() + head[place.end() :], rest)


def _other_dtype(rng: random.Random, head: bytes, rest: bytes) -> bytes:
    new = rng.choice([b"F32", b"BF16", b"I8", b"U8", b"F8_E4M3", b"F8_E8M0", b"F4", b"I64", b"BOOL", b"F7", b""])
    return whole(re.sub(rb'"dtype":"[A-Z0-9_]+"', b'"dtype":"' + new + b'"', head, count=rng.randint(1, 3)), rest)


def _without_a_part(rng: random.Random, head: bytes, rest: bytes) -> bytes:
    at, n = rng.randrange(max(1, len(head))), rng.randint(1, 200)
    return whole(head[:at] + head[at + n :], rest)


def _a_part_twice(rng: random.Random, head: bytes, rest: bytes) -> bytes:
    at, n = rng.randrange(max(1, len(head))), rng.randint(1, 200)
    return whole(head[: at + n] + head[at:], rest)


def _nested(rng: random.Random, head: bytes, rest: bytes) -> bytes:
    at, n = rng.randrange(max(1, len(head))), rng.choice([100, 200_000])
    return whole(head[:at] + rng.choice([b"[", b'{"a":']) * n + head[at:], rest)


def _without_a_tensor(rng: random.Random, head: bytes, rest: bytes) -> bytes:
    try:
        described = json.loads(head)
        del described[rng.choice(list(described))]
    except (ValueError, RecursionError, LookupError, TypeError):
        return whole(head[1:], rest)
    return whole(json.dumps(described).encode(), rest)


def _other_header(rng: random.Random, _head: bytes, rest: bytes) -> bytes:
    return whole(rng.choice([b"", b"{}", b"null", b"[]", b"{", b"\0" * 64, b'{"a":{}}', b'{"__metadata__":3}']), rest)


KINDS: tuple[Callable[[random.Random, bytes, bytes], bytes], ...] = (
    _other_byte,
    _other_length,
    _cut,
    _longer,
    _other_number,
    _other_dtype,
    _without_a_part,
    _a_part_twice,
    _nested,
    _without_a_tensor,
    _other_header,
)
