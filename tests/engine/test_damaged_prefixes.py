"""What the cache gives is digested again before anything is written; and nothing is ever written to a shared page."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from server.cache.layout import Placement
from server.cache.live import live_positions
from server.cache.prefix import PrefixHit
from server.cache.snapshots import SnapshotPoint, slot_names
from server.cache.specs import Scope
from server.engine import prefix
from server.engine.events import (
    Cancel,
    ChunkComputed,
    ComputeFailed,
    Finished,
    Generate,
    HitRefused,
    Output,
    Prefill,
    PrefillFinished,
    SnapshotTaken,
)
from server.engine.prefix import TakeOver
from server.engine.request import DEFAULT_MAX_TOKENS, FinishReason, GenerationRequest, SamplingParams
from server.engine.runner import ModelRunner, SharedPage
from server.engine.tokenizer import Tokenizer
from server.failure import Failure
from server.model.batch import Segment
from server.model.interface import ForwardOutput, LoadedModel
from tests.engine.harness import TIMEOUT_S, Harness
from tests.engine.prefixes import PAGE, Reusing, page_digests
from tests.support.checkpoints import BUNDLED
from tests.support.models import load

N = 3 * PAGE
IDS = random.Random(4).choices(range(10, 500), k=N + 20)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(BUNDLED, draft=True)


@pytest.fixture(scope="module")
def node(model: LoadedModel, tokenizer: Tokenizer) -> Iterator[Reusing]:
    """Its cache holds three pages, and the snapshots behind the second and the third."""
    harness = Harness(model, tokenizer, k=3, digest_pages=True)
    made = Reusing(harness, k=3)
    made.seed(IDS[: N + 1], [2 * PAGE, N])
    yield made
    harness.engine.stop()


@pytest.fixture
def hit(node: Reusing) -> PrefixHit:
    found = node.hit(IDS)
    assert found is not None
    assert found.n == N
    return found


@pytest.fixture
def shorter(node: Reusing) -> PrefixHit:
    found = node.hit(IDS[:N])
    assert found is not None
    assert found.n == 2 * PAGE
    return found


def refused(node: Reusing, hit: PrefixHit) -> HitRefused:
    """That the engine refuses it and has not changed a byte."""
    command = node.command(IDS, hit)
    before = node.harness.arena.buffer.clone()
    events = node.events(command)
    assert node.harness.arena.buffer.equal(before)
    node.release(command.key)  # type: ignore[arg-type]
    [event] = events
    assert isinstance(event, HitRefused)
    assert (event.failure.code, event.failure.check) == ("prefix_damaged", "hit")
    return event


@pytest.mark.parametrize("name", ["c4_kv", "c4_index", "c128_kv"])
@pytest.mark.parametrize("page", [0, 1, 2])
def test_a_flipped_bit_in_a_page_is_refused_by_the_pages_number(
    node: Reusing, hit: PrefixHit, name: str, page: int
) -> None:
    c = node.harness.arena.layout.component(name)
    last_byte = c.offset + hit.pages[page].page * c.item_stride + c.rows * c.row_nbytes - 1
    node.harness.arena.buffer[last_byte] ^= 1
    try:
        event = refused(node, hit)
    finally:
        node.harness.arena.buffer[last_byte] ^= 1
    assert event.page == page
    assert event.failure.reason == f"page {page} of the prefix is not as it was when it was completed"


def test_those_are_all_components_of_a_page(node: Reusing) -> None:
    components = node.harness.arena.layout.components
    assert {c.name for c in components if c.scope is Scope.PAGE} == {"c4_kv", "c4_index", "c128_kv"}


def test_a_flipped_bit_in_each_part_of_a_snapshot_is_refused(node: Reusing, hit: PrefixHit) -> None:
    layout, start, ends = node.harness.arena.layout, 0, []
    for name, rows in live_positions(N, layout.window, slot_names(layout)).items():
        start += len(rows) * layout.component(name).row_nbytes
        if rows:
            ends.append(start)
    assert len(ends) == 4, "the windows of target and draft, and the last groups of the compressors with an overlap"
    for end in (*ends, hit.snapshot.nbytes):  # behind the rows are the streams
        data = bytearray(hit.snapshot.data)
        data[end - 1] ^= 1
        event = refused(node, replace(hit, snapshot=replace(hit.snapshot, data=bytes(data))))
        assert event.page is None
        assert event.failure.reason == "the snapshot's bytes are not those that were taken"


def test_a_snapshot_of_another_prefix_or_boundary_is_refused(node: Reusing, hit: PrefixHit, shorter: PrefixHit) -> None:
    """Whether the point says so or goes along with it: the pages have the last word."""
    other = SnapshotPoint(N, b"another prefix's")
    for wrong in (
        replace(hit, snapshot=shorter.snapshot),
        replace(hit, snapshot=shorter.snapshot, point=shorter.point),
        replace(hit, point=shorter.point),
        replace(hit, snapshot=replace(hit.snapshot, n=2 * PAGE)),
        replace(hit, snapshot=replace(hit.snapshot, key=other.key)),
        replace(hit, snapshot=replace(hit.snapshot, key=other.key), point=other),
        replace(shorter, snapshot=hit.snapshot, point=hit.point),
    ):
        assert refused(node, wrong).page is None


def test_a_snapshot_of_another_size_is_refused_even_unchecked(node: Reusing, hit: PrefixHit) -> None:
    wrong = replace(hit, snapshot=replace(hit.snapshot, data=hit.snapshot.data[:-1]))
    command = replace(node.command(IDS, wrong), hit_is_checked=False)
    before = node.harness.arena.buffer.clone()
    event = node.events(command)[-1]
    assert isinstance(event, HitRefused)
    assert event.page is None
    assert node.harness.arena.buffer.equal(before)
    node.release(command.key)  # type: ignore[arg-type]


def test_nothing_else_notices_the_damage(node: Reusing, hit: PrefixHit) -> None:
    """Unchecked, the same damage is computed on, and shows in the digests alone."""
    c = node.harness.arena.layout.component("c4_kv")
    byte = c.offset + hit.pages[1].page * c.item_stride
    digests = []
    for flip in (0, 1):
        node.harness.arena.buffer[byte] ^= flip
        command = replace(node.command(IDS, hit), hit_is_checked=False)
        events = node.events(command)
        node.harness.arena.buffer[byte] ^= flip
        assert isinstance(events[-1], PrefillFinished)
        digests.append(page_digests(events))
        node.release(command.key)  # type: ignore[arg-type]
    assert [a == b for a, b in zip(*digests, strict=True)] == [True, False, True]


# --- steps ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch, node: Reusing) -> list[object]:
    """A page is a slice of its own. Slices and, between them, the outputs of the engine, in order."""
    seen: list[object] = []
    step, put = TakeOver.step, node.harness.engine._on_event  # noqa: SLF001

    def noted(self: TakeOver) -> bool:
        seen.append("slice")
        return step(self)

    def put_and_note(event: object) -> None:
        seen.append(type(event))
        put(event)  # type: ignore[arg-type]

    monkeypatch.setattr(prefix, "SLICE_NBYTES", 1)
    monkeypatch.setattr(TakeOver, "step", noted)
    monkeypatch.setattr(node.harness.engine, "_on_event", put_and_note)
    return seen


def small(name: str, n: int = 40, max_tokens: int = DEFAULT_MAX_TOKENS) -> GenerationRequest:
    return GenerationRequest(name, tuple(IDS[:n]), SamplingParams(ignore_eos=True, max_tokens=max_tokens))


def test_other_requests_go_on_between_the_slices(node: Reusing, hit: PrefixHit, slices: list[object]) -> None:
    owner, where = node.reserve(600)
    node.harness.engine.submit(Generate("running", small("running", max_tokens=400), where))
    node.harness.until(Output, "running")
    command = node.command(IDS, hit)
    [first, *_] = node.events(command)
    node.harness.engine.submit(Cancel("running"))
    node.harness.until(Finished, "running")
    assert isinstance(first, ChunkComputed)
    assert (first.n_computed, first.pages) == (N, tuple(page.digest for page in hit.pages))
    at = [i for i, what in enumerate(slices) if what == "slice"]
    assert len(at) == 3
    assert all(Output in slices[a:b] for a, b in pairwise(at))
    node.release(owner)
    node.release(command.key)  # type: ignore[arg-type]


def test_a_prompt_is_cancelled_while_its_hit_is_proven(
    node: Reusing, hit: PrefixHit, slices: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = TakeOver.step
    command = node.command(IDS, hit)
    before = node.harness.arena.buffer.clone()

    def step_and_cancel(self: TakeOver) -> bool:
        node.harness.engine.submit(Cancel(command.key))
        return step(self)

    monkeypatch.setattr(TakeOver, "step", step_and_cancel)
    assert node.events(command) == [Finished(command.key, FinishReason.ABORT)]
    assert slices.count("slice") == 1
    assert node.harness.arena.buffer.equal(before)
    node.release(command.key)  # type: ignore[arg-type]


def test_a_prompt_whose_tokens_are_scored_takes_no_hit(node: Reusing, hit: PrefixHit) -> None:
    command = node.command(IDS, hit)
    scored = replace(command.request.sampling, prompt_logprobs=2)
    [failed] = node.events(replace(command, request=replace(command.request, sampling=scored)))
    assert isinstance(failed, ComputeFailed)
    assert "computed as a whole" in failed.failure.reason
    node.release(command.key)  # type: ignore[arg-type]


# --- shared pages -----------------------------------------------------------------------------------------------------


def test_a_step_that_would_write_to_a_shared_page_fails_alone_and_by_name(
    node: Reusing, hit: PrefixHit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one step with another's second chunk, which nothing but a refused step lets be computed again."""
    both, forward, sizes = threading.Event(), ModelRunner.forward, []

    def waiting(self: ModelRunner, segments: Sequence[Segment], **options: bool) -> ForwardOutput:
        assert both.wait(TIMEOUT_S)
        sizes.append(len(segments))
        return forward(self, segments, **options)

    monkeypatch.setattr(ModelRunner, "forward", waiting)
    owner, where = node.reserve(600)
    command = node.command(IDS, hit)
    shared = node.harness.arena.layout.live_runs(N, command.placement)["c4_kv"]
    before = node.harness.arena.read(shared)
    node.harness.engine.submit(Generate("other", small("other", n=100, max_tokens=1), where))
    node.harness.engine.submit(replace(command, hit=None))
    both.set()
    events = node.harness.finish(["other", command.key])
    reason = "position 0 lies in page 0 of the request, of which the first 3 may be others' too"
    assert ComputeFailed(command.key, Failure("shared_page", reason)) in events
    assert Finished("other", FinishReason.LENGTH) in events
    assert 2 in sizes
    assert node.harness.arena.read(shared) == before
    node.release(owner)
    node.release(command.key)  # type: ignore[arg-type]


