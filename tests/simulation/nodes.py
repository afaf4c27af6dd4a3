"""The nodes of a simulation: the real managers, wired as the real nodes wire them, on simulated ports."""

from __future__ import annotations

import asyncio
import itertools
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from prometheus_client import CollectorRegistry

from server.cache.allocator import ItemState
from server.decode.request_manager import RequestManager
from server.decode.routed_rooms import has_arrived
from server.decode.settings import DecodeSettings
from server.engine.generation import NodeGeneration
from server.engine.request import FinishReason, GenerationRequest, SamplingParams, TokenOutput
from server.failure import Failure, RequestFailed
from server.node.base import Manager
from server.node.context import NodeContext
from server.prefill.bootstrap import Bootstrap
from server.prefill.decode_peer import DecodePeer
from server.prefill.kv_sender import SendResult
from server.prefill.node import PrefillSettings
from server.prefill.room_manager import PrefillRoomManager
from server.transfer.diagnosis import Finding
from server.transfer.manifest import build_manifest
from server.transfer.metrics import NodeMetrics
from server.transfer.protocol import Registration
from tests.simulation.engine import SimulatedEngine
from tests.simulation.loop import Process
from tests.simulation.memory import LONGEST_PROMPT, MAX_TOKENS, PAGE_TOKENS, SimulatedTransport, make_memory
from tests.simulation.network import SimulatedDialer, SimulatedSocket
from tests.simulation.sender import SimulatedSender
from tests.support.fake_tokenizer import FakeTokenizer
from tests.support.records import faults_of
from tests.transfer.support import IDENTITY, LOOPBACK

if TYPE_CHECKING:
    from server.engine.request import TokenizerLike
    from tests.simulation.world import World

MAX_CONTEXT = 64
LONGEST_DOWN_S, LONGEST_STOP_S = 3.0, 2.0
TICK_S = 0.4
KEPT_ROOMS = 256
COUNTED = ("pd_fences", "pd_retries", "pd_control_frames_dropped", "pd_check_failures")


