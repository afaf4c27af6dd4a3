"""A prompt's log probabilities on their way to the decode node: all of them and right, or the request fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from server.decode.node import DecodeNode
from server.engine.prompt_logprobs import PromptLogprobs
from server.engine.request import GenerationRequest, RoutedRoom, TokenOutput
from server.failure import RequestFailed
from server.prefill.decode_peer import DecodePeer
from server.transfer.parts import MAX_UNDER_WAY, PART_NBYTES
from server.transfer.protocol import AnyMessage, Done, PromptLogprobsPart, PromptLogprobsReceived, SentPromptLogprobs
from tests.nodes.support import FAST, NodeUnderTest, all_free, assert_works_again, deaf_to, expected, pairs, request
from tests.support.fake_scores import rows_of
from tests.support.waiting import until


async def outputs(node: DecodeNode, asked: GenerationRequest) -> list[TokenOutput]:
    return [output async for output in node.submit(asked)]


def check(found: list[TokenOutput], asked: GenerationRequest) -> None:
    """All tokens, and with the first output every log probability of the prompt."""
    n_top = asked.sampling.prompt_logprobs
    assert n_top is not None
    assert [token for output in found for token in output.token_ids] == expected(asked)
    assert found[0].prompt_logprobs == PromptLogprobs(n_top, rows_of(asked.prompt_ids, n_top))
    assert all(output.prompt_logprobs is None for output in found[1:])
    assert found[-1].finish_reason == "length"


def sent_by(p: NodeUnderTest, monkeypatch: pytest.MonkeyPatch) -> list[AnyMessage]:
    """What the prefill node says from now on."""
    said: list[AnyMessage] = []
    send = DecodePeer.send

    def noted(self: DecodePeer, message: AnyMessage) -> None:
        said.append(message)
        send(self, message)

    monkeypatch.setattr(DecodePeer, "send", noted)
    return said


def changed(
    kind: type[AnyMessage], change: Callable[[Any], AnyMessage], monkeypatch: pytest.MonkeyPatch, n: int = 1
) -> None:
    """The prefill node says something else, the first ``n`` times."""
    send, left = DecodePeer.send, [n]

    def lie(self: DecodePeer, message: AnyMessage) -> None:
        if isinstance(message, kind) and left[0]:
            left[0] -= 1
            message = change(message)
        send(self, message)

    monkeypatch.setattr(DecodePeer, "send", lie)


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("n_top", [0, 1, 20])
async def test_they_come_with_the_first_output(max_tokens: int, n_top: int) -> None:
    async with pairs() as pair:
        p = await pair.prefill()
        d = await pair.decode(p)
        for n in (1, 2, 201, 1000):
            asked = request(n, max_tokens=max_tokens, prompt_logprobs=n_top)
            check(await outputs(d.node, asked), asked)
        await until(lambda: all_free(p) and all_free(d))
        assert d.engine.wrong_bytes == []
        n_computed = (0 + 1 + 200 + 999) * (1 + n_top)
        assert p.metric("pd_prompt_logprobs_total") == d.metric("pd_prompt_logprobs_total") == n_computed


async def test_a_node_that_computes_prompts_itself_says_the_same() -> None:
    async with pairs() as pair:
        d = await pair.decode(local=True)
        for n, max_tokens in ((1, 2), (900, 2), (1, 0), (900, 0)):
            asked = request(n, max_tokens=max_tokens, prompt_logprobs=2)
            check(await outputs(d.node, asked), asked)
        await until(lambda: all_free(d))


async def test_without_an_answer_nothing_but_the_hand_off_row_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pairs() as pair:
        p = await pair.prefill()
        d = await pair.decode(p)
        said = sent_by(p, monkeypatch)
        held: list[int] = []
        reserve = d.parts.allocator.reserve

        def noted(key: object, n_tokens: int, **pins: Sequence[int]) -> object:
            held.append(n_tokens)
            return reserve(key, n_tokens, **pins)

        monkeypatch.setattr(d.parts.allocator, "reserve", noted)
        asked = request(1000, max_tokens=0)
        [output] = await outputs(d.node, asked)
        assert (output.token_ids, output.finish_reason, output.prompt_logprobs) == ((), "length", None)
        [done] = [message for message in said if isinstance(message, Done)]
        assert [sent.component for sent in done.sent] == ["handoff"]
        assert done.pieces == {"handoff": 1}
        assert held == [1]
        await assert_works_again(p, d)


async def test_who_does_not_ask_hears_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pairs() as pair:
        p = await pair.prefill()
        d = await pair.decode(p)
        said = sent_by(p, monkeypatch)
        asked = request(500)
        assert [o.prompt_logprobs for o in await outputs(d.node, asked)] == [None] * 4
        assert not any(isinstance(message, PromptLogprobsPart) for message in said)
        assert [m.prompt_logprobs for m in said if isinstance(m, Done)] == [None]


async def test_they_go_in_parts_of_which_few_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is answered while the prompt is computed: four parts go, and the others when the first have come."""
    async with pairs() as pair:
        p = await pair.prefill()
        p.engine.chunk_tokens = 4096
        d = await pair.decode(p)
        said = sent_by(p, monkeypatch)
        asked = request(3000, prompt_logprobs=20)
        ignored = deaf_to(p, PromptLogprobsReceived, monkeypatch)
        answering = asyncio.create_task(outputs(d.node, asked))
        await until(lambda: len(ignored) >= MAX_UNDER_WAY)
        parts = {m.start: m for m in said if isinstance(m, PromptLogprobsPart)}
        assert len(parts) == MAX_UNDER_WAY
        assert not any(isinstance(message, Done) for message in said)
        monkeypatch.undo()
        check(await answering, asked)
        assert all(len(m.rows) <= PART_NBYTES for m in parts.values())


