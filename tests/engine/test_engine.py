"""The engine thread with the bundled model: batching, cancelling, failing alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from server.cache.digest import live_digests
from server.cache.handoff import prompt_hash, read_handoff
from server.cache.layout import Placement
from server.cache.owners import Owner
from server.engine.events import (
    Cancel,
    ChunkComputed,
    ComputeFailed,
    Finished,
    Generate,
    Output,
    Prefill,
    PrefillFinished,
    Prepare,
    Resume,
    Scrub,
    Scrubbed,
)
from server.engine.request import FinishReason, GenerationRequest, SamplingParams, TokenLogprob
from server.engine.runner import ModelRunner
from server.engine.stopping import OutputProcessor
from server.engine.tokenizer import Tokenizer
from server.failure import Failure
from server.model.batch import Segment
from server.model.interface import ForwardOutput, LoadedModel
from tests.engine.harness import TIMEOUT_S, Harness, outputs_of, tokens_of


@pytest.fixture
def harness(model: LoadedModel, tokenizer: Tokenizer) -> Iterator[Harness]:
    made = Harness(model, tokenizer)
    yield made
    made.engine.stop()


def request(n: int, seed: int = 0, **sampling: Any) -> GenerationRequest:
    ids = tuple(random.Random(seed).choices(range(10, 500), k=n))
    params = SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **sampling})
    return GenerationRequest(f"r{n}-{seed}", ids, params)


def test_sixteen_at_once_answer_as_alone(harness: Harness) -> None:
    requests = [request(n, seed=n, logprobs=2) for n in (1, 3, 18, 64, 65, 129, 200, 257)]
    alone = {}
    for r in requests:
        harness.engine.submit(Generate(r.request_id, r, Placement(1, (1, 2))))
        alone[r.request_id] = outputs_of(harness.until(Finished, r.request_id), r.request_id)
    events = harness.generate(requests)
    assert {r.request_id: outputs_of(events, r.request_id) for r in requests} == alone


def test_a_handed_over_prompt_resumes_like_a_local_one(harness: Harness) -> None:
    r = request(150, logprobs=3)
    harness.engine.submit(Generate("local", r, Placement(1, (1, 2))))
    local = tokens_of(harness.until(Finished, "local"), "local")
    where = Placement(2, (5, 4))
    harness.engine.submit(Prefill("room", r, where, room=77, epoch=2))
    events = harness.until(PrefillFinished, "room")
    assert [e.n_computed for e in events if isinstance(e, ChunkComputed)] == [64, 128]
    done = events[-1]
    assert isinstance(done, PrefillFinished)
    row = read_handoff(harness.arena, where, 2)
    assert (row.room, row.epoch, row.n, row.prompt_hash) == (77, 2, 150, prompt_hash(r.prompt_ids))
    assert (row.first_token, row.first_logprob, row.top) == (done.first.token_id, done.first.logprob, done.first.top)
    assert done.parts.digests() == live_digests(harness.arena, 150, where)
    harness.engine.submit(Resume("room", r, where, done.first))
    assert tokens_of(harness.until(Finished, "room"), "room") == local


def test_a_pages_digest_is_taken_as_soon_as_it_is_complete(harness: Harness) -> None:
    """Three pages, and a byte of the first changes while the last is computed: the digest is that of before."""
    n, where = 700, Placement(2, (5, 4, 3))
    c = harness.arena.layout.component("c4_index")
    harness.engine.submit(Prefill("quiet", request(n), Placement(1, (1, 2, 6)), 1, 1))
    quiet = harness.until(PrefillFinished, "quiet")[-1]
    assert isinstance(quiet, PrefillFinished)
    harness.engine.submit(Prefill("room", request(n), where, 1, 1))
    while (event := harness.until(ChunkComputed, "room")[-1]) and getattr(event, "n_computed", 0) < 640:
        pass
    harness.arena.buffer[c.offset + where.pages[0] * c.item_stride] ^= 1
    done = harness.until(PrefillFinished, "room")[-1]
    assert isinstance(done, PrefillFinished)
    assert done.parts.digests()["c4_index"] == quiet.parts.digests()["c4_index"]
    assert live_digests(harness.arena, n, where)["c4_index"] != quiet.parts.digests()["c4_index"]


def test_what_was_prepared_is_used_once(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume makes no output processor if one is ready; after a scrub none is."""
    made: list[object] = []

    def make(*args: Any) -> OutputProcessor:
        made.append(args)
        return OutputProcessor(*args)

    monkeypatch.setattr("server.engine.preparation.OutputProcessor", make)
    r, where = request(20, max_tokens=1), Placement(1, (1,))
    for is_scrubbed, n_made in ((False, 1), (True, 3)):
        harness.engine.submit(Prepare("x", r))
        if is_scrubbed:
            harness.engine.submit(Scrub("x", where))
        harness.engine.submit(Resume("x", r, where, TokenLogprob(42, 0.0)))
        harness.until(Finished, "x")
        assert len(made) == n_made


