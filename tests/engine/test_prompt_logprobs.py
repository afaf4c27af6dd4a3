"""The log probabilities of a prompt's tokens: those that an answer of the same tokens would have, however it is cut."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from server.cache.layout import Placement
from server.engine.events import ComputeFailed, Event, Output, Prefill, PrefillFinished, PromptScored
from server.engine.prompt_logprobs import PromptLogprobs, PromptToken, empty_rows, over_limit, row_nbytes
from server.engine.request import FinishReason, GenerationRequest, SamplingParams
from server.engine.runner import ModelRunner
from server.engine.sampler import NonFiniteLogits
from server.engine.scoring import score, score_rows
from server.engine.tokenizer import Tokenizer
from server.kernels.build import Isa
from server.kernels.choice import choose_kernels
from server.kernels.sampling import SampleKernel
from server.model.interface import LoadedModel
from tests.engine.harness import Harness, outputs_of, tokens_of
from tests.support.checkpoints import BUNDLED
from tests.support.kernel_functions import EVERY_ISA, functions
from tests.support.models import BOTH, load
from tests.support.runners import prompt as random_prompt

PLACE = Placement(1, (3, 1, 2))


@pytest.fixture(scope="module", params=BOTH)
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return load(BUNDLED, request.param)


@pytest.fixture
def harness(model: LoadedModel) -> Iterator[Harness]:
    harness = Harness(model, Tokenizer.load(BUNDLED))
    yield harness
    harness.engine.stop()


def asked(name: str, ids: Sequence[int], n_top: int | None = 3, *, max_tokens: int = 1) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=n_top)
    return GenerationRequest(name, tuple(ids), params)


def scores(events: Sequence[Event], key: object, n_top: int = 3) -> PromptLogprobs:
    return PromptLogprobs(n_top, b"".join(e.rows for e in events if isinstance(e, PromptScored) and e.key == key))


def test_a_prompt_token_has_what_the_same_token_of_an_answer_has(harness: Harness, model: LoadedModel) -> None:
    """Bit for bit: 64 tokens at a time here, one at a time there."""
    ids = random_prompt(100, model)
    request = GenerationRequest("answer", tuple(ids), SamplingParams(max_tokens=40, ignore_eos=True, logprobs=3))
    events = harness.generate([request])
    answered = [entry for output in outputs_of(events, "answer") for entry in output.output.logprobs]
    again = asked("prompt", [*ids, *tokens_of(events, "answer")])
    found = list(scores(harness.generate([again]), "prompt"))
    assert len(found) == 139
    assert [(token.logprob, token.top) for token in found[99:]] == [(e.logprob, e.top) for e in answered]
    assert all(token.rank == 1 for token in found[99:])


def test_they_do_not_depend_on_chunks_or_on_the_rest_of_the_batch(harness: Harness, model: LoadedModel) -> None:
    ids = random_prompt(150, model, seed=1)
    alone = scores(harness.generate([asked("alone", ids)]), "alone").rows
    others = [asked(f"other {i}", random_prompt(30 + 7 * i, model, seed=2 + i), n_top=None) for i in range(3)]
    events = harness.generate([*others[:2], asked("among others", ids), others[2]])
    assert scores(events, "among others").rows == alone
    assert {e.key for e in events if isinstance(e, PromptScored)} == {"among others"}


def test_asking_for_them_changes_nothing_else(harness: Harness, model: LoadedModel) -> None:
    ids = random_prompt(130, model, seed=3)
    harness.engine.submit(Prefill("without", asked("", ids, None), PLACE, 7, 1))
    without = harness.finish(["without"])[-1]
    harness.engine.submit(Prefill("with", asked("", ids, 20), PLACE, 7, 1))
    with_them = harness.finish(["with"])[-1]
    assert isinstance(without, PrefillFinished)
    assert isinstance(with_them, PrefillFinished)
    assert (without.first, without.parts) == (with_them.first, with_them.parts)


def test_a_prompt_of_one_token_has_none(harness: Harness) -> None:
    assert not [e for e in harness.generate([asked("one", [5])]) if isinstance(e, PromptScored)]


def test_without_an_answer_the_end_comes_with_the_prompt(harness: Harness, model: LoadedModel) -> None:
    ids = random_prompt(70, model, seed=4)
    events = harness.generate([asked("nothing", ids, max_tokens=0)])
    [output] = [event for event in events if isinstance(event, Output)]
    assert (output.output.token_ids, output.output.finish_reason) == ((), FinishReason.LENGTH)
    assert len(scores(events, "nothing")) == 69


def test_logits_that_are_no_numbers_fail_their_request_alone(
    harness: Harness, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits_of = ModelRunner.logits

    def broken(self: ModelRunner, hidden: torch.Tensor) -> torch.Tensor:
        logits = logits_of(self, hidden).clone()
        logits[0, 7] = math.nan
        return logits

    monkeypatch.setattr(ModelRunner, "logits", broken)
    ids = random_prompt(20, model)
    events = harness.generate([asked("bad", ids), asked("good", ids, None)])
    codes = {event.key: event.failure.code for event in events if isinstance(event, ComputeFailed)}
    assert codes == {"bad": "non_finite_logits"}
    assert len(tokens_of(events, "good")) == 1


def test_few_logits_are_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.engine.scoring.PIECE_NBYTES", 4 * 50 * 6)
    hidden = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))
    head = torch.randn(8, 50, generator=torch.Generator().manual_seed(1))
    pieces: list[int] = []

    def logits_of(rows: torch.Tensor) -> torch.Tensor:
        pieces.append(len(rows))
        return rows @ head

    ids = list(range(20))
    found = score_rows(logits_of, hidden, ids, n_top=2, vocab_size=50)
    assert pieces == [6, 6, 6, 2]
    wanted = score(torch.cat([hidden[i : i + 6] @ head for i in range(0, 20, 6)]), ids, 2)
    assert found == wanted
    bad = hidden.clone()
    bad[[3, 7, 9]] = math.nan
    with pytest.raises(NonFiniteLogits) as caught:
        score_rows(logits_of, bad[5:], ids[5:], n_top=2, vocab_size=50)
    assert caught.value.rows == (2, 4)


# --- one row ----------------------------------------------------------------------------------------------------------


def kernels() -> list[SampleKernel | None]:
    library = choose_kernels("auto", "cpu")
    return [None] if library.library is None else [None, library.sampler(1)]


@pytest.mark.parametrize("kernel", kernels(), ids=lambda kernel: "numpy" if kernel is None else "kernels")
def test_a_score_is_the_log_softmax_and_the_rank(kernel: SampleKernel | None) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -math.inf, 2.0]])
    found = [next(iter(PromptLogprobs(3, score(logits, [token], 3, kernel)))) for token in range(5)]
    exact = torch.log_softmax(logits.double(), -1)[0]
    assert [token.rank for token in found] == [4, 1, 2, 5, 3]
    assert [token.logprob for token in found] == pytest.approx(exact.tolist(), abs=1e-14)
    assert [token_id for token_id, _ in found[0].top] == [1, 2, 4]
    assert [value for _, value in found[0].top] == pytest.approx(exact[[1, 2, 4]].tolist(), abs=1e-14)
    [few] = PromptLogprobs(20, score(logits[:, :2], [0], 20, kernel))
    assert len(few.top) == 2, "a vocabulary of two has no more"
    for bad in (math.nan, math.inf):
        with pytest.raises(NonFiniteLogits):
            score(torch.tensor([[1.0, bad]]), [0], 0, kernel)
    with pytest.raises(NonFiniteLogits):
        score(torch.full((1, 4), -math.inf), [0], 1, kernel)


@pytest.mark.parametrize("isa", EVERY_ISA)
def test_both_forms_score_alike(isa: Isa) -> None:
    kernel = SampleKernel(functions(isa))
    rng = np.random.default_rng(5)
    for vocab_size in (1, 5, 17, 256, 257, 529, 4097):
        logits = rng.standard_normal((9, vocab_size)).astype(np.float32) * 3
        logits = np.round(logits * 2) / np.float32(2) if vocab_size % 2 else logits
        ids, n_top = rng.integers(0, vocab_size, 9).tolist(), int(rng.integers(0, 21))
        rows = [score(torch.from_numpy(logits), ids, n_top, each) for each in (None, kernel)]
        ours, theirs = (list(PromptLogprobs(n_top, each)) for each in rows)
        for one, other in zip(ours, theirs, strict=True):
            assert (one.rank, [i for i, _ in one.top]) == (other.rank, [i for i, _ in other.top])
            assert one.logprob == pytest.approx(other.logprob, abs=1e-12)
            assert [v for _, v in one.top] == pytest.approx([v for _, v in other.top], abs=1e-12)


def test_rows_are_packed_and_read_back() -> None:
    rows = empty_rows(2, 2)
    rows["logprob"], rows["rank"] = (-0.5, -math.inf), (3, 9)
    rows["top"]["token"][0], rows["top"]["logprob"][0] = (7, 4), (-0.1, -0.25)
    packed = PromptLogprobs(2, rows.tobytes())
    assert len(packed) == 2
    assert len(packed.rows) == 2 * row_nbytes(2) == 72
    assert list(packed) == [PromptToken(-0.5, 3, ((7, -0.1), (4, -0.25))), PromptToken(-math.inf, 9, ())]


def test_the_limit_counts_tokens_alternatives_and_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.engine.prompt_logprobs.MAX_ENTRIES", 100)
    assert over_limit(1000, None) is None
    assert over_limit(50, 1) is None
    reason = over_limit(26, 1, 2)
    assert reason is not None
    assert "are 104: at most 100" in reason
