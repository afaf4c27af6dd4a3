"""What a soak run will do, drawn from its seed alone: the same seed and sizes give the same plan on any machine.

Rooms come in episodes: some clients and one disturbance beside them. A deck of disturbances is shuffled and played to
its end before the next one (an era), so that a run of two hundred rooms has each of them. In an era one role survives:
it is frozen and shot at, but never ended, so that a leak of every disturbance would add up in it.
"""

from __future__ import annotations

import enum
import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.asking import VOCABULARY, Question
from hostile.http_clients import Attack

EDGES = (
    1, 3, 4, 5, 18, 63, 64, 65, 127, 128, 129, 255, 256, 257, 383, 384, 511, 512, 513, 1025,
)  # fmt: skip
"""Prompt lengths at which a group, a window or a page begins or ends."""
N_PREFIXES = 8
"""Beginnings that many prompts share, so that nodes find them in their caches."""
ROOMS_PER_EPISODE = 8
"""On average; by up to three eighths more or fewer."""
EPISODE_S = 2.0
"""Clients of an episode start, and its disturbance strikes, within this time."""


class Kind(enum.StrEnum):
    """The disturbances."""

    QUIET = "quiet"
    KILL = "kill"
    """kill -9, and a restart on the same ports."""
    TERMINATE = "terminate"
    """SIGTERM, an orderly end with exit code 0, and a restart on the same ports."""
    FREEZE_SHORT = "freeze_short"
    """SIGSTOP for less than a peer may be silent: nobody may fail."""
    FREEZE_LONG = "freeze_long"
    """SIGSTOP until the other node has given the peer up."""
    ZMQ_GARBAGE = "zmq_garbage"
    HTTP_GARBAGE = "http_garbage"
    FLOOD = "flood"
    """A stranger writes more pieces than Mooncake's queue holds into the probe region of D, in one batch."""
    BAD_ADDRESS = "bad_address"
    """A decode node registers whose memory cannot be written."""
    VANISHING_PEER = "vanishing_peer"
    """A decode node registers, reserves and is gone."""
    FAILED_WRITES = "failed_writes"
    """The transport of P refuses writes, or reports them lost and writes them later, or holds them back."""
    LOST_MESSAGES = "lost_messages"
    """Control messages of a node are lost, sent twice, or sent out of order."""
    SILENT_PEER = "silent_peer"
    """A decode node registers whose Mooncake port takes connections and answers nothing."""
    BIG_BODIES = "big_bodies"
    LONG_LISTS = "long_lists"
    ENDLESS_HEADS = "endless_heads"
    SLOW_CLIENTS = "slow_clients"
    SILENT_CLIENTS = "silent_clients"
    """The five kinds of hostile clients, all at one node's HTTP port."""
    LATE_MESSAGES = "late_messages"
    """Control messages are held back until their registration is over, and come in the next one."""
    FLUSH = "flush"
    """A node forgets all prefixes that it keeps, while rooms read them."""


HOSTILE = {
    Kind.BIG_BODIES: Attack.BODIES,
    Kind.LONG_LISTS: Attack.LISTS,
    Kind.ENDLESS_HEADS: Attack.HEADERS,
    Kind.SLOW_CLIENTS: Attack.SLOW,
    Kind.SILENT_CLIENTS: Attack.SILENT,
}
HARMLESS = frozenset(
    {
        Kind.QUIET,
        Kind.FREEZE_SHORT,
        Kind.ZMQ_GARBAGE,
        Kind.HTTP_GARBAGE,
        Kind.FLOOD,
        Kind.BAD_ADDRESS,
        Kind.VANISHING_PEER,
        Kind.SILENT_PEER,
        Kind.LOST_MESSAGES,
        Kind.FLUSH,
        *HOSTILE,
    }
)
"""Beside these every right request must be answered."""
_OF_PREFILL = (
    Kind.ZMQ_GARBAGE,
    Kind.BAD_ADDRESS,
    Kind.VANISHING_PEER,
    Kind.SILENT_PEER,
    Kind.FAILED_WRITES,
    Kind.LATE_MESSAGES,
)
"""Only a prefill node has the port, or the writes, for them."""
DECK = (*Kind, Kind.KILL, Kind.KILL, Kind.TERMINATE, Kind.FREEZE_LONG)


@dataclass(frozen=True)
class Event:
    """One disturbance: ``at_s`` after the episode's start, for ``for_s`` where it lasts.

    ``target`` is ``decode`` or a prefill node, ``prefill0``, ``prefill1``. ``seed`` is for what is random in it.
    """

    kind: Kind
    target: str
    at_s: float
    for_s: float
    seed: int


@dataclass(frozen=True)
class Room:
    """One client: asks ``question`` at ``start_s`` and goes away ``abort_s`` later (None: stays to the end)."""

    number: int
    question: int
    stream: bool
    start_s: float
    abort_s: float | None


@dataclass(frozen=True)
class Episode:
    number: int
    rooms: tuple[Room, ...]
    event: Event


