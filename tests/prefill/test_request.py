"""The batches of one room: the last one is planned while few pages may yet go before it."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import fields

import pytest

from server.cache.arena import Arena
from server.cache.layout import ArenaLayout, Placement
from server.decode.admission import wire_sampling
from server.engine.grammar import Grammar
from server.engine.request import SamplingParams
from server.faults.hooks import Sending
from server.prefill.decode_peer import DecodePeer
from server.prefill.request import PAGES_PLANNED_AHEAD, Outgoing, read_request
from server.transfer.checks import Check
from server.transfer.frames import decode, encode, pack_tokens
from server.transfer.plan import CopyPlan
from server.transfer.protocol import Registration, Reserve, RoomRequest, Sampling
from server.transfer.rooms import Heartbeat
from tests.transfer.support import PAGE_SIZE, make_geometry, make_manifest

LAYOUT = ArenaLayout.from_geometry(make_geometry())
ARENA, MANIFEST = Arena(LAYOUT), make_manifest("decode")
SAMPLING = Sampling(1, 0, 0.0, 1.0, 0, 0, (), (), False, None)


EVERY_PARAMETER = SamplingParams(
    *(9, 1, 0.5, 0.75, 5, 77, ("a", "b"), (3,), True, 2, 0.5, -0.25, 1.25, 0.125),
    *(((7, -3.5), (8, 100.0)), ((1, 2), (3,)), (4, 5), Grammar("lark", "start: <|a|>"), 4),
)


class NoSocket:
    def send(self, routing_id: bytes, message: object) -> None:
        raise AssertionError("nothing is sent here")

    def is_connected(self, routing_id: bytes) -> bool:
        return True


def reserve_for(n: int, sampling: Sampling = SAMPLING, offered: bytes = b"") -> Reserve:
    pages = tuple(range(1, 1 + -(-n // PAGE_SIZE)))
    asked = RoomRequest("r", pack_tokens(range(n)), sampling)
    return Reserve("a" * 32, MANIFEST.incarnation, 1, 5, 1, 1, pages, LAYOUT.names, asked, 1.0, None, offered)


def outgoing(n: int, offered: bytes = b"", skipped: frozenset[Check] = frozenset()) -> Outgoing:
    reserve = reserve_for(n, offered=offered)
    peer = DecodePeer(Registration("p", MANIFEST.incarnation, 1), MANIFEST, b"D", Heartbeat(1.0, 0.0), NoSocket())
    return Outgoing(ARENA, Sending(Placement(2, reserve.pages), skipped=skipped), peer, reserve, n)


def test_every_sampling_parameter_arrives() -> None:
    sent = reserve_for(3, wire_sampling(EVERY_PARAMETER))
    assert read_request(decode(encode(sent))).sampling == EVERY_PARAMETER  # type: ignore[arg-type]
    assert not [f.name for f in fields(SamplingParams) if getattr(EVERY_PARAMETER, f.name) == f.default]


@pytest.mark.parametrize("n_pages_sent", range(5))
def test_a_last_batch_planned_ahead_is_the_one_planned_late(n_pages_sent: int) -> None:
    """Also where it was planned before the last pages went."""
    early, late = outgoing(4 * PAGE_SIZE + 7), outgoing(4 * PAGE_SIZE + 7)
    early.plan_ahead()
    for sender in (early, late):
        sender.push_pages(n_pages_sent * PAGE_SIZE, 1.0)
    early.plan_ahead()
    assert early.push_tail(2.0) == late.push_tail(2.0)


def test_no_long_tail_is_planned_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned ahead is bounded, however long the prompt is."""
    planned: list[int] = []
    tail = CopyPlan.tail

    def noted(plan: CopyPlan, pages_sent: int, held: Container[int]) -> object:
        planned.append(pages_sent)
        return tail(plan, pages_sent, held)

    monkeypatch.setattr(CopyPlan, "tail", noted)
    n_pages = 12
    sender = outgoing(n_pages * PAGE_SIZE)
    for page in range(n_pages):
        sender.plan_ahead()
        sender.push_pages((page + 1) * PAGE_SIZE, 1.0)
    assert planned == list(range(n_pages - PAGES_PLANNED_AHEAD, n_pages))
