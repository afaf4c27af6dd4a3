"""Speculative decoding in the engine: the output of plain decoding, whatever the drafts are and however many stand."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from server.cache.layout import Placement
from server.engine import engine as engine_module
from server.engine.engine import Engine
from server.engine.events import ComputeFailed, Event, Output, Prefill, PrefillFinished, Resume
from server.engine.request import GenerationRequest, SamplingParams, TokenLogprob
from server.engine.runner import ModelRunner
from server.engine.sampler import RowSampling, sample
from server.engine.speculation import ChainStart, DraftState, accepted
from server.engine.tokenizer import Tokenizer
from server.model.interface import LoadedModel
from tests.engine.harness import Harness, tokens_of
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.models import load
from tests.support.runners import make_runner

LENGTHS = [1, 3, 18, 63, 64, 127, 129, 255, 257]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = tmp_path_factory.mktemp("draft")
    write_checkpoint(path, seed=5, draft=True, vocab_size=VOCAB_SIZE)
    return load(path, draft=True)


@pytest.fixture
def harness(model: LoadedModel, tokenizer: Tokenizer) -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def make(k: int, *, cold: bool = False) -> Harness:
        made.append(Harness(model, tokenizer, k, cold=cold))
        return made[-1]

    yield make
    for one in made:
        one.engine.stop()


def requests(lengths: Sequence[int], **sampling: Any) -> list[GenerationRequest]:
    params = SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **sampling})
    return [GenerationRequest(f"r{n}", tuple(random.Random(n).choices(range(3, 520), k=n)), params) for n in lengths]


def texts(events: list[Event], among: Sequence[GenerationRequest]) -> list[list[int]]:
    return [tokens_of(events, r.request_id) for r in among]


SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 5}


@pytest.mark.parametrize(
    ("k", "sampling"),
    [
        pytest.param(1, {}, id="greedy-1"),
        pytest.param(3, {}, id="greedy-3", marks=pytest.mark.full),
        pytest.param(8, {}, id="greedy-8"),
        pytest.param(1, SAMPLED, id="sampled-1", marks=pytest.mark.full),
        pytest.param(3, SAMPLED, id="sampled-3"),
        pytest.param(8, SAMPLED, id="sampled-8", marks=pytest.mark.full),
    ],
)
def test_drafts_of_the_layer_change_no_token(harness: Callable[..., Harness], k: int, sampling: dict[str, Any]) -> None:
    batch = requests(LENGTHS, **sampling)
    plain = harness(0).generate(batch)
    spec = harness(k).generate(batch)
    assert texts(spec, batch) == texts(plain, batch)


@pytest.mark.parametrize("k", [2, 5])
def test_right_and_wrong_drafts_mixed_in_one_batch(
    harness: Callable[..., Harness], k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that know the answer, but go wrong at random places: every accept count occurs, the output stays."""
    batch = requests(LENGTHS, logprobs=1)
    events = harness(0).generate(batch)
    answers = {r.prompt_ids: tokens_of(events, r.request_id) for r in batch}
    rng = random.Random(0)
    by_slot = {i + 1: r for i, r in enumerate(batch)}

    def propose(runner: ModelRunner, starts: Sequence[ChainStart], kernel: object) -> list[list[int]]:
        drafts = []
        for s in starts:
            prompt = by_slot[s.placement.slot].prompt_ids
            done = s.start + len(s.next_ids) - len(prompt) + 1
            right = answers[prompt][done : done + s.n_draft]
            drafts.append([t if rng.random() < 0.7 else 7 for t in right] + [7] * (s.n_draft - len(right)))
        return drafts

    monkeypatch.setattr(engine_module, "propose", propose)
    seen = harness(k).generate(batch)
    assert texts(seen, batch) == texts(events, batch)
    logprobs = [[lp for e in es if isinstance(e, Output) for lp in e.output.logprobs] for es in (events, seen)]
    assert sorted(map(repr, logprobs[0])) == sorted(map(repr, logprobs[1]))
    accepts = {e.output.n_accepted for e in seen if isinstance(e, Output) and e.output.n_proposed == k}
    assert accepts == set(range(k + 1))


def test_stops_cut_inside_an_accepted_run(harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch) -> None:
    (r,) = requests([30])
    answer = texts(harness(0).generate([r]), [r])[0]

    def propose(runner: ModelRunner, starts: Sequence[ChainStart], kernel: object) -> list[list[int]]:
        return [answer[s.start + len(s.next_ids) - 30 + 1 :][: s.n_draft] for s in starts]

    monkeypatch.setattr(engine_module, "propose", propose)
    first = answer.index(answer[5])
    (stopped,) = requests([30], stop_token_ids=(answer[5],))
    assert texts(harness(5).generate([stopped]), [stopped])[0] == answer[: first + 1]
    for max_tokens in (1, 2, 4, 7):
        (short,) = requests([30], max_tokens=max_tokens)
        assert texts(harness(5).generate([short]), [short])[0] == answer[:max_tokens]