@dataclass(frozen=True)
class Plan:
    """The whole run."""

    seed: int
    prefill_nodes: int
    questions: tuple[Question, ...]
    episodes: tuple[Episode, ...]

    @property
    def n_rooms(self) -> int:
        return sum(len(episode.rooms) for episode in self.episodes)

    @property
    def digest(self) -> str:
        """Tells plans apart: two reports with the same digest are of the same run."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def make_plan(
    seed: int,
    n_rooms: int,
    *,
    prefill_nodes: int = 1,
    rooms_per_episode: int = ROOMS_PER_EPISODE,
    n_prefixes: int = N_PREFIXES,
    max_context: int = 8192,
) -> Plan:
    """A run of exactly ``n_rooms`` clients. ``max_context`` is the servers', in tokens."""
    spread = rooms_per_episode * 3 // 8
    rng = random.Random(f"soak {seed}")
    prefixes = _prefixes(random.Random(f"soak prefixes {seed}"), n_prefixes)
    questions = tuple(_questions(rng, max(24, n_rooms // 4), prefixes, max_context))
    events = _events(rng, prefill_nodes)
    episodes: list[Episode] = []
    first = 0
    while first < n_rooms:
        size = min(rooms_per_episode + rng.randint(-spread, spread), n_rooms - first)
        rooms = tuple(_room(rng, first + i, len(questions)) for i in range(size))
        episodes.append(Episode(len(episodes), rooms, next(events)))
        first += size
    return Plan(seed, prefill_nodes, questions, tuple(episodes))


def _room(rng: random.Random, number: int, n_questions: int) -> Room:
    aborts = rng.random() < 0.2
    return Room(
        number=number,
        question=rng.randrange(n_questions),
        stream=rng.random() < 0.6,
        start_s=round(rng.uniform(0, EPISODE_S), 3),
        abort_s=round(rng.uniform(0, 1.5), 3) if aborts else None,
    )


def _events(rng: random.Random, prefill_nodes: int) -> Iterator[Event]:
    """Eras of shuffled decks, without an end. Prefill and decode take turns in surviving."""
    prefills = [f"prefill{i}" for i in range(prefill_nodes)]
    kept = rng.choice(("prefill", "decode"))
    while True:
        may_end = ["decode"] if kept == "prefill" else prefills
        for kind in rng.sample(DECK, len(DECK)):
            targets = may_end if kind in (Kind.KILL, Kind.TERMINATE) else ["decode", *prefills]
            if kind in _OF_PREFILL:
                targets = prefills
            if kind is Kind.FLOOD:
                targets = ["decode"]
            for_s = rng.uniform(0.5, 1.5) if kind is Kind.FREEZE_SHORT else rng.uniform(4.5, 6.0)
            at_s = rng.uniform(0, EPISODE_S)
            yield Event(kind, rng.choice(targets), round(at_s, 3), round(for_s, 3), rng.randrange(2**32))
        kept = "prefill" if kept == "decode" else "decode"


# --- requests ---------------------------------------------------------------------------------------------------------

_WORDS = ("Ann", "Tom", "has", "and", "then", "apples", "12", "7", "more", "gives", "to", "How", "many", "?")
_STOPS = (["."], [" 1", "4 "], ["####"], [" and"])


def _prefixes(rng: random.Random, count: int) -> list[list[int]]:
    """Some pages long each; every third one begins with the one before it, and parts from it on some page."""
    found: list[list[int]] = []
    for i in range(count):
        shared = found[-1][: rng.randrange(256, 1024)] if i % 3 == 2 else []
        found.append(shared + rng.choices(VOCABULARY, k=rng.randint(300, 1500) - len(shared) // 2))
    return found


def _questions(
    rng: random.Random, count: int, prefixes: Sequence[Sequence[int]], max_context: int
) -> Iterator[Question]:
    """One in twelve is wrong on purpose. With ``prefixes`` every second prompt of ids begins with one of them."""
    for i in range(count):
        if i % 12 == 5:
            yield _wrong(rng, max_context)
        elif i % 12 == 8:
            yield Question("/v1/chat/completions", {"messages": _messages(rng), **_sampling(rng), "logprobs": True})
        else:
            prompt = _prompt(rng)
            if prefixes and isinstance(prompt, list) and rng.random() < 0.5:
                prompt = [*rng.choice(prefixes), *prompt[:700]]
            body = {"prompt": prompt, **_sampling(rng)}
            if rng.random() < 0.15:
                body["cache_salt"] = rng.choice(("one", "two"))
            if rng.random() < 0.7:
                body["logprobs"] = rng.choice((0, 0, 2))
            yield Question("/v1/completions", body)


def _prompt(rng: random.Random) -> list[int] | str:
    draw = rng.random()
    if draw < 0.1:
        return " ".join(rng.choices(_WORDS, k=rng.randint(3, 60)))
    n = rng.choice(EDGES) if draw < 0.6 else rng.randint(1, 700) if draw < 0.95 else rng.randint(1500, 3000)
    return rng.choices(VOCABULARY, k=n)


def _messages(rng: random.Random) -> list[dict[str, str]]:
    return [{"role": "user", "content": " ".join(rng.choices(_WORDS, k=rng.randint(3, 60)))}]


def _sampling(rng: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {"max_tokens": rng.choice((1, 2, 8, 16, 32, 64, 200))}
    if rng.random() < 0.5:
        fields["temperature"] = 0
    else:
        fields |= {"temperature": round(rng.uniform(0.5, 1.3), 2), "seed": rng.randrange(2**31)}
        fields |= rng.choice(({}, {"top_p": 0.9}, {"top_k": 20}, {"top_p": 0.95, "top_k": 50}))
    if rng.random() < 0.7:
        fields["ignore_eos"] = True
    if rng.random() < 0.2:
        fields["stop"] = rng.choice(_STOPS)
    if rng.random() < 0.1:
        fields["n"] = rng.choice((2, 3))
    return fields


def _wrong(rng: random.Random, max_context: int) -> Question:
    """A request that must be refused with 400, at once and without a room."""
    prompt = rng.choices(VOCABULARY, k=20)
    body: dict[str, Any] = rng.choice(
        (
            {"prompt": rng.choices(VOCABULARY, k=max_context), "max_tokens": 1},
            {"prompt": [*prompt, 10**6]},
            {"prompt": prompt, "max_tokens": max_context},
            {"prompt": prompt, "temperature": "hot"},
            {"prompt": []},
            {"prompt": prompt, "n": 0},
        )
    )
    return Question("/v1/completions", body, status=400)
