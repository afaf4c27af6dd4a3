"""Who is let in, and what a decode node says of a peer that it has no connection to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from server.engine.request import RoutedRoom
from server.failure import Failure, RequestFailed
from server.transfer.auth import Guard, PeerKeys
from server.transfer.frames import decode, encode
from server.transfer.protocol import Refused, Register
from server.transfer.sockets import FRAMES_A_TURN
from tests.nodes.support import FAST, NodeUnderTest, Pair, answer, expected, request
from tests.support.waiting import until
from tests.transfer.support import IDENTITY, make_manifest

KEY = Guard(PeerKeys.derive("a" * 32))
OTHER_KEY = Guard(PeerKeys.derive("b" * 32))
OPEN = Guard()
KNOWN_S = 5.0
"""Known within a second, and a margin for a busy machine."""
QUICK = replace(FAST, connect_s=0.5, register_s=0.5)


def peer_of(d: NodeUnderTest) -> dict[str, Any]:
    peer: dict[str, Any] = d.node.server_info()["peers"][0]
    return peer


async def refused_within(d: NodeUnderTest, seconds: float = KNOWN_S) -> str:
    """Waits for the verdict; the reason, which a client is told too."""
    await until(lambda: peer_of(d)["state"] == "refused", seconds, str(peer_of(d)))
    with pytest.raises(RequestFailed) as caught:
        d.node.submit(request(5))
    assert (caught.value.kind, caught.value.code) == ("unavailable", "no_prefill")
    reason: str = peer_of(d)["reason"]
    assert reason in caught.value.failure.reason
    return reason


async def reason_within(d: NodeUnderTest, words: str, seconds: float) -> None:
    await until(lambda: words in peer_of(d)["reason"], seconds, peer_of(d)["reason"])
    assert peer_of(d)["state"] == "connecting"


async def test_two_nodes_with_the_same_key_serve(pair: Pair) -> None:
    p = await pair.prefill(guard=KEY)
    d = await pair.decode(p, guard=KEY)
    assert await answer(d.node, request(300)) == expected(request(300))
    assert {n.node.server_info()["control_plane_takes"] for n in (p, d)} == {"key"}


@pytest.mark.parametrize(
    ("at_p", "at_d", "words", "counted"),
    [
        (KEY, OTHER_KEY, "has another key: the two --auth-key-file differ", ("key",)),
        (KEY, OPEN, "wants a key: start this decode node with its --auth-key-file", ("mechanism", "broken_off")),
        (OPEN, KEY, "has no key: start it with the --auth-key-file of this decode node", ("mechanism", "broken_off")),
    ],
    ids=["another key", "none at decode", "none at prefill"],
)
async def test_a_wrong_key_is_known_at_once_and_the_right_one_is_taken_afterwards(
    pair: Pair, at_p: Guard, at_d: Guard, words: str, counted: tuple[str, ...]
) -> None:
    p = await pair.prefill(guard=at_p)
    d = await pair.decode(p, guard=at_d, wait=False)
    port = p.node.bootstrap_port
    assert await refused_within(d) == f"prefill 127.0.0.1:{port} {words}"
    assert peer_of(d)["refused_field"] == "auth"
    assert d.metric("pd_peer_refusals_total", field="auth") == 1
    await until(
        lambda: sum(p.metric("pd_control_handshakes_refused_total", reason=reason) for reason in counted) >= 1, KNOWN_S
    )
    assert p.metric("pd_control_frames_received_total") == 0, "no frame of a stranger is looked at"
    await pair.stop(p)
    await until(lambda: "nobody listens" in peer_of(d)["reason"], 3.0, "the verdict was about the process")
    await pair.prefill(guard=at_d, port=port)
    await until(lambda: peer_of(d)["state"] == "registered", 3.0)
    assert await answer(d.node, request(20)) == expected(request(20))


def own_address() -> str:
    """An address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("10.255.255.255", 9))  # sends nothing
        address = str(probe.getsockname()[0])
        if not address.startswith("127."):
            return address
    pytest.skip("this machine has only its loopback interface")


