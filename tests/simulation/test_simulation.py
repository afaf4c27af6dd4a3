"""Hundreds of simulated lives of a pair: every room ends, no item has two owners, no unproved state is decoded.

No page of the cache is evicted, reused or written while a room reads it. And no write of a room lands outside the
memory that its registration reserved for it, however late messages come.
:data:`DEFECTS` are mistakes that the real managers do not make; with each of them the simulation fails.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

import pytest

from server.cache.allocator import Allocator
from server.cache.digest import StateDigests
from server.cache.layout import Placement
from server.cache.prefix import KeyOf, PrefixHit, PromptKeys, page_key
from server.cache.snapshots import SnapshotPoint
from server.decode import verify
from server.decode.request import DecodeRequest
from server.decode.request_manager import RequestManager
from server.decode.request_queue import RequestQueue
from server.decode.room import DecodeAction, DecodeEvent, DecodePhase, DecodeRoom, FailClient, FencePeer, Free
from server.decode.transport_sessions import TransportSessions
from server.decode.verify import CHECKS, PREFIX_DAMAGED, Evidence
from server.engine.events import Event, Output, Prefill, Scrubbed
from server.engine.generation import NodeGeneration
from server.engine.prefix import TakeOver
from server.engine.request import TokenOutput
from server.engine.runner import ModelRunner
from server.failure import Failure
from server.prefill import registrations
from server.prefill.events import BatchEnded, EngineIdle, PrefillAction, PrefillEvent, SenderGone
from server.prefill.prefix import PromptPrefix
from server.prefill.registrations import Registrations, Standing
from server.prefill.room import PrefillRoom
from server.transfer.checks import Check
from server.transfer.parts import PartsReceived, PartsToSend
from server.transfer.protocol import (
    Abort,
    PeerMessage,
    PromptLogprobsReceived,
    Registration,
    SentPromptLogprobs,
    registration_of,
)
from server.transfer.rooms import Forget, RoomKey, Tombstone, Tombstones
from tests.simulation.world import Weather, World

WEATHERS = {
    "calm": Weather(),
    "lossy": Weather(loss=0.2, duplicate=0.2, slow=0.2),
    "clients go": Weather(abort=0.05, http_abort=0.05, half_lost=0.1),
    "aborts": Weather(loss=0.05, slow=0.2, abort=0.05),
    "bad transport": Weather(refused=0.1, unknown=0.1, bad_bytes=0.1, abort=0.02),
    "bad cache": Weather(bad_cache=0.2),
    "bad cache, aborts": Weather(bad_cache=0.1, loss=0.1, slow=0.1, abort=0.05, engine_fails=0.03, unknown=0.02),
    "lost verdicts": Weather(loss=0.6, unknown=0.4, abort=0.02),
    "bad engine": Weather(engine_fails=0.1, engine_hangs=0.1),
    "slow": Weather(hangs=0.1, slow_threads=0.3, slow=0.2),
    "prefill restarts": Weather(prefill_crash=0.05, abort=0.02, unknown=0.05, slow=0.1),
    "decode restarts": Weather(decode_crash=0.05, abort=0.02, unknown=0.05, slow=0.1),
    "stops": Weather(stop=0.05, loss=0.05, slow=0.1, unknown=0.05),
    "reconnects": Weather(connection_lost=0.05, loss=0.1, duplicate=0.1, unknown=0.1),
    "half rooms": Weather(half_lost=0.3, http_abort=0.03, abort=0.03, loss=0.1, duplicate=0.1, slow=0.1),
    "late messages": Weather(late=0.15, duplicate=0.2, loss=0.1, connection_lost=0.05, abort=0.03, unknown=0.02),
    "rooms again": Weather(again=0.5, half_lost=0.2, http_abort=0.03, abort=0.03, slow=0.1, connection_lost=0.01),
    "everything": Weather(
        loss=0.1,
        duplicate=0.1,
        slow=0.2,
        late=0.1,
        refused=0.05,
        unknown=0.05,
        engine_fails=0.05,
        engine_hangs=0.05,
        abort=0.03,
        bad_bytes=0.05,
        bad_cache=0.03,
        prefill_crash=0.01,
        decode_crash=0.01,
        connection_lost=0.01,
        stop=0.01,
        hangs=0.02,
        slow_threads=0.02,
        half_lost=0.1,
        http_abort=0.02,
        again=0.2,
    ),
}
CODES = {
    "calm": set[str](),
    "clients go": {"decode_gave_up", "prefill_client_gone", "deadline"},
    "bad engine": {"engine_error", "deadline"},
}
"""All failures that clients may meet: what hits one room hits no other."""
SEEDS_A_BLOCK = 6
N_BLOCKS = 2
N_BLOCKS_FULL = 50


@pytest.fixture(autouse=True)
def only_errors_are_logged() -> Iterator[None]:
    """A simulated world logs thousands of warnings. What nodes log as errors fails it."""
    log = logging.getLogger("server")
    before, log.propagate = (log.level, log.propagate), False
    log.setLevel(logging.ERROR)
    yield
    log.level, log.propagate = before


def make_world(name: str, seed: int) -> World:
    n_prefill, n_decode, n_slots = 1 + seed % 2, 1 + (seed % 3 == 2), ((2, 2), (1, 2), (2, 1), (2, 3))[seed % 4]
    return World(seed, WEATHERS[name], n_prefill=n_prefill, n_decode=n_decode, n_slots=n_slots)


def live(name: str, seeds: range) -> None:
    for seed in seeds:
        world = make_world(name, seed)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed} of {name}: {error}") from error
        codes = {failure.code for failure in [*world.failures, *world.refused]}
        assert codes <= CODES.get(name, codes), f"seed {seed} of {name}: {codes}"
        if name == "calm":
            assert world.committed == world.asked
            assert all(is_ready for is_ready, _ in world.readiness)


@pytest.mark.parametrize("name", WEATHERS)
@pytest.mark.parametrize(
    "block", [pytest.param(i, marks=[pytest.mark.full] if i >= N_BLOCKS else []) for i in range(N_BLOCKS_FULL)]
)
def test_every_room_ends_and_memory_has_one_owner(name: str, block: int) -> None:
    live(name, range(block * SEEDS_A_BLOCK, (block + 1) * SEEDS_A_BLOCK))


def test_a_world_is_the_same_again_by_its_seed() -> None:
    worlds = [make_world("everything", 5) for _ in range(2)]
    for world in worlds:
        world.run()
    ends = [(world.loop.time(), world.rng.random(), [str(failure) for failure in world.failures]) for world in worlds]
    assert ends[0] == ends[1]


MET = {
    *(f"abort on decode in {phase}" for phase in ("waiting", "reserve", "queued", "prefill", "transfer", "verify")),
    "abort on decode in committed",
    *(f"abort on prefill in {phase}" for phase in ("waiting", "prefill")),
    *(f"crash of prefill in {phase}" for phase in ("prefill", "transfer", "ending")),
    *(f"crash of decode in {phase}" for phase in ("waiting", "queued", "prefill", "transfer", "ending")),
    "stop of prefill in prefill",
    "stop of decode in waiting",
    *(f"pd_retries {code}" for code in ("deadline", "engine_error", "peer_lost", "transfer_failed", "shutting_down")),
    *(f"pd_check_failures digest {name}" for name in ("c4_kv", "swa", "prompt_logprobs")),
    *(f"deadline of {phase}" for phase in ("reserve", "pair", "queued", "prefill", "transfer", "commit")),
    "pd_control_frames_dropped stale",
    "pd_fences",
    "hit",
    "held",
    *(f"{what} on {role}" for what in ("evicted_pages", "collisions", "a page rots") for role in ("prefill", "decode")),
    "evicted_snapshots on prefill",
    "a snapshot rots on prefill",
    "pd_check_failures hit ",
    "pd_retries prefix_damaged",
}


def test_the_worlds_go_everywhere() -> None:
    """What must be met now and then, so that the simulation says something about it."""
    seen: set[str] = set()
    for seed in range(40):
        for name in WEATHERS:
            world = make_world(name, seed)
            world.run()
            seen.update(+world.seen)
            if seen >= MET:
                return
    raise AssertionError(f"never met: {sorted(MET - seen)}")


# --- defects that it finds --------------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def _newest(patch: Patch) -> dict[str, Registration]:
    """The last registration of every decode process, as it begins."""
    newest: dict[str, Registration] = {}
    begin = Registrations.begin

    def noted(self: Registrations, decode: str, number: int, routing_id: bytes) -> Registration:
        newest[decode] = begin(self, decode, number, routing_id)
        return newest[decode]

    patch.setattr(Registrations, "begin", noted)
    return newest


def number_not_compared(patch: Patch) -> None:
    """Messages are told apart by the two incarnations only, which outlive a fence."""
    newest = _newest(patch)

    def without_number(message: PeerMessage) -> Registration:
        real = registration_of(message)
        current = newest.get(real.decode, real)
        return current if current.prefill == real.prefill else real

    patch.setattr(registrations, "registration_of", without_number)


def registrations_without_order(patch: Patch) -> None:
    newest = _newest(patch)

    def judge(self: Registrations, decode: str, number: int, routing_id: bytes) -> Standing:
        known = newest.get(decode)
        is_known = known is not None and known.number == number and self.is_current(known, routing_id)
        return Standing.CURRENT if is_known else Standing.NEW

    patch.setattr(Registrations, "judge", judge)


def fence_that_closes_nothing(patch: Patch) -> None:
    async def fence(self: TransportSessions, address: str) -> None:
        pass

    patch.setattr(TransportSessions, "fence", fence)


def no_quarantine(patch: Patch) -> None:
    """Memory is free as soon as the client is told."""
    handle = DecodeRoom.handle

    def free_at_once(self: DecodeRoom, event: DecodeEvent, now: float) -> list[DecodeAction]:
        if self.phase is DecodePhase.OVER:
            return []
        actions = handle(self, event, now)
        if any(isinstance(action, FailClient) for action in actions):
            self.phase = DecodePhase.OVER
            return [*actions, Free(), Forget("failed", "")]
        return actions

    patch.setattr(DecodeRoom, "handle", free_at_once)


def quarantine_ends_by_time(patch: Patch) -> None:
    """Where a fence is needed, the memory is taken for free instead."""
    handle = DecodeRoom.handle

    def free_for_fence(self: DecodeRoom, event: DecodeEvent, now: float) -> list[DecodeAction]:
        if self.phase is DecodePhase.OVER:
            return []
        actions = handle(self, event, now)
        if any(isinstance(action, FencePeer) for action in actions):
            self.phase = DecodePhase.OVER
            return [*(a for a in actions if not isinstance(a, FencePeer)), Free(), Forget("failed", "")]
        return actions

    patch.setattr(DecodeRoom, "handle", free_for_fence)


def rooms_not_remembered(patch: Patch) -> None:
    """The copy of a ``Reserve`` whose room is over opens it again."""

    def refuses(self: Tombstones, key: RoomKey) -> Tombstone | None:
        return None

    patch.setattr(Tombstones, "refuses", refuses)


def _before_an_abort(patch: Patch, *events: PrefillEvent) -> None:
    handle = PrefillRoom.handle

    def handled(self: PrefillRoom, event: PrefillEvent, now: float) -> list[PrefillAction]:
        early = [action for each in events for action in handle(self, each, now)] if isinstance(event, Abort) else []
        return early + handle(self, event, now)

    patch.setattr(PrefillRoom, "handle", handled)


def sender_not_waited_for(patch: Patch) -> None:
    _before_an_abort(patch, SenderGone())


def engine_not_waited_for(patch: Patch) -> None:
    _before_an_abort(patch, EngineIdle())


def unknown_writes_count_as_ended(patch: Patch) -> None:
    handle = PrefillRoom.handle

    def handled(self: PrefillRoom, event: PrefillEvent, now: float) -> list[PrefillAction]:
        return handle(self, dataclasses.replace(event, quiesced=True) if isinstance(event, BatchEnded) else event, now)

    patch.setattr(PrefillRoom, "handle", handled)


def digest_not_compared(patch: Patch) -> None:
    patch.delitem(CHECKS, Check.DIGEST)


def parts_digest_not_compared(patch: Patch) -> None:
    def without_digest(claimed: SentPromptLogprobs | None, scores: PartsReceived | None) -> bool:
        return False

    patch.setattr(verify, "_digests_differ", without_digest)


def parts_taken_behind_gaps(patch: Patch) -> None:
    """What a lost part leaves is filled by the next one."""
    take = PartsReceived.take

    def take_anything(self: PartsReceived, start: int, rows: bytes) -> bool:
        return take(self, min(start, self.next), rows)

    patch.setattr(PartsReceived, "take", take_anything)


def parts_lost_for_good(patch: Patch) -> None:
    """What is under way counts as arrived."""
    patch.setattr(PartsToSend, "have_all_arrived", True)


def parts_wait_for_ever(patch: Patch) -> None:
    """Those that may not be sent at once are never sent."""
    handle = PrefillRoom.handle

    def handled(self: PrefillRoom, event: PrefillEvent, now: float) -> list[PrefillAction]:
        if isinstance(event, PromptLogprobsReceived) and self._parts is not None and not self._parts.have_all_arrived:
            self._parts.arrived(event.stop)
            return []
        return handle(self, event, now)

    patch.setattr(PrefillRoom, "handle", handled)


def parts_kept_twice(patch: Patch) -> None:
    """A copy of a part is added once more."""
    take = PartsReceived.take

    def take_copies(self: PartsReceived, start: int, rows: bytes) -> bool:
        if start < self.next:
            self.rows += rows
        return take(self, start, rows)

    patch.setattr(PartsReceived, "take", take_copies)


def scores_not_given_out(patch: Patch) -> None:
    put = NodeGeneration.put

    def without_scores(self: NodeGeneration, output: TokenOutput) -> None:
        self.prompt_logprobs = None
        put(self, output)

    patch.setattr(NodeGeneration, "put", without_scores)


def memory_of_no_tokens_kept(patch: Patch) -> None:
    """Where nothing is decoded, nobody frees the slot."""
    on_event = RequestManager.on_engine_event

    def kept(self: RequestManager, event: Event) -> None:
        req = self.reqs.get(event.key) if isinstance(event, Scrubbed) and isinstance(event.key, RoomKey) else None
        if req is None or not req.is_committed:
            on_event(self, event)

    patch.setattr(RequestManager, "on_engine_event", kept)


def outputs_behind_the_end_counted(patch: Patch) -> None:
    on_event = RequestManager.on_engine_event

    def counted(self: RequestManager, event: Event) -> None:
        req = self.reqs.get(event.key) if isinstance(event, Output) and isinstance(event.key, RoomKey) else None
        if req is not None and req.generation.ended:
            self.request_metrics.tokens.n_generated += 1
        on_event(self, event)

    patch.setattr(RequestManager, "on_engine_event", counted)


def queue_loses_requests(patch: Patch) -> None:
    put, n_put = RequestQueue.put, 0

    def lossy(self: RequestQueue, req: DecodeRequest) -> None:
        nonlocal n_put
        n_put += 1
        if n_put % 5:
            put(self, req)

    patch.setattr(RequestQueue, "put", lossy)


def offers_not_pinned(patch: Patch) -> None:
    """Pages that a room offers may be evicted before it is proved."""
    reserve, unread = Allocator.reserve, Allocator._unread  # noqa: SLF001

    def without_pins(
        self: Allocator, owner: Hashable, n_tokens: int, *, shared: Sequence[int] = (), pinned: Sequence[int] = ()
    ) -> Placement | None:
        placement = reserve(self, owner, n_tokens, shared=shared)
        if placement is not None:
            self._grants[owner].read += pinned
        return placement

    def unread_what_is_read(self: Allocator, pages: Sequence[int]) -> None:
        unread(self, [page for page in pages if self._readers[page]])

    patch.setattr(Allocator, "reserve", without_pins)
    patch.setattr(Allocator, "_unread", unread_what_is_read)


def forgotten_pages_free_at_once(patch: Patch) -> None:
    """Also if somebody reads them."""
    discard = Allocator.discard

    def free_at_once(self: Allocator, page: int) -> None:
        if self._readers[page]:
            self._on_free(Placement(0, (page,)))
        discard(self, page)

    patch.setattr(Allocator, "discard", free_at_once)


def readers_never_leave(patch: Patch) -> None:
    def unread(self: Allocator, pages: Sequence[int]) -> None:
        pass

    patch.setattr(Allocator, "_unread", unread)


def hits_not_checked(patch: Patch) -> None:
    begin = TakeOver.__init__

    def unchecked(self: TakeOver, command: Prefill, hit: PrefixHit, digests: StateDigests, runner: ModelRunner) -> None:
        begin(self, dataclasses.replace(command, hit_is_checked=False), hit, digests, runner)

    patch.setattr(TakeOver, "__init__", unchecked)


def hits_computed_in_place(patch: Patch) -> None:
    """A prompt is computed from its start, into the pages that it shares."""
    begin = PromptPrefix.begin

    def without_hit(self: PromptPrefix, hit: PrefixHit | None, points: Iterable[SnapshotPoint]) -> None:
        begin(self, None, points)

    patch.setattr(PromptPrefix, "begin", without_hit)


def held_pages_not_compared(patch: Patch) -> None:
    check = CHECKS[Check.DIGEST]

    def without_held(found: Evidence) -> Failure | None:
        failure = check(found)
        return failure if failure is None or failure.code != PREFIX_DAMAGED else None

    patch.setitem(CHECKS, Check.DIGEST, without_held)


def tokens_not_compared(patch: Patch) -> None:
    """A page is taken for the prompt's by its key alone."""
    begin = PromptKeys.__init__

    def without_ids(
        self: PromptKeys, root: bytes, ids: bytes | Sequence[int], page_size: int, key_of: KeyOf = page_key
    ) -> None:
        begin(self, root, ids, page_size, key_of)
        self.ids = [b""] * len(self.ids)

    patch.setattr(PromptKeys, "__init__", without_ids)


