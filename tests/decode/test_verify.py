"""The proof of a room with held pages: what was written and what is held are all of the state, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch

from server.cache.arena import Arena
from server.cache.digest import PageRanges, StateDigests, StateParts
from server.cache.handoff import Handoff, prompt_hash, write_handoff
from server.cache.layout import ArenaLayout, Placement, Run
from server.cache.owners import Owner
from server.decode.admission import wire_request, wire_sampling
from server.decode.verify import Evidence, Expected, verify
from server.engine.request import GenerationRequest, TokenLogprob
from server.failure import Failure
from server.transfer.checks import Check
from server.transfer.frames import pack_tokens
from server.transfer.plan import CopyPlan, Side
from server.transfer.protocol import Done, Registration, Sent, Timings, room_ids
from server.transfer.rooms import RoomKey
from tests.decode.held import claims
from tests.transfer.support import PAGE_SIZE, make_geometry, random_arena

N = 4 * PAGE_SIZE + 76
LAYOUT = ArenaLayout.from_geometry(make_geometry(pages=20))
KEY = RoomKey(7, 3, "d" * 32)
THEIRS, OWN = Placement(1, (1, 2, 3, 4, 5)), Placement(2, (6, 7, 8, 9, 10))
OFFERED = (11, 12, 13, 14)
SPANS: dict[str, PageRanges] = {
    "none": (),
    "all": ((0, 4),),
    "the first": ((0, 1),),
    "in the middle": ((1, 3),),
    "two spans": ((0, 1), (2, 4)),
}
Change = Callable[[Done], Done]


@dataclass
class Received:
    """A room whose state has come, with the pages ``held`` that were offered: their own places were never written."""

    arena: Arena
    parts: StateParts
    expected: Expected
    done: Done

    def proof(self, change: Change = lambda done: done, *skipped: Check) -> TokenLogprob | Failure:
        done = change(self.done)
        return verify(Evidence(self.expected.settled(done.held), done), frozenset(skipped))

    def flip(self, component: str, page: int) -> None:
        """A bit of the component's first row in the page with this id."""
        run = Run(LAYOUT.row_offset(component, Placement(1, (page,)), 0), 1)
        self.arena.write(run, bytes([self.arena.memory(run)[0] ^ 1]))


def received(held: PageRanges = ((1, 3),)) -> Received:
    prompt = tuple(int(i) for i in np.random.default_rng(5).integers(1, 100, N))
    request = GenerationRequest("r", prompt)
    asked = wire_request(request, pack_tokens(prompt), wire_sampling(request.sampling))
    theirs, arena = random_arena(LAYOUT, 1), random_arena(LAYOUT, 2)
    write_handoff(theirs, THEIRS, Handoff(KEY.room, KEY.epoch, N, prompt_hash(prompt), 9, -0.5, (), torch.zeros(2, 8)))
    written = {page for page in range(5) if not any(first <= page < stop for first, stop in held)}
    arena.owners.stamp(Placement(3, OFFERED), Owner(1, 1))
    for page in OFFERED:
        arena.owners.share(page, Owner(1, 1))
    arena.owners.stamp(Placement(OWN.slot, (*OWN.pages, *OFFERED)), KEY.owner)
    for source, target in ((THEIRS, OWN), (THEIRS, Placement(OWN.slot, (*OFFERED, OWN.pages[4])))):
        for copy in CopyPlan(Side(LAYOUT, source), Side(LAYOUT, target), N, LAYOUT.names).tail(0).copies:
            arena.write(Run(copy.dst, copy.nbytes), theirs.read([Run(copy.src, copy.nbytes)]))
    for page in set(range(5)) - written:
        arena.scrub(Placement(0, (OWN.pages[page],)))
        first = LAYOUT.row_offset("c4_kv", Placement(1, (OWN.pages[page],)), 0)
        arena.write(Run(first, LAYOUT.page_nbytes), bytes(LAYOUT.page_nbytes))
    parts = StateDigests(theirs, N, THEIRS).finish()
    done = Done(
        **room_ids(Registration("a" * 32, KEY.decode, 1), KEY.room, KEY.epoch),
        n=N,
        sent=claims(LAYOUT, N, parts, held),
        pieces={"pages": 1},
        timings=Timings(0, 0, 0, 0, 0, 0, 0, 1),
        held=held,
        n_reused=2 * PAGE_SIZE,
    )
    return Received(arena, parts, Expected.of(arena, OWN, LAYOUT.names, KEY, asked, OFFERED), done)


def of_component(name: str, **changes: int) -> Change:
    def change(done: Done) -> Done:
        sent = tuple(msgspec.structs.replace(s, **changes) if s.component == name else s for s in done.sent)
        return msgspec.structs.replace(done, sent=sent)

    return change


def sent_of(done: Done, name: str) -> Sent:
    return next(sent for sent in done.sent if sent.component == name)