async def test_without_a_key_only_loopback_peers_are_let_in(pair: Pair) -> None:
    address = own_address()
    p = await pair.prefill(host="0.0.0.0")
    far = f"{address}:{p.node.bootstrap_port}"
    d = await pair.decode(far, guard=Guard(insecure=True), wait=False)
    assert "takes peers of its own machine only" in await refused_within(d)
    assert p.metric("pd_control_handshakes_refused_total", reason="address") >= 1
    near = await pair.decode(p)
    assert await answer(near.node, request(20)) == expected(request(20))


async def test_insecure_lets_anybody_in(pair: Pair) -> None:
    address = own_address()
    p = await pair.prefill(host="0.0.0.0", guard=Guard(insecure=True))
    d = await pair.decode(f"{address}:{p.node.bootstrap_port}", guard=Guard(insecure=True))
    assert await answer(d.node, request(20)) == expected(request(20))


async def test_a_name_that_does_not_resolve_and_a_port_where_nobody_listens_are_told_apart(pair: Pair) -> None:
    d = await pair.decode("no-such-host.invalid:9", wait=False)
    await until(lambda: "nobody listens at no-such-host.invalid:9" in peer_of(d)["reason"], 10.0)
    assert "refused" not in peer_of(d)["reason"].lower()
    d = await pair.decode("127.0.0.1:1", wait=False)
    await reason_within(d, "nobody listens at 127.0.0.1:1 (Connection refused)", KNOWN_S)


@pytest.mark.parametrize(
    ("known", "spelt"),
    [("[::1]:1", "::1"), ("[::1]:1", "[::1]"), ("[::1]:1", "0:0:0:0:0:0:0:1"), ("127.0.0.1:1", "LocalHost")],
)
async def test_a_router_may_spell_an_address_otherwise(pair: Pair, known: str, spelt: str) -> None:
    d = await pair.decode(await pair.prefill(), known, wait=False)
    await until(lambda: peer_of(d)["state"] == "registered")
    with pytest.raises(RequestFailed) as caught:
        d.node.submit(replace(request(20), routed=RoutedRoom(7, spelt, 1)))
    assert caught.value.code == "no_prefill", "known, and not registered"
    with pytest.raises(RequestFailed) as caught:
        d.node.submit(replace(request(20), routed=RoutedRoom(7, "::2", 1)))
    assert caught.value.code == "unknown_prefill"