@pytest.mark.parametrize("what", ["PromptLogprobsPart", "PromptLogprobsReceived"])
@pytest.mark.parametrize("kind", ["drop", "duplicate", "reorder", "corrupt"])
async def test_a_part_or_its_answer_that_does_not_come_well_comes_again(kind: str, what: str) -> None:
    fault = (f"{kind}-message:{what}:2",)
    at_prefill = what == "PromptLogprobsPart"
    async with pairs() as pair:
        p = await pair.prefill(faults=fault if at_prefill else ())
        d = await pair.decode(p, faults=() if at_prefill else fault)
        asked = request(1500, prompt_logprobs=20)
        check(await outputs(d.node, asked), asked)
        await assert_works_again(p, d)


def other_rows(part: PromptLogprobsPart) -> PromptLogprobsPart:
    rows = bytearray(part.rows)
    rows[len(rows) // 2] ^= 1
    return msgspec.structs.replace(part, rows=bytes(rows))


WRONG_PARTS: dict[str, tuple[Callable[[PromptLogprobsPart], PromptLogprobsPart], str]] = {
    "other rows": (other_rows, "prompt_logprobs: their digest is not the one"),
    "half a row": (lambda part: msgspec.structs.replace(part, rows=part.rows[:-1]), "no whole number of rows of 36"),
    "too far": (lambda part: msgspec.structs.replace(part, start=part.start + 5000), "are outside of 1 .. 299"),
    "from the start": (lambda part: msgspec.structs.replace(part, rows=part.rows * 3), "are outside of 1 .. 299"),
}


@pytest.mark.parametrize("name", WRONG_PARTS)
async def test_wrong_rows_are_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, words = WRONG_PARTS[name]
    async with pairs() as pair:
        p = await pair.prefill()
        d = await pair.decode(p)
        changed(PromptLogprobsPart, change, monkeypatch)
        with pytest.raises(RequestFailed, match=words) as failed:
            await outputs(d.node, request(300, prompt_logprobs=2))
        assert (failed.value.code, failed.value.component) == ("component_mismatch", "prompt_logprobs")
        check_name = "digest" if name == "other rows" else "coverage"
        assert d.metric("pd_check_failures_total", check=check_name, component="prompt_logprobs") == 1
        await assert_works_again(p, d)


WRONG_CLAIMS: dict[str, tuple[SentPromptLogprobs | None, str]] = {
    "none": (None, "they were asked for, and Done claims none"),
    "fewer": (SentPromptLogprobs(298, 0), "Done claims 298 of them, 299 have come"),
    "another digest": (SentPromptLogprobs(299, 5), "their digest is not the one"),
}


@pytest.mark.parametrize("name", WRONG_CLAIMS)
async def test_a_wrong_claim_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    claim, words = WRONG_CLAIMS[name]
    async with pairs() as pair:
        p = await pair.prefill()
        d = await pair.decode(p)
        changed(Done, lambda done: msgspec.structs.replace(done, prompt_logprobs=claim), monkeypatch)
        with pytest.raises(RequestFailed, match=words) as failed:
            await outputs(d.node, request(300, prompt_logprobs=2))
        assert failed.value.component == "prompt_logprobs"
        await assert_works_again(p, d)


async def test_done_before_the_last_part_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill node that takes parts for answered that were not."""
    async with pairs() as pair:
        p = await pair.prefill()
        d = await pair.decode(p)
        monkeypatch.setattr("server.transfer.parts.PartsToSend.have_all_arrived", True)
        send = DecodePeer.send

        def without_parts(self: DecodePeer, message: AnyMessage) -> None:
            if not isinstance(message, PromptLogprobsPart):
                send(self, message)

        monkeypatch.setattr(DecodePeer, "send", without_parts)
        with pytest.raises(RequestFailed, match="they have come up to position 0 of 299"):
            await outputs(d.node, request(300, prompt_logprobs=2))
        await assert_works_again(p, d)


async def test_parts_that_nobody_asked_for_end_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pairs() as pair:
        p = await pair.prefill()
        d = await pair.decode(p)
        changed(
            Done,
            lambda done: PromptLogprobsPart(
                done.prefill, done.decode, done.registration, done.room, done.epoch, start=1, rows=b"x" * 12
            ),
            monkeypatch,
        )
        with pytest.raises(RequestFailed, match="prompt_logprobs: they were not asked for"):
            await outputs(d.node, request(300))
        await assert_works_again(p, d)


async def test_parts_that_are_never_answered_end_the_room_by_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines = replace(FAST, transfer_s=0.6)
    async with pairs() as pair:
        p = await pair.prefill(deadlines=deadlines)
        d = await pair.decode(p)
        deaf_to(p, PromptLogprobsReceived, monkeypatch)
        with pytest.raises(RequestFailed, match="phase transfer on the prefill node: nothing moved") as failed:
            await outputs(d.node, request(300, prompt_logprobs=2))
        assert failed.value.code == "deadline"
        monkeypatch.undo()
        await assert_works_again(p, d)


async def test_an_abort_while_parts_are_under_way_frees_both_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pairs() as pair:
        p = await pair.prefill()
        d = await pair.decode(p)
        ignored = deaf_to(p, PromptLogprobsReceived, monkeypatch)
        generation = d.node.submit(request(300, prompt_logprobs=2))
        await until(lambda: ignored)
        generation.abort()
        await until(lambda: generation.ended)
        monkeypatch.undo()
        await assert_works_again(p, d)


async def test_a_request_for_too_many_is_refused_by_both_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pairs() as pair:
        p = await pair.prefill()
        d = await pair.decode(p)
        monkeypatch.setattr("server.engine.prompt_logprobs.MAX_ENTRIES", 500)
        with pytest.raises(RequestFailed, match="with 1 alternatives each are 600: at most 500") as failed:
            d.node.submit(request(300, prompt_logprobs=1))
        assert failed.value.code == "bad_sampling"
        monkeypatch.setattr("server.decode.admission.over_limit", lambda *_: None)
        with pytest.raises(RequestFailed, match="with 1 alternatives each are 600: at most 500"):
            await outputs(d.node, request(300, prompt_logprobs=1))
        await assert_works_again(p, d)


# --- rooms that a router chose ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["prefill", "decode", "both"])
async def test_of_a_routers_room_each_node_has_what_its_own_request_asks_for(
    who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pairs() as pair:
        p = await pair.prefill()
        d = await pair.decode(p)
        said = sent_by(p, monkeypatch)
        routed = RoutedRoom(41, "127.0.0.1", p.node.bootstrap_port)
        asking = replace(request(500, prompt_logprobs=3), routed=routed)
        silent = replace(request(500), routed=routed)
        ends = await asyncio.gather(
            outputs(p.node, asking if who in ("prefill", "both") else silent),
            outputs(d.node, asking if who in ("decode", "both") else silent),
        )
        rows = PromptLogprobs(3, rows_of(asking.prompt_ids, 3))
        assert ends[0][0].prompt_logprobs == (rows if who in ("prefill", "both") else None)
        assert ends[1][0].prompt_logprobs == (rows if who in ("decode", "both") else None)
        assert any(isinstance(m, PromptLogprobsPart) for m in said) == (who != "prefill")
        await until(lambda: all_free(p) and all_free(d))