DEFECTS: dict[Callable[[Patch], None], tuple[str, str]] = {
    number_not_compared: ("late messages", "landed in"),
    registrations_without_order: ("late messages", "was ended by one with number"),
    fence_that_closes_nothing: ("lost verdicts", "landed in"),
    no_quarantine: ("aborts", "landed in"),
    quarantine_ends_by_time: ("lost verdicts", "landed in"),
    rooms_not_remembered: ("everything", "landed in"),
    sender_not_waited_for: ("aborts", "which belongs to"),
    engine_not_waited_for: ("aborts", "while it was computed"),
    unknown_writes_count_as_ended: ("lost verdicts", "landed in"),
    digest_not_compared: ("bad transport", "with wrong bytes|wrong log probabilities"),
    parts_digest_not_compared: ("bad transport", "wrong log probabilities"),
    parts_taken_behind_gaps: ("lossy", "without a cause: component_mismatch"),
    parts_lost_for_good: ("lossy", "without a cause: component_mismatch"),
    parts_wait_for_ever: ("calm", "deadline"),
    parts_kept_twice: ("lossy", "without a cause: component_mismatch"),
    scores_not_given_out: ("calm", "wrong log probabilities"),
    memory_of_no_tokens_kept: ("calm", "never ends"),
    outputs_behind_the_end_counted: ("stops", "has counted"),
    queue_loses_requests: ("calm", "never ends"),
    offers_not_pinned: ("calm", "is free, and"),
    forgotten_pages_free_at_once: ("bad cache", "is free, and"),
    readers_never_leave: ("calm", "pages are missing|never ends|failed"),
    hits_not_checked: ("bad cache", "goes on from wrong bytes"),
    hits_computed_in_place: ("calm", "computes into page"),
    held_pages_not_compared: ("bad cache", "was committed with wrong bytes"),
    tokens_not_compared: ("calm", "wrong bytes"),
}
"""Each with a weather in which it shows, and what it is found by."""


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_defect_is_found(defect: Callable[[Patch], None], monkeypatch: Patch) -> None:
    name, found_by = DEFECTS[defect]
    defect(monkeypatch)
    with pytest.raises(AssertionError, match=found_by):
        live(name, range(100))
