"""Both nodes' records of real rooms, however they end."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from server.engine.events import Output
from server.engine.request import RoutedRoom, TokenOutput
from server.failure import Failure, RequestFailed
from server.prefill.decode_peer import DecodePeer
from server.telemetry.record import RoomRecord
from server.transfer.protocol import AnyMessage, Done, Reserve
from tests.nodes.support import NodeUnderTest, Pair, answer, deaf_to, phase_is, request
from tests.support.records import faults_of
from tests.support.waiting import until
from tests.transfer.support import make_geometry

DOCUMENT = Path(__file__).parents[2] / "docs" / "rooms.md"
WAY = (
    "receive", "queue", "reserve", "prefill_queue", "prefill", "transfer", "done", "verify", "first_token", "decode",
)  # fmt: skip


def ended(node: NodeUnderTest, n: int = 1) -> list[RoomRecord]:
    """The records of the node's rooms that are over, the newest first; there must be ``n``."""
    listed = node.node.rooms(100)
    assert len(listed.ended) == n, listed
    assert not listed.running
    for record in listed.ended:
        assert faults_of(record) == []
    return list(listed.ended)


async def test_one_record_has_the_whole_way_on_both_nodes(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    await answer(d.node, request(300))
    (record,) = ended(d)
    assert tuple(phase.name for phase in record.phases) == WAY
    assert (record.outcome, record.failure, record.tokens.prompt, record.tokens.generated) == ("length", None, 300, 4)
    assert record.transfer is not None
    assert record.clocks is not None
    live = d.arena.layout.live_nbytes(300)
    assert record.transfer.nbytes == live
    assert sum(record.transfer.pieces.values()) == d.metric("pd_transfer_pieces_total") > 0
    (attempt,) = record.attempts
    assert (attempt.peer, attempt.failure, attempt.n_pages) == (f"127.0.0.1:{p.node.bootstrap_port}", None, 2)

    await until(lambda: len(p.node.rooms(9).ended) == 1)
    (half,) = ended(p)
    assert [phase.name for phase in half.phases] == ["prefill_queue", "prefill", "transfer", "commit"]
    assert (half.room, half.outcome, half.attempts[0].peer) == (record.room, "committed", d.node.incarnation[:8])
    assert half.transfer == record.transfer
    lengths = {phase.name: (phase.end_us or 0) - phase.start_us for phase in record.phases}
    for phase in half.phases[:3]:  # as long here as there, but for the rounding of either end
        assert abs((phase.end_us or 0) - phase.start_us - lengths[phase.name]) <= 1, phase


async def test_peers_bytes_and_pieces_are_counted_by_name(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    address = f"127.0.0.1:{p.node.bootstrap_port}"
    assert d.node.metrics.registry.get_sample_value("pd_peer_transfer_bytes_total", {"peer": address}) == 0
    await answer(d.node, request(300))
    nbytes = sum(d.arena.layout.live_nbytes(300).values())
    assert d.metric("pd_peer_transfer_bytes_total", peer=address) == nbytes
    await until(lambda: p.metric("pd_peer_transfer_bytes_total", peer=d.node.incarnation[:8]) == nbytes)
    assert d.metric("pd_kv_transfer_speed_gb_s", peer=address) > 0
    await pair.stop(d)
    peer = {"peer": d.node.incarnation[:8]}
    await until(
        lambda: p.node.metrics.registry.get_sample_value("pd_peer_transfer_bytes_total", peer) is None,
        what="the series of a decode node that is gone are gone",
    )


async def test_local_prefill_has_a_record_too(pair: Pair) -> None:
    d = await pair.decode(local=True)
    await answer(d.node, request(20))
    (record,) = ended(d)
    assert [phase.name for phase in record.phases] == ["receive", "queue", "prefill", "decode"]
    assert (record.attempts[0].peer, record.transfer, record.clocks) == ("local", None, None)
    assert d.metric("pd_time_to_first_token_seconds_count") == 1


@pytest.mark.parametrize("local", [False, True], ids=["pair", "local"])
async def test_a_request_for_no_tokens_has_no_first_one(pair: Pair, local: bool) -> None:
    p = None if local else await pair.prefill()
    d = await (pair.decode(local=True) if p is None else pair.decode(p))
    await answer(d.node, request(20, max_tokens=0, prompt_logprobs=0))
    (record,) = ended(d)
    assert (record.ttft_us, record.tokens.prompt, record.tokens.steps) == (None, 20, 0)
    assert d.metric("pd_prompt_tokens_total") == 20
    assert d.metric("pd_request_prefill_time_seconds_sum") > 0
    counts = [d.metric(f"pd_{name}_seconds_count") for name in ("time_to_first_token", "request_decode_time")]
    assert counts == [0, 0]
    if p is not None:
        await until(lambda: len(p.node.rooms(9).ended) == 1)
        (half,) = ended(p)
        assert (half.tokens.generated, half.tokens.steps, half.outcome) == (0, 0, "committed")
        assert p.metric("pd_generation_tokens_total") == 0


async def test_what_comes_behind_the_end_counts_for_nothing(pair: Pair) -> None:
    d = await pair.decode(local=True)
    d.engine.gate.clear()
    d.node.submit(request(20))
    (key,) = d.node.manager.reqs
    d.node.manager.refuse_all(Failure("shutting_down", "simulated"))
    d.node.manager.on_engine_event(Output(key, TokenOutput((7,), "seven")))
    (record,) = ended(d)
    assert (record.outcome, record.ttft_us, record.tokens.generated) == ("shutting_down", None, 0)
    assert (d.metric("pd_generation_tokens_total"), d.metric("pd_prompt_tokens_total")) == (0, 0)
    d.engine.gate.set()


async def test_a_client_that_leaves_ends_the_record_in_whatever_phase(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    p.engine.gate.clear()
    generation = d.node.submit(request(300))
    await phase_is(d, "prefill")
    assert d.node.rooms(9).running[0].phase == "prefill"
    generation.abort()
    p.engine.gate.set()
    (record,) = ended(d)
    assert (record.outcome, record.failure, record.ttft_us) == ("abort", None, None)
    await until(lambda: len(p.node.rooms(9).ended) == 1)
    (half,) = ended(p)
    assert (half.outcome, half.failure and half.failure.code) == ("aborted", "aborted")
    for node in (d, p):
        assert node.metric("pd_request_success_total", finished_reason="abort") == 1
        assert node.metric("pd_request_failures_total", code="aborted") == 0


async def test_a_retry_is_in_the_same_record(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = await pair.prefill()
    deaf_to(deaf, Reserve, monkeypatch)
    d = await pair.decode(deaf, other := await pair.prefill())
    await answer(d.node, request(20))
    (record,) = ended(d)
    first, second = record.attempts
    assert (first.failure and first.failure.code, second.failure) == ("deadline", None)
    assert second.peer == f"127.0.0.1:{other.node.bootstrap_port}"
    names = [(phase.name, phase.attempt) for phase in record.phases]
    assert names[:4] == [("receive", 1), ("queue", 1), ("reserve", 1), ("queue", 2)]
    assert tuple(name for name, attempt in names if attempt == 2) == WAY[1:]


async def test_refusals_have_no_room_but_are_listed(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    with pytest.raises(RequestFailed):
        d.node.submit(request(9000))
    listed = d.node.rooms(9)
    assert [r.failure.code for r in listed.refused] == ["context_length_exceeded"]
    assert d.metric("pd_request_failures_total", code="context_length_exceeded") == 1
    assert not listed.running


async def test_a_prefill_node_that_dies_and_one_that_ends_leave_whole_records(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    p.engine.gate.clear()
    generation = d.node.submit(request(300))
    await phase_is(d, "prefill")
    await pair.stop(p)
    with pytest.raises(RequestFailed):
        async for _ in generation:
            pass
    (record,) = ended(d)
    assert record.failure is not None
    assert record.outcome == record.failure.code
    assert record.attempts[0].failure is not None
    (half,) = ended(p)
    assert half.failure is not None
    assert half.failure.code == "shutting_down"


async def test_a_message_that_is_lost_shows_as_uncertainty(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    send = DecodePeer.send
    lost: list[Done] = []

    def lose_the_first(peer: DecodePeer, message: AnyMessage) -> None:
        if isinstance(message, Done) and not lost:
            lost.append(message)
        else:
            send(peer, message)

    monkeypatch.setattr(DecodePeer, "send", lose_the_first)
    await answer(d.node, request(20))
    (record,) = ended(d)
    assert len(lost) == 1
    assert record.clocks is not None
    assert record.clocks.uncertainty_us >= 10_000


async def test_a_request_whose_decode_node_never_comes_is_recorded_on_the_prefill_node(pair: Pair) -> None:
    p = await pair.prefill()
    asked = request(20)
    routed = type(asked)(asked.request_id, asked.prompt_ids, asked.sampling, RoutedRoom(2**62 + 1))
    generation = p.node.submit(routed)
    generation.abort()
    (record,) = ended(p)
    assert (record.room, [x.name for x in record.phases]) == (str(2**62 + 1), ["pair"])
    assert record.failure is not None
    assert record.failure.code == "prefill_client_gone"


async def test_both_halves_of_a_routed_room_say_how_long_they_waited(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    asked = request(20)
    routed = type(asked)(
        asked.request_id, asked.prompt_ids, asked.sampling, RoutedRoom(17, "127.0.0.1", p.node.bootstrap_port)
    )
    at_p = p.node.submit(routed)
    await answer(d.node, routed)
    (record,) = ended(d)
    assert [x.name for x in record.phases][:3] == ["receive", "pair", "queue"]
    await until(lambda: at_p.ended and len(p.node.rooms(9).ended) == 1)
    (half,) = ended(p)
    assert half.phases[0].name == "pair"


async def test_a_routed_room_that_is_refused_at_once_says_how_long_it_waited(pair: Pair) -> None:
    p = await pair.prefill(geometry=make_geometry(pages=3))
    d = await pair.decode(p)
    asked = request(600)
    routed = type(asked)(
        asked.request_id, asked.prompt_ids, asked.sampling, RoutedRoom(18, "127.0.0.1", p.node.bootstrap_port)
    )
    told: list[RoomRecord] = []
    p.node.manager.records.on_end.append(lambda recorder: told.append(recorder.read()))
    at_p = p.node.submit(routed)
    for generation in (d.node.submit(routed), at_p):
        with pytest.raises(RequestFailed) as caught:
            await generation.route()
        assert caught.value.code == "context_length_exceeded"
    await until(lambda: len(p.node.rooms(9).ended) == 1)
    (half,) = ended(p)
    assert told == [half], "metrics and log have the whole of it"
    assert [phase.name for phase in half.phases] == ["pair", "prefill_queue"]
    assert half.failure is not None
    assert half.failure.code == "context_length_exceeded"


async def test_the_state_shows_every_slot_and_page(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    before = d.node.state()
    assert set(before["slots"]["cells"]) == set(before["pages"]["cells"]) == {"."}
    p.engine.gate.clear()
    generation = d.node.submit(request(300))
    await phase_is(d, "prefill")
    await until(lambda: "R" in d.node.state()["slots"]["cells"])
    now = d.node.state()
    assert now["pages"]["cells"].count("R") == now["pages"]["counts"]["reserved"] > 0
    assert len(now["pages"]["cells"]) == d.arena.layout.component("c4_kv").items - 1
    p.engine.gate.set()
    _ = [output async for output in generation]
    await until(lambda: d.node.state()["tokens"] == {"prompt": 300, "generated": 4})
    after = d.node.state()
    example = json.loads(re.findall(r"```json\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)[2])
    assert after.keys() == example.keys()
    for part in ("slots", "pages", "requests", "tokens"):
        assert after[part].keys() == example[part].keys(), part
    assert after["peers"][0].keys() == example["peers"][0].keys()
    assert after["peers"][0]["nbytes"] == sum(after["nbytes"].values()) > 0