@pytest.mark.parametrize(("sampling", "reason"), [({"max_tokens": 1}, "length"), ({"stop_token_ids": (42,)}, "stop")])
def test_the_first_token_can_be_the_last(harness: Harness, sampling: dict[str, Any], reason: str) -> None:
    r = request(20, **sampling)
    harness.engine.submit(Resume("x", r, Placement(1, (1,)), TokenLogprob(42, 0.0)))
    events = harness.until(Finished, "x")
    assert events[-1] == Finished("x", FinishReason(reason))
    assert len(tokens_of(events, "x")) == 1


def test_a_request_can_be_cancelled_in_every_phase(harness: Harness) -> None:
    where = Placement(3, (7, 8, 9, 10))
    for command in (Generate("x", request(900), where), Prefill("x", request(900), where, 1, 1)):
        harness.engine.submit(command)
        harness.engine.submit(Cancel("x"))
        assert harness.until(Finished, "x")[-1] == Finished("x", FinishReason.ABORT)
    harness.engine.submit(Generate("x", request(70, max_tokens=500), where))
    harness.until(Output, "x")
    harness.engine.submit(Cancel("x"))
    harness.until(Finished, "x")
    harness.engine.submit(Cancel("x"))
    harness.engine.submit(Scrub("y", where))
    assert harness.until(Scrubbed, "y") == [Scrubbed("y")], "nothing is left of it"


def test_state_that_was_never_written_fails_that_request_alone(harness: Harness) -> None:
    """Poisoned memory under one of two requests: it fails by name, the other one goes on."""
    bad, good = request(100, seed=1), request(100, seed=2, max_tokens=30)
    harness.engine.submit(Generate("good", good, Placement(1, (1,))))
    harness.until(Output, "good")
    harness.engine.submit(Resume("bad", bad, Placement(2, (2,)), TokenLogprob(5, 0.0)))
    events = harness.finish(["good", "bad"])
    [failed] = [event for event in events if isinstance(event, ComputeFailed)]
    assert (failed.key, failed.failure.code) == ("bad", "non_finite_logits")
    assert Finished("good", FinishReason.LENGTH) in events


def test_an_exception_in_a_batch_fails_only_its_cause(harness: Harness) -> None:
    good = request(40, seed=1, max_tokens=20)
    harness.engine.submit(Generate("good", good, Placement(1, (1,))))
    wrong = replace(request(40, seed=2), prompt_ids=(10**6,))
    harness.engine.submit(Generate("bad", wrong, Placement(2, (2,))))
    failed = [e for e in harness.finish(["good", "bad"]) if isinstance(e, ComputeFailed)]
    assert [(e.key, e.failure.code) for e in failed] == [("bad", "engine_error")]