async def test_a_prefill_node_that_may_still_be_starting_is_no_warning_and_one_that_does_not_come_is(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    d = await pair.decode("127.0.0.1:1", deadlines=replace(FAST, connect_s=1000.0), wait=False)
    await reason_within(d, "nobody listens at 127.0.0.1:1", 10.0)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    await pair.decode("127.0.0.1:1", deadlines=replace(FAST, connect_s=0.1), wait=False)
    await until(lambda: any("nobody listens at 127.0.0.1:1" in message for message in caplog.messages), 10.0)


async def test_an_http_port_is_not_taken_for_a_prefill_node(pair: Pair) -> None:
    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 30\r\n\r\n" + b"Invalid HTTP request received.")
        writer.close()

    async with await asyncio.start_server(http, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        d = await pair.decode(f"127.0.0.1:{port}", wait=False)
        assert "is not the bootstrap port of a prefill node" in await refused_within(d)


async def test_the_phase_connect_has_a_deadline(pair: Pair) -> None:
    """A listener that never says anything, as a frozen process is one."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        d = await pair.decode(f"127.0.0.1:{listener.getsockname()[1]}", deadlines=QUICK, wait=False)
        await reason_within(d, "takes connections but says nothing: it is frozen", 5.0)


async def test_the_phase_register_has_a_deadline(pair: Pair) -> None:
    context = zmq.asyncio.Context()
    silent = context.socket(zmq.ROUTER)
    port = silent.bind_to_random_port("tcp://127.0.0.1")
    try:
        d = await pair.decode(f"127.0.0.1:{port}", deadlines=QUICK, wait=False)
        await reason_within(d, "is connected, but did not answer Register within 0.5 s", 5.0)
    finally:
        silent.close(0)
        context.term()


async def test_a_refusal_is_shown_and_counted_on_both_sides(pair: Pair) -> None:
    p = await pair.prefill(identity=replace(IDENTITY, model="model-b"))
    d = await pair.decode(p, wait=False)
    assert "model differs: prefill has model-b, decode has model-a" in await refused_within(d)
    assert peer_of(d)["refused_field"] == "model"
    (*_, refused) = p.node.server_info()["refused"]
    assert refused == {"incarnation": d.node.incarnation, "field": "model", "ours": "model-b", "theirs": "model-a"}
    for node in (p, d):
        assert node.metric("pd_peer_refusals_total", field="model") >= 1
    await pair.stop(p)
    fits = await pair.prefill(port=p.node.bootstrap_port)
    await until(lambda: peer_of(d)["state"] == "registered", 3.0, "the verdict was about the process, not its address")
    assert peer_of(d)["refused_field"] == peer_of(d)["reason"] == ""
    assert await answer(d.node, request(20)) == expected(request(20))
    await pair.stop(fits)


async def test_a_client_that_waits_for_a_peer_hears_of_its_refusal(pair: Pair) -> None:
    """The request waits because the peer is about to register again; another process is at its address then."""
    p = await pair.prefill()
    d = await pair.decode(p, deadlines=replace(FAST, connect_s=30.0))
    port = p.node.bootstrap_port
    (link,) = d.node.manager.rooms.peers.links
    link.lose(Failure("peer_lost", "the session was fenced"))
    waiting = d.node.submit(request(5))
    await p.node.socket.close()
    await pair.prefill(port=port, identity=replace(IDENTITY, tokenizer="other"))
    started = time.monotonic()
    with pytest.raises(RequestFailed, match="tokenizer differs: prefill has other, decode has tokenizer-a") as caught:
        await waiting.route()
    assert (caught.value.kind, caught.value.code) == ("unavailable", "no_prefill")
    assert time.monotonic() - started < KNOWN_S


async def test_a_registration_cannot_be_taken_over_by_another_connection(pair: Pair) -> None:
    p = await pair.prefill()
    d = await pair.decode(p)
    (link,) = d.node.manager.rooms.peers.links
    context = zmq.asyncio.Context()
    thief = context.socket(zmq.DEALER)
    thief.connect(f"tcp://127.0.0.1:{p.node.bootstrap_port}")
    try:
        for number in (link.registration.number, link.registration.number + 1):
            manifest = msgspec.structs.replace(link.ours, session=f"127.0.0.1:{number}")
            await thief.send(encode(Register(number, manifest)))
            refused = decode(await asyncio.wait_for(thief.recv(), 30.0))
            assert isinstance(refused, Refused)
            assert refused.field == "incarnation"
    finally:
        thief.close(0)
        context.term()
    assert await answer(d.node, request(20)) == expected(request(20))
    assert d.metric("pd_fences_total") == 0


async def test_names_that_a_peer_made_up_are_no_labels_of_the_metrics(pair: Pair) -> None:
    p = await pair.prefill()
    context = zmq.asyncio.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(f"tcp://127.0.0.1:{p.node.bootstrap_port}")
    try:
        manifest = make_manifest("decode", session="127.0.0.1:1")
        for name in ("first", "second"):
            entry = msgspec.structs.replace(manifest.components[0], name=name)
            await stranger.send(encode(Register(1, msgspec.structs.replace(manifest, components=(entry,)))))
            refused = decode(await asyncio.wait_for(stranger.recv(), 30.0))
            assert isinstance(refused, Refused)
            assert refused.field == f"components.{name}"
    finally:
        stranger.close(0)
        context.term()
    assert p.metric("pd_peer_refusals_total", field="other") == 2


async def test_a_peer_that_sends_without_end_does_not_keep_the_node_from_its_other_work(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = await pair.prefill()
    bursts = [0]
    monkeypatch.setattr(p.node.bootstrap, "on_frames", lambda frames: bursts.__setitem__(-1, bursts[-1] + 1))

    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(f"tcp://127.0.0.1:{p.node.bootstrap_port}")
        socket.send(b"first")
        await until(lambda: sum(bursts) == 1, what="the connection stands")
        bursts.append(0)
        for _ in range(400):
            socket.send(b"x" * 100)
        threading.Event().wait(0.1)  # without the event loop, so that the frames pile up
        while sum(bursts) < 401:
            await asyncio.sleep(0)
            bursts.append(0)
    assert max(bursts) <= FRAMES_A_TURN