@pytest.mark.parametrize("n_read_only", [1, 2])
def test_a_page_may_be_written_from_its_first_position_on(node: Reusing, n_read_only: int) -> None:
    placement = Placement(1, (1, 2), read_only=n_read_only)
    segments = [Segment([5], PAGE, placement)]
    if n_read_only == 1:
        node.harness.runner._check_pages(segments)  # noqa: SLF001
    else:
        with pytest.raises(SharedPage, match="position 256 lies in page 1 of the request, of which the first 2"):
            node.harness.runner.forward(segments)


# --- pages and snapshots of requests that go on -----------------------------------------------------------------------


def test_a_snapshot_comes_behind_its_pages_and_never_of_memory_of_another(node: Reusing) -> None:
    ids = IDS[: 2 * PAGE]
    command = node.command(ids, None, at=[PAGE, 2 * PAGE])
    events = node.events(command)
    told = [(type(e), len(e.pages)) if isinstance(e, ChunkComputed) else type(e) for e in events]
    assert told[3:5] == [(ChunkComputed, 1), SnapshotTaken]
    assert told[-3:] == [(ChunkComputed, 1), SnapshotTaken, PrefillFinished]
    node.release(command.key)  # type: ignore[arg-type]

    command = node.command(ids, None, at=[PAGE])
    owner = command.owner
    assert owner is not None
    stranger = replace(owner, epoch=2)
    node.harness.arena.owners.clear(command.placement, owner)
    node.harness.arena.owners.stamp(command.placement, stranger)
    events = node.events(command)
    assert not [event for event in events if isinstance(event, SnapshotTaken)]
    assert isinstance(events[-1], ComputeFailed)
    assert events[-1].failure.code == "wrong_owner"
    node.harness.arena.owners.clear(command.placement, stranger)
    node.release(owner)


def test_two_requests_in_one_step_are_cut_each_for_itself(node: Reusing) -> None:
    """The chunk of one ends at a snapshot, and what is left of the step is the other's."""
    prompts = [random.Random(seed).choices(range(10, 500), k=300) for seed in (1, 2)]
    alone = []
    for ids in prompts:
        command = node.command(ids, None)
        alone.append(node.compute(command))
        node.release(command.key)  # type: ignore[arg-type]
    commands: list[Prefill] = [node.command(ids, None, at=[PAGE]) for ids in prompts]
    for command in commands:
        node.harness.engine.submit(command)
    done = node.harness.finish([c.key for c in commands])
    for command, expected in zip(commands, alone, strict=True):
        [finished] = [e for e in done if isinstance(e, PrefillFinished) and e.key == command.key]
        assert (finished.first, finished.parts) == (expected.first, expected.parts)
        assert [e.snapshot.n for e in done if isinstance(e, SnapshotTaken) and e.key == command.key] == [PAGE]
        node.release(command.key)  # type: ignore[arg-type]
