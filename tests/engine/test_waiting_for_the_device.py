"""What a GPU still computes is waited for before anybody else gets the memory. No GPU is here: a mark is logged."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from server.cache.layout import Placement
from server.engine import runner, sampler
from server.engine.events import Cancel, ComputeFailed, Finished, Generate, Prefill, PrefillFinished, Scrub
from server.engine.request import GenerationRequest, SamplingParams
from server.engine.runner import ModelRunner
from server.engine.sampler import NonFiniteLogits, RowSampling, read_best, sample
from server.engine.tokenizer import Tokenizer
from server.model.interface import LoadedModel
from tests.engine.harness import Harness
from tests.engine.prefixes import Reusing
from tests.support.checkpoints import BUNDLED
from tests.support.models import load

WHERE = Placement(1, (1, 2))


class Log(list[str]):
    """What the engine did, in order: ``computed`` (queued, on a GPU), ``marked``, ``waited``, and the events' names."""

    def waited_for_all(self, event: str) -> bool:
        """Whether, each time before ``event``, a mark behind everything that was computed was waited for."""
        ends = [i for i, what in enumerate(self) if what == event]
        befores = [self[:end] for end in ends]
        return bool(ends) and all(_is_waited_for(before) for before in befores)


def _is_waited_for(log: list[str]) -> bool:
    last = max(i for i, what in enumerate(log) if what == "computed")
    behind = log[last:]
    return "marked" in behind and "waited" in behind[behind.index("marked") :]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()

    class Mark:
        def __init__(self, _device: torch.device) -> None:
            log.append("marked")

        def wait(self) -> None:
            log.append("waited")

    monkeypatch.setattr(runner, "Mark", Mark)
    for name in ("forward", "draft_rows", "draft"):
        computing = getattr(ModelRunner, name)

        def logged(*args: Any, computing: Any = computing, **kwargs: Any) -> Any:
            log.append("computed")
            return computing(*args, **kwargs)

        monkeypatch.setattr(ModelRunner, name, logged)
    return log


@pytest.fixture(scope="module")
def draft_model() -> LoadedModel:
    return load(BUNDLED, draft=True)


@pytest.fixture
def harness(draft_model: LoadedModel, tokenizer: Tokenizer, log: Log) -> Iterator[Harness]:
    made = Harness(draft_model, tokenizer, k=3)
    put = made.events.put

    def put_and_note(event: Any) -> None:
        log.append(type(event).__name__)
        put(event)

    made.engine._on_event = put_and_note  # noqa: SLF001
    yield made
    made.engine.stop()


def request(n: int, **sampling: Any) -> GenerationRequest:
    ids = tuple(random.Random(n).choices(range(10, 500), k=n))
    return GenerationRequest("r", ids, SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **sampling}))


def test_a_chunk_is_told_of_when_it_is_computed(harness: Harness, log: Log) -> None:
    """The prefill node submits its pages when it is told of the chunk, and all the rest when the prompt is finished."""
    harness.engine.submit(Prefill("room", request(300), WHERE, room=7, epoch=1))
    harness.until(PrefillFinished, "room")
    assert log.count("ChunkComputed") == 4
    assert log.waited_for_all("ChunkComputed")
    assert log.waited_for_all("PrefillFinished")
    assert log[-3:] == ["marked", "waited", "PrefillFinished"], "the hand-off row is written after the last chunk"


def test_a_snapshot_is_read_and_a_hit_is_told_of_when_they_are_computed(harness: Harness, log: Log) -> None:
    """Behind a hit the draft's row of its last position is computed."""
    node, ids = Reusing(harness, k=3), request(300).prompt_ids
    node.seed(ids, [256])
    assert log.waited_for_all("SnapshotTaken")
    hit = node.hit(ids)
    assert hit is not None
    log.clear()
    events = node.events(node.command(ids, hit))
    assert isinstance(events[-1], PrefillFinished)
    assert log[:4] == ["computed", "marked", "waited", "ChunkComputed"]


def test_memory_is_free_when_nothing_writes_to_it(harness: Harness, log: Log) -> None:
    harness.engine.submit(Generate("done", request(70), WHERE))
    harness.until(Finished, "done")
    assert log.waited_for_all("Finished")
    harness.engine.submit(Generate("gone", request(70, max_tokens=400), WHERE))
    harness.engine.submit(Cancel("gone"))
    harness.until(Finished, "gone")
    assert log.waited_for_all("Finished")
    harness.engine.submit(Scrub("room", WHERE))
    harness.events.get(timeout=60)
    assert log[-3:] == ["marked", "waited", "Scrubbed"]


def test_a_step_that_fails_may_still_be_computed(harness: Harness, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_args: Any, **_kwargs: Any) -> Any:
        log.append("computed")
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ModelRunner, "forward", failing)
    harness.engine.submit(Generate("bad", request(70), WHERE))
    harness.until(ComputeFailed, "bad")
    assert log.waited_for_all("ComputeFailed")


def test_a_decode_step_waits_for_nothing_but_its_tokens(harness: Harness, log: Log) -> None:
    harness.engine.submit(Generate("long", request(70, max_tokens=40), WHERE))
    harness.until(Finished, "long")
    first = log.index("Output")
    last = len(log) - log[::-1].index("Output")
    assert log[first:last].count("computed") > 10
    assert "marked" not in log[first:last]


class Far(torch.Tensor):
    """A tensor that says that it is not in the host's memory."""

    is_cpu = False


def test_of_greedy_rows_one_number_each_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, ...]] = []

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        read.append(tuple(tensor.shape))
        return tensor.as_subclass(torch.Tensor)

    monkeypatch.setattr(sampler, "to_host", to_host)
    logits = torch.randn(6, 40).round(decimals=1)  # with ties
    greedy = [RowSampling(SamplingParams(temperature=0.0), 0, i) for i in range(6)]
    drawn = [*greedy[:5], RowSampling(SamplingParams(temperature=1.0, logprobs=2), 3, 9)]
    assert sample(logits.as_subclass(Far), greedy) == sample(logits, greedy)
    assert read == [(6,)]
    assert sample(logits.as_subclass(Far), drawn) == sample(logits, drawn)
    assert read == [(6,), (6, 40)]


def test_rows_without_a_best_token_are_the_samplers() -> None:
    logits = torch.randn(6, 40)
    greedy = [RowSampling(SamplingParams(temperature=0.0), 0, i) for i in range(6)]
    assert read_best(logits) == [choice.token_id for choice in sample(logits, greedy)]
    logits[1, 3], logits[4] = float("nan"), float("-inf")
    assert [i for i, token in enumerate(read_best(logits)) if token < 0] == [1, 4]
    for given in (logits, logits.as_subclass(Far)):
        with pytest.raises(NonFiniteLogits) as caught:
            sample(given, greedy)
        assert caught.value.rows == (1, 4)
