"""A prefill node's rooms with a real cache, one decode node, and an engine and a sender that do what a test says."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from server.cache.allocator import Allocator
from server.cache.arena import Arena
from server.cache.digest import StateDigests, StateParts
from server.cache.layout import ArenaLayout
from server.cache.prefix import PrefixCache
from server.cache.snapshots import Snapshot, SnapshotPoint
from server.engine.events import (
    ChunkComputed,
    Command,
    HitRefused,
    Prefill,
    PrefillFinished,
    Scrub,
    Scrubbed,
    SnapshotTaken,
)
from server.engine.request import SamplingParams, TokenLogprob
from server.failure import Failure
from server.faults.hooks import Hooks
from server.node.context import NodeContext
from server.prefill.decode_peer import DecodePeer
from server.prefill.events import BatchEnded
from server.prefill.kv_sender import SendJob
from server.prefill.node import PrefillSettings
from server.prefill.room_manager import PrefillRoomManager
from server.transfer.engines.loopback import LoopbackEngine
from server.transfer.frames import pack_tokens
from server.transfer.metrics import NodeMetrics
from server.transfer.protocol import (
    Abort,
    AnyMessage,
    Committed,
    Done,
    Registration,
    Reserve,
    RoomRequest,
    Sampling,
    room_ids,
)
from server.transfer.rooms import Heartbeat, RoomKey
from tests.support.fake_tokenizer import FakeTokenizer
from tests.transfer.support import IDENTITY, PAGE_SIZE, make_geometry, make_manifest

SAMPLING = Sampling(1, 0, 0.0, 1.0, 0, 0, (), (), False, None)
MANIFEST = make_manifest("decode", make_geometry(slots=9, pages=33))
REGISTRATION = Registration("a" * 32, MANIFEST.incarnation, 1)
SNAPSHOT_NBYTES = 100


def prompt_of(text: str) -> list[int]:
    """A page for each letter, and ``.`` for one token more."""
    return [ord(c) for c in text for _ in range(1 if c == "." else PAGE_SIZE)]


class KeptJobs:
    """A sender that keeps its batches until a test ends them."""

    thread = None

    def __init__(self) -> None:
        self.jobs: list[SendJob] = []

    def send(self, job: SendJob) -> None:
        self.jobs.append(job)

    def cancel(self, key: Hashable) -> None: ...

    def forget(self, key: Hashable) -> None: ...

    async def aclose(self, timeout_s: float) -> bool:
        return True


@dataclass
class Prefills:
    """Must be built in an event loop. ``commands`` are those for the engine, ``sent`` the messages to the decode node.

    ``clock`` stands still unless a test moves it.
    """

    pages: int = 17
    slots: int = 5
    snapshot_nbytes: int = 100 * SNAPSHOT_NBYTES
    hooks: Hooks = field(default_factory=Hooks)
    now: float = 0.0

    def __post_init__(self) -> None:
        geometry = make_geometry(slots=self.slots, pages=self.pages)
        self.arena = Arena(ArenaLayout.from_geometry(geometry), poison=True)
        self.allocator = Allocator(geometry, on_free=self.arena.scrub)
        self.cache = PrefixCache(
            self.allocator, self.arena.owners, ["model"], PAGE_SIZE, snapshot_nbytes=self.snapshot_nbytes
        )
        self.commands: list[Command] = []
        self.sent: list[AnyMessage] = []
        self.sender = KeptJobs()
        self.metrics = NodeMetrics(CollectorRegistry())
        context = NodeContext(
            submit_command=self.commands.append,
            make_transport=LoopbackEngine,
            arena=self.arena,
            allocator=self.allocator,
            identity=IDENTITY,
            tokenizer=FakeTokenizer(),
            sampling_defaults=SamplingParams(),
            metrics=self.metrics,
            hooks=self.hooks,
            clock=lambda: self.now,
            prefix_cache=self.cache,
        )
        settings = PrefillSettings(model_name="fake", max_context=8192, snapshot_every=0)
        self.manager = PrefillRoomManager(settings, context, lambda peer, on_result: self.sender)
        self.peer = DecodePeer(REGISTRATION, MANIFEST, b"D", Heartbeat(10.0, 0.0), self)
        self.manager.on_registered(self.peer)
        self._rooms = 0
        self._digests: dict[Hashable, StateDigests] = {}
        self.parts: dict[Hashable, StateParts] = {}
        """The digests that the engine reported, by room."""

    def send(self, routing_id: bytes, message: AnyMessage) -> None:
        self.sent.append(message)

    def is_connected(self, routing_id: bytes) -> bool:
        return True

    # --- the decode node ----------------------------------------------------------------------------------------------

    def reserve(self, text: str, *, offered: bytes = b"", salt: str = "", n_top: int | None = None) -> RoomKey:
        """A ``Reserve`` for :func:`prompt_of` ``text`` comes."""
        self._rooms += 1
        prompt = prompt_of(text)
        asked = RoomRequest(
            "r", pack_tokens(prompt), Sampling(1, 0, 0.0, 1.0, 0, 0, (), (), False, None, prompt_logprobs=n_top), salt
        )
        reserve = Reserve(
            **room_ids(REGISTRATION, self._rooms, 1),
            slot=1,
            pages=tuple(range(1, 1 - -len(prompt) // PAGE_SIZE + 1)),
            components=self.arena.layout.names,
            request=asked,
            silence_s=5.0,
            offered=offered,
        )
        self.manager.on_message(self.peer, reserve)
        return RoomKey.of(reserve)

    def abort(self, key: RoomKey) -> None:
        self.manager.on_message(self.peer, Abort(**room_ids(REGISTRATION, key.room, key.epoch), reason="bye"))

    def done(self, key: RoomKey) -> Done:
        return next(m for m in self.sent if isinstance(m, Done) and m.room == key.room)

    # --- the engine and the sender ------------------------------------------------------------------------------------

    def prefills(self) -> list[RoomKey]:
        """The rooms that the engine was given, in order."""
        return [command.key for command in self.commands if isinstance(command, Prefill)]  # type: ignore[misc]

    def command(self, key: RoomKey) -> Prefill:
        """The last one for a room."""
        return next(c for c in reversed(self.commands) if isinstance(c, Prefill) and c.key == key)

    def event(self, event: Any) -> None:
        self.manager.on_engine_event(event)

    def _digests_of(self, key: RoomKey) -> StateDigests:
        command = self.command(key)
        if key not in self._digests:
            self._digests[key] = StateDigests(self.arena, len(command.request.prompt_ids), command.placement)
        return self._digests[key]

    def compute(self, key: RoomKey, n_pages: int) -> None:
        """The engine has computed so many pages; what they hold depends on the prompt's tokens alone."""
        command = self.command(key)
        for page in range(command.placement.read_only, n_pages):
            first = command.placement.pages[page]
            fill = command.request.prompt_ids[page * PAGE_SIZE] % 256
            for component in self.arena.layout.page_components:
                start = component.offset + first * component.item_stride
                self.arena.buffer[start : start + component.rows * component.row_nbytes] = fill
        n = n_pages * PAGE_SIZE
        self.event(ChunkComputed(key, n, self._digests_of(key).take_pages(n)))

    def snapshot(self, key: RoomKey, point: SnapshotPoint) -> None:
        """The engine has taken a snapshot there."""
        self.event(SnapshotTaken(key, Snapshot(point.n, point.key, bytes(SNAPSHOT_NBYTES), 0)))

    def snapshots(self, key: RoomKey) -> None:
        """The engine computes a room's pages and takes all snapshots that are wanted."""
        for point in self.command(key).snapshots_at:
            self.compute(key, point.n // PAGE_SIZE)
            self.snapshot(key, point)

    def finish(self, key: RoomKey) -> None:
        """The engine has computed the prompt."""
        digests = self._digests_of(key)
        pages = digests.take_pages(len(self.command(key).request.prompt_ids))
        self.parts[key] = digests.finish()
        self.event(PrefillFinished(key, TokenLogprob(1, -0.5), self.parts[key], 0.1, 0.1, pages))

    def refuse(self, key: RoomKey, page: int | None) -> None:
        self._digests.pop(key, None)
        self.event(HitRefused(key, Failure("prefix_damaged", "not the bytes that were put there", "", "hit"), page))

    def applied(self) -> None:
        """Every batch has arrived."""
        for job in self.sender.jobs:
            self.manager.step(self.manager.reqs[job.key], BatchEnded(job.batch_id, None, quiesced=True))  # type: ignore[index]
        self.sender.jobs.clear()

    def scrubbed(self) -> None:
        """The engine answers every ``Scrub``."""
        for command in [command for command in self.commands if isinstance(command, Scrub)]:
            self.commands.remove(command)
            self.event(Scrubbed(command.key))

    def whole(self, key: RoomKey) -> Done:
        """A room from the engine's first step to its release."""
        self.snapshots(key)
        self.finish(key)
        self.applied()
        done = self.done(key)
        self.manager.on_message(self.peer, Committed(**room_ids(REGISTRATION, key.room, key.epoch)))
        self.scrubbed()
        return done

    def counts(self) -> dict[str, int]:
        """Pages by state, those of which there are any."""
        return {state: n for state, n in self.allocator.counts()["pages"].items() if n}