def test_a_chunk_whose_window_may_be_overwritten_is_not_computed_again(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step ends after it has written: the rows that the second chunk began with are gone from the ring."""
    long, short, forward, submitted = request(100, seed=1), request(20, seed=2), ModelRunner.forward, threading.Event()
    expected = tokens_of(harness.generate([short]), short.request_id)

    def broken(self: ModelRunner, segments: Sequence[Segment], **options: bool) -> ForwardOutput:
        submitted.wait(TIMEOUT_S)
        output = forward(self, segments, **options)
        if len(segments) == 2 and segments[0].start == 64:
            raise MemoryError("simulated")
        return output

    monkeypatch.setattr(ModelRunner, "forward", broken)
    harness.engine.submit(Generate("long", long, Placement(1, (1,))))
    harness.engine.submit(Generate("short", short, Placement(2, (2,))))
    submitted.set()
    events = harness.finish(["long", "short"])
    failed = [event for event in events if isinstance(event, ComputeFailed)]
    assert failed == [ComputeFailed("long", Failure("engine_error", "MemoryError: simulated"))]
    assert tokens_of(events, "short") == expected


def test_a_sampler_that_fails_ends_the_requests_of_its_step_and_not_the_engine(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> list[TokenLogprob]:
        raise MemoryError("simulated")

    with monkeypatch.context() as patch:
        patch.setattr("server.engine.choosing.sample", broken)
        harness.engine.submit(Generate("bad", request(40, seed=1), Placement(1, (1,))))
        assert harness.until(ComputeFailed, "bad")[-1] == ComputeFailed(
            "bad", Failure("engine_error", "MemoryError: simulated")
        )
    harness.engine.submit(Generate("good", request(40, seed=1), Placement(1, (1,))))
    assert harness.until(Finished, "good")[-1] == Finished("good", FinishReason.LENGTH)


def test_a_first_token_that_is_none_fails_that_request_alone(harness: Harness) -> None:
    good = request(40, seed=1, max_tokens=20)
    harness.engine.submit(Generate("good", good, Placement(1, (1,))))
    harness.engine.submit(Resume("bad", request(40), Placement(2, (2,)), TokenLogprob(-1, 0.0)))
    failed = [e for e in harness.finish(["good", "bad"]) if isinstance(e, ComputeFailed)]
    assert [(e.key, e.failure.code) for e in failed] == [("bad", "engine_error")]


def test_an_answer_that_cannot_be_told_fails_that_request_alone(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("simulated")

    with monkeypatch.context() as patched:
        patched.setattr(ModelRunner, "hand_over", broken)
        patched.setattr(OutputProcessor, "feed", broken)
        for command in (
            Prefill("bad", request(40), Placement(2, (2,)), 1, 1),
            Generate("bad", request(40), Placement(2, (2,))),
        ):
            harness.engine.submit(command)
            assert harness.until(ComputeFailed, "bad")[-1] == ComputeFailed(
                "bad", Failure("engine_error", "ZeroDivisionError: simulated")
            )
    harness.engine.submit(Generate("good", request(40), Placement(2, (2,))))
    assert len(tokens_of(harness.until(Finished, "good"), "good")) == 6


def test_scrub_is_answered(harness: Harness) -> None:
    harness.engine.submit(Scrub("x", Placement(1, (1,))))
    assert harness.until(Scrubbed, "x")[-1] == Scrubbed("x")


def test_sampling_depends_on_seed_and_position_only(harness: Harness) -> None:
    r = request(30, temperature=1.0, seed=11, max_tokens=12)
    answers = []
    for key in ("a", "b"):
        harness.engine.submit(Generate(key, r, Placement(1, (1,))))
        answers.append(tokens_of(harness.until(Finished, key), key))
    other = replace(r, sampling=replace(r.sampling, seed=12))
    harness.engine.submit(Generate("c", other, Placement(1, (1,))))
    answers.append(tokens_of(harness.until(Finished, "c"), "c"))
    assert answers[0] == answers[1] != answers[2]


def test_poisoned_memory_is_never_read(model: LoadedModel, tokenizer: Tokenizer) -> None:
    """The same request on poisoned and on zeroed memory: not a bit differs."""
    outputs = []
    for poison in (True, False):
        made = Harness(model, tokenizer)
        made.arena.poison = poison
        if not poison:
            made.arena.buffer.zero_()
        made.engine.submit(Generate("x", request(130, logprobs=5), Placement(4, (6, 3))))
        outputs.append(outputs_of(made.until(Finished, "x"), "x"))
        made.engine.stop()
    assert outputs[0] == outputs[1]
    assert all(torch.isfinite(torch.tensor([lp.logprob for lp in e.output.logprobs])).all() for e in outputs[0])


def test_a_prompt_in_memory_of_another_is_not_handed_over(harness: Harness) -> None:
    """Stamped as somebody else's while it was computed; the memory, which is not ours, is left as it is."""
    where, owner, other = Placement(3, (2,)), Owner(1, 1), Owner(1, 2)
    harness.arena.owners.stamp(where, other)
    harness.engine.submit(Prefill("room", request(70), where, 1, 1, owner))
    failed = harness.until(ComputeFailed, "room")[-1]
    reason = f"c4_kv: page 2 belongs to {other}, expected {owner}"
    assert failed == ComputeFailed("room", Failure("wrong_owner", reason, "c4_kv", "stamp"))
    harness.arena.owners.clear(where, other)
    harness.arena.owners.stamp(where, owner)
    harness.engine.submit(Prefill("again", request(70), where, 1, 1, owner))
    assert isinstance(harness.until(PrefillFinished, "again")[-1], PrefillFinished)


def test_an_answer_is_not_decoded_from_memory_of_another(harness: Harness) -> None:
    where = Placement(3, (2,))
    harness.arena.owners.stamp(where, Owner(1, 2))
    before = harness.arena.buffer.clone()
    harness.engine.submit(Resume("x", request(70), where, TokenLogprob(42, 0.0), Owner(1, 1)))
    failed = harness.until(ComputeFailed, "x")[-1]
    assert isinstance(failed, ComputeFailed)
    assert failed.failure.component == "c4_kv"
    assert harness.arena.buffer.equal(before)
