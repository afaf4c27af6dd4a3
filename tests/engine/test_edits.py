"""Penalties and biases: what transformers computes, and counted token by token as if counted anew."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from server.engine.edits import Reals, Table, TokenEdits, apply, mask_of
from server.engine.request import SamplingParams

VOCABULARY = 60
PENALIZED = SamplingParams(
    repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.25, logit_bias=((3, 1.5), (7, -2.0))
)


def logits_of(seed: int) -> Reals:
    return np.random.default_rng(seed).standard_normal(VOCABULARY).astype(np.float32) * 3


def by_hand(logits: Reals, params: SamplingParams, prompt: Sequence[int], answer: Sequence[int]) -> Reals:
    """The definitions of OpenAI's and of vLLM's documentation, one token at a time."""
    values, counts = logits.astype(np.float64), Counter(answer)
    for token in range(VOCABULARY):
        if token in counts or token in prompt:
            values[token] *= params.repetition_penalty if values[token] <= 0 else 1 / params.repetition_penalty
        values[token] -= counts[token] * params.frequency_penalty + (counts[token] > 0) * params.presence_penalty
        values[token] += dict(params.logit_bias).get(token, 0.0)
    return values.astype(np.float32)


@pytest.mark.parametrize("seed", range(10))
def test_every_step_has_the_values_of_the_definitions(seed: int) -> None:
    rng = random.Random(seed)
    prompt = rng.choices(range(VOCABULARY), k=20)
    edits, answer = TokenEdits(PENALIZED, prompt), list[int]()
    for step in range(40):
        logits = logits_of(100 * seed + step)
        assert np.allclose(apply(logits, PENALIZED, [edits.table], None), by_hand(logits, PENALIZED, prompt, answer))
        taken = rng.choices(range(VOCABULARY), k=rng.randrange(1, 4))
        edits.take(taken)
        answer += taken


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    prompt, answer = [1, 2, 3, 3], [3, 9, 9, 40]
    params = SamplingParams(repetition_penalty=penalty)
    edits = TokenEdits(params, prompt)
    edits.take(answer)
    logits = logits_of(1)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + answer]), torch.tensor(logits)[None])
    assert np.allclose(apply(logits, params, [edits.table], None), theirs[0].numpy())


def test_presence_and_frequency_do_not_count_the_prompt() -> None:
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=1.0)
    edits = TokenEdits(params, [1, 2, 3])
    assert edits.table is None
    edits.take([2, 2])
    logits = logits_of(2)
    changed = apply(logits, params, [edits.table], None) - logits
    assert changed[2] == pytest.approx(-3.0)
    assert np.count_nonzero(changed) == 1


@pytest.mark.parametrize("seed", range(20))
def test_rows_behind_a_draft_count_its_tokens(seed: int) -> None:
    """As if they were in the answer already, and without leaving anything in the request's own table."""
    rng = random.Random(seed)
    prompt, answer = rng.choices(range(VOCABULARY), k=5), rng.choices(range(VOCABULARY), k=rng.randrange(30))
    draft = rng.choices(range(8), k=4)
    params = rng.choice([PENALIZED, replace(PENALIZED, repetition_penalty=1.0), SamplingParams(logit_bias=((1, 2.0),))])
    edits = TokenEdits(params, prompt, banned=[5])
    edits.take(answer)
    before = None if edits.table is None else edits.table.copy()
    logits = logits_of(seed)
    for j, own in enumerate(edits.ahead(draft)):
        anew = TokenEdits(params, prompt, banned=[5])
        anew.take(answer + draft[:j])
        expected = apply(logits, params, [anew.table], None)
        assert np.array_equal(apply(logits, params, [edits.table, own], None), expected)
        assert np.isneginf(expected[5])
    after: Table | None = edits.table
    assert (before is None and after is None) or np.array_equal(before, after)  # type: ignore[arg-type]


def test_a_mask_has_the_bits_of_its_tokens() -> None:
    assert mask_of([0, 31, 33]).tolist() == [0x80000001, 2]
    masked = apply(np.zeros(40, np.float32), SamplingParams(), [], mask_of([0, 31, 33]))
    assert np.flatnonzero(np.isfinite(masked)).tolist() == [0, 31, 33]