@pytest.mark.parametrize("end", ["stop_token_ids", "stop", "max_tokens"])
def test_drafts_that_stand_behind_the_end_are_not_counted(
    harness: Callable[..., Harness], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """All drafts are right, and the answer ends within them: every step counts what it gave out, no more."""
    (r,) = requests([30])
    answer = texts(harness(0).generate([r]), [r])[0]

    def propose(runner: ModelRunner, starts: Sequence[ChainStart], kernel: object) -> list[list[int]]:
        return [answer[s.start + len(s.next_ids) - 30 + 1 :][: s.n_draft] for s in starts]

    monkeypatch.setattr(engine_module, "propose", propose)
    one, n_cut = harness(5), 0
    for last in range(1, 13):
        token = answer[last]
        values = {"stop_token_ids": (token,), "stop": (tokenizer.decode([token]) or "none",), "max_tokens": last + 1}
        (ending,) = requests([30], **{end: values[end]})
        steps = [e.output for e in one.generate([ending]) if isinstance(e, Output)]
        assert [o.n_accepted for o in steps] == [len(o.token_ids) - 1 for o in steps]
        n_cut += 1 <= steps[-1].n_accepted < steps[-1].n_proposed
    assert n_cut or end == "max_tokens"


@pytest.mark.parametrize("cold", [False, True])
def test_a_handed_over_draft_goes_on_step_by_step(harness: Callable[..., Harness], cold: bool) -> None:
    """From a prefill engine's own arena: the same tokens, and warm also the same accept counts, as the local run."""
    (r,) = requests([150])
    one = harness(3, cold=cold)
    local = harness(3).generate([r])
    where = Placement(7, (5, 4))
    one.engine.submit(Prefill("room", r, where, room=1, epoch=1))
    done = one.finish(["room"])[-1]
    assert isinstance(done, PrefillFinished)
    one.engine.submit(Resume("room", r, where, done.first))
    events = one.finish(["room"])
    assert tokens_of(events, "room") == tokens_of(local, r.request_id)
    if not cold:
        steps = [[e.output for e in part if isinstance(e, Output)] for part in (events, local)]
        assert [(o.n_proposed, o.n_accepted) for o in steps[0]] == [(o.n_proposed, o.n_accepted) for o in steps[1]]


def test_a_missing_draft_window_fails_by_name_instead_of_drafting_badly(harness: Callable[..., Harness]) -> None:
    (r,) = requests([150])
    one, where = harness(3), Placement(7, (5, 4))
    one.engine.submit(Prefill("room", r, where, room=1, epoch=1))
    done = one.finish(["room"])[-1]
    assert isinstance(done, PrefillFinished)
    one.arena.view("draft_swa")[7] = float("nan")
    one.engine.submit(Resume("room", r, where, done.first))
    failed = one.finish(["room"])[-1]
    assert isinstance(failed, ComputeFailed)
    assert failed.failure.code == "non_finite_logits"


def test_more_drafts_than_the_rings_can_undo_are_refused(model: LoadedModel, tokenizer: Tokenizer) -> None:
    runner = make_runner(model, spec_tokens=3)
    with pytest.raises(ValueError, match="4 draft tokens a step cannot be undone: the rings have room for 3"):
        Engine(runner, tokenizer, lambda event: None, spec_tokens=4)
    Engine(runner, tokenizer, lambda event: None, spec_tokens=3)


def test_accepted_counts_the_leading_matches() -> None:
    choices = [TokenLogprob(t, 0.0) for t in (5, 6, 7, 8)]
    assert [accepted(choices, d) for d in ([5, 6, 7], [5, 6, 9], [1, 6, 7], [])] == [3, 2, 0, 0]


def test_verified_drafts_keep_the_targets_distribution() -> None:
    """Chi-square over many seeds on a small vocabulary: pairs of tokens after two drafts against the target's own
    chances.
    """
    generator = torch.Generator().manual_seed(0)
    target, draft = torch.randn(6, 5, generator=generator), torch.randn(6, 5, generator=generator)
    params = SamplingParams(temperature=0.8)
    n, first = 20_000, 5  # row 5 of the tables stands for the prompt
    counts: dict[tuple[int, int], int] = {}
    for seed in range(n):
        drafted, last = [], first
        for _ in range(2):
            last = int(draft[last].argmax())
            drafted.append(last)
        logits = target[[first, *drafted]]
        choices = sample(logits, [RowSampling(params, seed, 10 + i) for i in range(3)])
        emitted = [c.token_id for c in choices[: 1 + accepted(choices, drafted)]]
        while len(emitted) < 2:  # a rejection ends the step: the next step goes on from what was emitted
            emitted += [
                c.token_id for c in sample(target[[emitted[-1]]], [RowSampling(params, seed, 10 + len(emitted))])
            ]
        counts[emitted[0], emitted[1]] = counts.get((emitted[0], emitted[1]), 0) + 1
    chances = torch.softmax(target / 0.8, -1)
    statistic = 0.0
    for a in range(5):
        for b in range(5):
            expected = n * float(chances[first, a] * chances[a, b])
            statistic += (counts.get((a, b), 0) - expected) ** 2 / expected
    assert statistic < 52.6  # chi-square, 24 degrees of freedom: exceeded once in a thousand runs of the right sampler


def test_the_streams_after_a_prompt_do_not_keep_those_of_its_whole_chunk() -> None:
    chunk = torch.arange(512.0 * 4 * 8).reshape(512, 4, 8)
    state = DraftState.after_prompt(chunk[511])
    assert torch.equal(state.streams, chunk[511:])
    assert state.streams.untyped_storage().nbytes() == 4 * 8 * 4