@dataclass(eq=False)
class Client:
    """One request that ``node`` has taken."""

    node: SimulatedNode
    request: GenerationRequest
    room: int
    generation: NodeGeneration
    aborted_in: str = ""
    """The phase of its room in which the client went away, if it did."""
    heard: list[TokenOutput | RequestFailed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generation.listen(self.heard.append)

    @property
    def is_decode(self) -> bool:
        return isinstance(self.node, SimulatedDecode)

    @property
    def outputs(self) -> list[TokenOutput]:
        return [item for item in self.heard if isinstance(item, TokenOutput)]

    @property
    def has_heard_of_prompt(self) -> bool:
        """That it is computed."""
        return any(output.token_ids or output.finish_reason is FinishReason.LENGTH for output in self.outputs)

    @property
    def name(self) -> str:
        return f"the client of {self.request.request_id} at {self.node.address}"


class SimulatedNode(ABC):
    """One place in the network, and the processes that live there one after the other.

    A crash forgets everything, and the clients of the dead process with it.
    """

    role: str
    manager: Manager
    longest_request: int
    extra_rows: int

    def __init__(self, world: World, address: str, n_slots: int, seed: int) -> None:
        self.address = address
        self.life = 0
        self.world, self._n_slots, self._rng = world, n_slots, random.Random(seed)
        self.process = Process(world.loop)

    def start(self) -> None:
        """Begins a new life."""
        self.life += 1
        self.process = Process(self.world.loop)
        self.refused: Counter[str] = Counter()
        self._n_pages = n_pages = self._n_slots * -(-self.longest_request // PAGE_TOKENS)
        self.memory = make_memory(
            self.world,
            self._n_slots,
            n_pages,
            self.extra_rows,
            self._rng.randrange(1 << 30),
            is_cached=self.world.is_cached,
            keys_collide=self.world.keys_collide,
        )
        self.metrics = NodeMetrics(CollectorRegistry())
        self.engine = SimulatedEngine(self.world, self.process, self.memory)
        self.process.run(self._begin)

    def crash(self) -> None:
        if not self.process.is_dead:
            self.note_phases("crash of")
            self.check_said()
            self.end()
            self.world.sessions.close_all_of(self.memory)
            self.world.network.hung_up(self.address)
            self.world.forget_clients_of(self)
            self.world.later(self.world.rng.uniform(0, LONGEST_DOWN_S), self.start)

    def end(self) -> None:
        """The process is no more. What it counted is kept."""
        if not self.process.is_dead:
            self.process.kill()
            if (cache := self.memory.cache) is not None:
                counts = cache.counts
                for what in ("evicted_pages", "evicted_snapshots", "collisions"):
                    self.world.seen[f"{what} on {self.role}"] += getattr(counts, what)
            for metric in self.metrics.registry.collect():
                for sample in metric.samples if metric.name in COUNTED else ():
                    if sample.name.endswith("_total"):
                        self.world.seen[" ".join([metric.name, *sample.labels.values()])] += int(sample.value)

    def rot(self) -> None:
        """Something that is cached here is damaged."""
        if what := self.memory.rot(self.world.rng):
            self.world.seen[f"a {what} rots on {self.role}"] += 1

    def note_phases(self, what: str) -> None:
        """That something happens to this node now, in these phases of its requests."""
        for phase in set(self.phases().values()):
            self.world.seen[f"{what} {self.role} in {phase}"] += 1

    @abstractmethod
    def phases(self) -> dict[int, str]:
        """Where its rooms stand, by their ids."""

    def stop(self) -> None:
        """A process that is told to end refuses everything, tells its clients so at once, and ends a little later."""
        if not self.process.is_dead:
            self.note_phases("stop of")
            self.process.run(self.manager.refuse_all, Failure("shutting_down", "simulated"))
            for client in self.world.clients_of(self):
                self.world.check(client.generation.ended, f"{client.name} was not told that {self.address} stops")
            self.process.later(self.world.rng.uniform(0, LONGEST_STOP_S), self.crash)

    def _tick(self) -> None:
        """As the node's ticker does, but not as often: most ticks find nothing to do."""
        self.manager.tick()
        self.process.later(TICK_S, self._tick)

    @abstractmethod
    def _begin(self) -> None: ...

    def ask(self, request: GenerationRequest) -> None:
        """A client comes, if somebody listens."""
        self.process.run(self._ask, request)

    def _ask(self, request: GenerationRequest) -> None:
        try:
            room = request.routed.room if request.routed is not None else self._free_room()
            self.world.clients.append(Client(self, request, room, self._submit(request, room)))
        except RequestFailed as failure:
            self.world.refused.append(failure)
            self.refused[failure.code] += 1

    @abstractmethod
    def _submit(self, request: GenerationRequest, room: int) -> NodeGeneration: ...

    def _free_room(self) -> int:
        """For a request of the node's own. The ids come again, as soon as it is finished with them."""
        return next(room for room in itertools.count(100) if room not in self.phases())

    @property
    @abstractmethod
    def left(self) -> list[object]:
        """What is not over yet."""

    def check_over(self) -> None:
        self.world.check(self.memory.allocator.all_free, f"a slot or page leaked on {self.address}")
        counts = self.memory.allocator.counts()
        n_free = counts["slots"][ItemState.FREE]
        self.world.check(n_free == self._n_slots, f"{self._n_slots - n_free} slots are missing on {self.address}")
        if self.memory.cache is not None:
            self.memory.cache.flush()
        pages = self.memory.allocator.counts()["pages"]
        is_free = pages[ItemState.FREE] == sum(pages.values()) == self._n_pages
        self.world.check(is_free, f"pages are missing on {self.address}: {pages}")
        listed = self.manager.records.listing(KEPT_ROOMS)
        self.world.check(not listed.running, f"{self.address} has records of rooms that do not end: {listed.running}")
        self.check_said()

    def check_said(self) -> None:
        """At the end of a life: what the node says of its requests is what their clients were told."""
        for record in self.manager.records.listing(KEPT_ROOMS).ended:
            self.world.check(not (faults := faults_of(record)), f"{self.address}, room {record.room}: {faults}")
            self.world.seen[f"record of {self.role}: {record.outcome}"] += 1

    def _node_context(self) -> NodeContext:
        return NodeContext(
            submit_command=self.engine.submit,
            make_transport=lambda: SimulatedTransport(self.world.sessions, self.memory),
            arena=self.memory.arena,
            allocator=self.memory.allocator,
            identity=IDENTITY,
            tokenizer=cast("TokenizerLike", FakeTokenizer()),
            sampling_defaults=SamplingParams(),
            metrics=self.metrics,
            clock=self.world.loop.time,
            prefix_cache=self.memory.cache,
        )

    def _incarnation(self) -> str:
        return f"{self._rng.randrange(1 << 128):032x}"


class SimulatedPrefill(SimulatedNode):
    """The real room manager and the real registrations."""

    role = "prefill"
    manager: PrefillRoomManager
    longest_request = LONGEST_PROMPT
    extra_rows = 0

    def _begin(self) -> None:
        settings = PrefillSettings(
            model_name="simulated", max_context=MAX_CONTEXT, snapshot_every=2, deadlines=self.world.deadlines
        )
        context = self._node_context()
        layout = self.memory.arena.layout
        manifest = build_manifest(
            "prefill",
            self._incarnation(),
            IDENTITY,
            LOOPBACK,
            layout,
            self.memory.arena.ptr,
            spec_tokens=0,
            components=layout.names,
        )
        self.manager = PrefillRoomManager(settings, context, self._make_sender)
        socket = SimulatedSocket(self.world, self.process, self.address)
        bootstrap = Bootstrap(
            manifest,
            self.manager,
            socket,
            settings.deadlines,
            context.metrics,
            clock=context.clock,
            is_refused=self._is_refused,
        )
        bootstrap.start()
        socket.start(bootstrap)
        self.engine.on_event = self.manager.on_engine_event
        self._tick()

    def _make_sender(self, peer: DecodePeer, on_result: Callable[[SendResult], None]) -> SimulatedSender:
        return SimulatedSender(self.world, self.process, self.memory, peer.manifest.session, on_result)

    async def _is_refused(self, session: str) -> bool:
        return not self.world.sessions.is_open(session)

    def _submit(self, request: GenerationRequest, room: int) -> NodeGeneration:
        return self.manager.submit(request)

    def phases(self) -> dict[int, str]:
        return {key.room: req.room.phase.value for key, req in self.manager.reqs.items()}

    @property
    def left(self) -> list[object]:
        return [*self.manager.reqs, *["a request over HTTP"] * self.manager.routed_rooms.n_http]


class SimulatedDecode(SimulatedNode):
    """The real request manager, with its room manager, its connections and their transport sessions."""

    role = "decode"
    manager: RequestManager
    longest_request = LONGEST_PROMPT + MAX_TOKENS
    extra_rows = 2

    def __init__(self, world: World, address: str, n_slots: int, seed: int, prefills: tuple[str, ...]) -> None:
        super().__init__(world, address, n_slots, seed)
        self._prefills = prefills

    def _begin(self) -> None:
        settings = DecodeSettings(
            model_name="simulated", max_context=MAX_CONTEXT, prefill=self._prefills, deadlines=self.world.deadlines
        )
        self.manager = RequestManager(settings, self._node_context(), self._incarnation(), self._make_dialer)
        self.engine.on_event = self.manager.on_engine_event
        self.manager.start()
        self._tick()

    def _make_dialer(
        self,
        address: str,
        on_frames: Callable[[list[bytes]], None],
        on_trouble: Callable[[Finding], None],
        on_connected: Callable[[], None],
    ) -> SimulatedDialer:
        return SimulatedDialer(self.world, self.process, self.address, address, on_frames, on_trouble, on_connected)

    def _submit(self, request: GenerationRequest, room: int) -> NodeGeneration:
        return self.manager.submit(request, room=room)

    def check_said(self) -> None:
        super().check_said()
        clients, failures = self.world.clients_of(self), self.refused.copy()
        failures.update(item.code for client in clients for item in client.heard if isinstance(item, RequestFailed))
        told = {
            "tokens": {
                "prompt": sum(len(client.request.prompt_ids) for client in clients if client.has_heard_of_prompt),
                "generated": sum(len(output.token_ids) for client in clients for output in client.outputs),
            },
            "failures": failures,
        }
        counted = self.manager.request_metrics.totals()
        self.world.check(counted == told, f"{self.address} has counted {counted}, and its clients were told {told}")

    def probe(self) -> None:
        """Somebody asks whether the node is ready: a small write by a prefill node must really arrive."""
        self.process.run(lambda: asyncio.ensure_future(self._probe()))

    async def _probe(self) -> None:
        self.world.readiness.append(await self.manager.ready())

    def met_in(self, room: int) -> Registration | None:
        """The registration in which both halves of a room have met; None if they have not, or if it is over."""
        req = self.manager.by_room.get(room)
        if req is None or req.link is None or not (req.room is not None or has_arrived(req)):
            return None
        return req.link.registration

    @property
    def registrations(self) -> list[Registration | None]:
        """Those that are valid now, by prefill node."""
        return [link.registration for link in self.manager.rooms.peers.links]

    def phases(self) -> dict[int, str]:
        reqs = self.manager.by_room.items()
        return {room: req.room.phase.value if req.room is not None else "waiting" for room, req in reqs}

    @property
    def left(self) -> list[object]:
        return list(self.manager.reqs)
