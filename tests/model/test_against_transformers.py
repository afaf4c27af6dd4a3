"""Logits of every position against transformers in fp32, over the boundary prompt lengths, then greedy decoding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from server.cache.layout import Placement
from server.engine.prompt_logprobs import PromptLogprobs
from server.engine.scoring import score_rows
from server.model.batch import Segment
from tests.model.conftest import Pair
from tests.support.runners import make_runner, prefill, prompt

LENGTHS: list[int | str] = [1, 3, 4, 5, 18, "W-1", "W", "W+1", 127, 128, 129, 255, 256, 257, 511, 512, 513, 1025]
QUICK = [1, 4, 18, "W", 129, 257, 513]
CHUNKS = [1, 7, 64, 256, 2048]
PLACEMENT = Placement(3, (7, 2, 11, 5, 13, 1))
UNDECIDED = 1e-6
"""Index scores that differ by less than this share are in no order that two roundings agree on."""


def length(n: int | str, window: int) -> int:
    return n if isinstance(n, int) else window + {"W-1": -1, "W": 0, "W+1": 1}[n]


def check_logits(pair: Pair, n: int, chunk: int) -> None:
    """A row may differ only from one on whose choice of entries is closer than fp32 can tell: two right models may
    choose otherwise there, and later rows see it.
    """
    ids = prompt(n, pair.model)
    expected, margins = pair.reference_and_margins(ids)
    ours = prefill(make_runner(pair.model), ids, PLACEMENT, chunk)
    errors = (ours - expected).abs().amax(-1) / expected.abs().amax(-1)
    for row in (~(errors < 1e-4)).nonzero()[:1].flatten().tolist():
        assert margins[row] < UNDECIDED, f"n={n} chunk={chunk}: relative error {errors[row]:.2e} in row {row}"


def check_greedy(pair: Pair, n: int, steps: int) -> None:
    """Decoding token by token picks what transformers picks for the whole text (a teacher-forced check, no caches
    there).
    """
    ids = prompt(n, pair.model, seed=1)
    runner = make_runner(pair.model)
    text = list(ids)
    text.append(int(prefill(runner, ids, PLACEMENT, 64)[-1].argmax()))
    for _ in range(steps - 1):
        segment = Segment(text[-1:], len(text) - 1, PLACEMENT)
        text.append(int(runner.forward([segment]).logits[0].argmax()))
    expected = pair.reference(text[:-1])[n - 1 :].argmax(-1).tolist()
    assert text[n:] == expected


def check_generate(pair: Pair, n: int, steps: int) -> None:
    """The same, against ``generate`` with transformers' own cache."""
    ids = prompt(n, pair.model, seed=2)
    runner = make_runner(pair.model)
    out = pair.oracle.generate(
        torch.tensor([ids]), max_new_tokens=steps, min_new_tokens=steps, do_sample=False, pad_token_id=2
    )
    text = list(ids)
    text.append(_argmax_without_eos(prefill(runner, ids, PLACEMENT, 256)[-1]))
    for _ in range(steps - 1):
        segment = Segment(text[-1:], len(text) - 1, PLACEMENT)
        text.append(_argmax_without_eos(runner.forward([segment]).logits[0]))
    assert text == out[0].tolist()


def _argmax_without_eos(logits: torch.Tensor) -> int:
    logits = logits.clone()
    logits[1] = -torch.inf
    return int(logits.argmax())


def test_log_probabilities_of_a_prompt_are_those_of_transformers(bundled_pair: Pair) -> None:
    ids = prompt(129, bundled_pair.model, seed=4)
    expected = torch.log_softmax(bundled_pair.reference(ids).double(), -1)
    runner = make_runner(bundled_pair.model)
    hidden = runner.forward([Segment(ids, 0, PLACEMENT)], with_hidden=True).hidden
    assert hidden is not None
    rows = score_rows(runner.logits, hidden[:-1], ids[1:], n_top=5, vocab_size=bundled_pair.model.config.vocab_size)
    for row, token in enumerate(PromptLogprobs(5, rows)):
        assert token.logprob == pytest.approx(float(expected[row, ids[row + 1]]), abs=1e-3)
        best = expected[row].topk(5).values.tolist()
        assert [logprob for _, logprob in token.top] == pytest.approx(best, abs=1e-3)


@pytest.mark.parametrize("n", QUICK)
def test_logits_of_the_bundled_checkpoint(bundled_pair: Pair, n: int | str) -> None:
    check_logits(bundled_pair, length(n, bundled_pair.model.config.sliding_window), 64)


@pytest.mark.parametrize("n", QUICK)
def test_logits_of_a_random_checkpoint(random_pairs: Callable[[int], Pair], n: int | str) -> None:
    pair = random_pairs(0)
    check_logits(pair, length(n, pair.model.config.sliding_window), 7 if n != 513 else 256)


@pytest.mark.parametrize("n", QUICK)
def test_logits_of_a_quantized_checkpoint(quantized_pair: Pair, n: int | str) -> None:
    check_logits(quantized_pair, length(n, quantized_pair.model.config.sliding_window), 64)


def test_forty_greedy_tokens(bundled_pair: Pair, random_pairs: Callable[[int], Pair]) -> None:
    for pair in (bundled_pair, random_pairs(0)):
        check_greedy(pair, 125, 40)
        check_generate(pair, 253, 40)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_whole_grid(bundled_pair: Pair, random_pairs: Callable[[int], Pair], seed: int | None, chunk: int) -> None:
    pair = bundled_pair if seed is None else random_pairs(seed)
    for n in LENGTHS:
        check_logits(pair, length(n, pair.model.config.sliding_window), chunk)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_greedy_from_every_length(bundled_pair: Pair, random_pairs: Callable[[int], Pair], seed: int | None) -> None:
    pair = bundled_pair if seed is None else random_pairs(seed)
    for n in LENGTHS:
        check_greedy(pair, length(n, pair.model.config.sliding_window), 40)