@pytest.mark.parametrize("held", SPANS.values(), ids=SPANS)
def test_written_and_held_pages_are_proved_where_they_are(held: PageRanges) -> None:
    room = received(held)
    proof = room.proof()
    assert isinstance(proof, TokenLogprob), proof
    settled = room.expected.settled(room.done.held)
    assert settled.held_pages == [page for first, stop in held for page in range(first, stop)]
    for page in range(5):
        assert settled.placement.pages[page] == (OFFERED if page in settled.held_pages else OWN.pages)[page]
    assert room.expected.placement == OWN, "what others may still look at stays as it was"
    assert settled.total_nbytes == room.expected.total_nbytes


def test_the_digests_of_the_complete_pages_are_the_prefill_nodes() -> None:
    room = received()
    settled = room.expected.settled(room.done.held)
    assert isinstance(verify(Evidence(settled, room.done)), TokenLogprob)
    theirs = StateDigests(random_arena(LAYOUT, 1), N, THEIRS)
    assert tuple(settled.page_digests) == theirs.take_pages(N)


LIES: dict[str, tuple[Change, str, str, str]] = {
    "more than offered": (lambda d: msgspec.structs.replace(d, held=((1, 5),)), "", "coverage", "were offered"),
    "far more": (lambda d: msgspec.structs.replace(d, held=((1, 2**31 - 1),)), "", "coverage", "were offered"),
    "out of order": (lambda d: msgspec.structs.replace(d, held=((2, 3), (0, 1))), "", "coverage", "do not ascend"),
    "overlapping": (lambda d: msgspec.structs.replace(d, held=((0, 2), (1, 3))), "", "coverage", "do not ascend"),
    "twice": (lambda d: msgspec.structs.replace(d, held=((1, 3), (1, 3))), "", "coverage", "do not ascend"),
    "backwards": (lambda d: msgspec.structs.replace(d, held=((3, 1),)), "", "coverage", "do not ascend"),
    "all reused": (lambda d: msgspec.structs.replace(d, n_reused=N), "", "coverage", "were not computed"),
    "a slot held": (of_component("swa", held_nbytes=32), "swa", "bytes", "32 bytes are said to be held, 0"),
    "a slot's digest": (of_component("swa", held_digest=1), "swa", "digest", "nothing of it is held"),
    "too few held": (of_component("c4_kv", held_nbytes=0), "c4_kv", "bytes", "0 bytes are said to be held"),
    "held is written": (lambda d: msgspec.structs.replace(d, held=()), "c4_kv", "bytes", "bytes were sent"),
    "written is held": (lambda d: msgspec.structs.replace(d, held=((0, 4),)), "c4_kv", "bytes", "bytes were sent"),
    "other pages": (lambda d: msgspec.structs.replace(d, held=((0, 2),)), "c4_kv", "digest", "digest differs"),
    "too few rows": (of_component("c128_kv", stop=2), "c128_kv", "coverage", "are live"),
}


@pytest.mark.parametrize(("change", "component", "check", "words"), LIES.values(), ids=LIES)
def test_a_wrong_claim_is_refused_by_name(change: Change, component: str, check: str, words: str) -> None:
    proof = received().proof(change)
    assert isinstance(proof, Failure)
    assert (proof.code, proof.component, proof.check) == ("component_mismatch", component, check)
    assert words in proof.reason


@pytest.mark.parametrize("lie", ["more than offered", "out of order", "overlapping", "written is held", "too few held"])
def test_without_the_check_that_finds_a_wrong_claim_another_does(lie: str) -> None:
    change, _, check, _ = LIES[lie]
    proof = received().proof(change, Check(check))
    if lie == "too few held":
        assert isinstance(proof, TokenLogprob), "a number alone: the bytes are right"
    else:
        assert isinstance(proof, Failure)
        assert proof.check in {"bytes", "digest"} - {check}


@pytest.mark.parametrize("component", ["c4_kv", "c4_index", "c128_kv"])
def test_damage_in_a_held_page_is_this_nodes_and_has_a_name_of_its_own(component: str) -> None:
    room = received()
    room.flip(component, OFFERED[2])
    proof = room.proof()
    assert isinstance(proof, Failure)
    assert (proof.code, proof.component, proof.check) == ("prefix_damaged", component, "digest")


@pytest.mark.parametrize("page", [0, 3])
def test_damage_in_an_offered_page_that_is_not_held_harms_nobody(page: int) -> None:
    room = received()
    room.flip("c4_kv", OFFERED[page])
    assert isinstance(room.proof(), TokenLogprob)


def test_damage_in_a_written_page_beside_held_ones_is_the_transfers() -> None:
    room = received()
    room.flip("c4_kv", OWN.pages[3])
    proof = room.proof()
    assert isinstance(proof, Failure)
    assert (proof.code, proof.component) == ("component_mismatch", "c4_kv")


def test_a_held_page_that_the_room_does_not_read_has_the_wrong_owner() -> None:
    room = received()
    room.arena.owners.clear(Placement(0, (OFFERED[1],)), KEY.owner)
    proof = room.proof()
    assert isinstance(proof, Failure)
    assert (proof.code, proof.check) == ("wrong_owner", "stamp")
