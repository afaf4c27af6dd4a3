"""The relay of control messages: what it holds back, loses and repeats, and what waits for the next connection."""

from __future__ import annotations

import asyncio

import zmq
import zmq.asyncio
from cluster.relay import To, control_relay

from server.transfer.frames import decode, encode
from tests.transfer.test_protocol import MESSAGES


async def test_the_relay_holds_back_loses_and_repeats_what_it_is_told_to() -> None:
    by_type = {type(message).__name__: message for message in MESSAGES}
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        for each in (router, dealer):
            each.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        async with control_relay(f"127.0.0.1:{port}") as relay, asyncio.timeout(30):
            dealer.connect(f"tcp://{relay.address}")
            relay.hold, relay.lose = {"Reserve", "Done"}, {"Failed"}
            for name in ("Reserve", "Failed", "Ping", "Waiting"):
                await dealer.send(encode(by_type[name]))
            got = [await router.recv_multipart() for _ in range(2)]
            assert [decode(frame) for _, frame in got] == [by_type["Ping"], by_type["Waiting"]]
            for name in ("Done", "Quiesced"):
                await router.send_multipart([got[0][0], encode(by_type[name])])
            assert decode(await dealer.recv()) == by_type["Quiesced"]
            assert [passed.to for passed in relay.held] == [To.PREFILL, To.DECODE]
            assert relay.release() == 2
            assert decode((await router.recv_multipart())[1]) == by_type["Reserve"]
            assert decode(await dealer.recv()) == by_type["Done"]
            await dealer.send(encode(by_type["Reserve"]))
            assert decode((await router.recv_multipart())[1]) == by_type["Reserve"]


async def test_what_is_sent_without_a_connection_goes_first_over_the_next_one() -> None:
    by_type = {type(message).__name__: message for message in MESSAGES}
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        async with control_relay(f"127.0.0.1:{port}") as relay, asyncio.timeout(30):
            for names in (["Reserve"], ["Reserve", "Ping"]):
                with context.socket(zmq.DEALER) as dealer:
                    dealer.setsockopt(zmq.LINGER, 0)
                    dealer.connect(f"tcp://{relay.address}")
                    await dealer.send(encode(by_type[names[-1]]))
                    for name in names:
                        assert decode((await router.recv_multipart())[1]) == by_type[name]
                while relay.connected:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                relay.send(relay.seen[0])
