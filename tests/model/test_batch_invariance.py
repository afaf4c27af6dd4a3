"""A row's result is the same bits whatever the chunking, the batch, the ids of pages and slots, and the ring's
length.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from server.cache.layout import Placement
from server.engine.runner import ModelRunner
from server.model.batch import Segment
from server.model.interface import LoadedModel
from tests.support.checkpoints import BUNDLED, write_checkpoint
from tests.support.models import BOTH, load
from tests.support.runners import make_runner, prefill, prompt


@pytest.fixture(scope="module", params=itertools.product(BOTH, ["bundled", "random"]), ids="-".join)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    kernels, checkpoint = request.param
    if checkpoint == "bundled":
        return load(BUNDLED, kernels)
    path = tmp_path_factory.mktemp("random")
    write_checkpoint(path, seed=3)
    return load(path, kernels)


def placements(count: int, n_pages: int, seed: int) -> list[Placement]:
    rng = random.Random(seed)
    pages, slots = list(range(1, 40)), list(range(1, 20))
    rng.shuffle(pages)
    rng.shuffle(slots)
    return [Placement(slots[i], tuple(pages[i * n_pages : (i + 1) * n_pages])) for i in range(count)]


@pytest.mark.parametrize("chunk", [1, 7, 64, 257])
def test_chunking_changes_no_bit(model: LoadedModel, chunk: int) -> None:
    ids = prompt(389, model)
    whole = prefill(make_runner(model, pages=40), ids, Placement(1, (1, 2)), 1024)
    parts = prefill(make_runner(model, pages=40), ids, Placement(5, (9, 4)), chunk)
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("spec_tokens", [0, 3, 5])
def test_ring_length_changes_no_bit(model: LoadedModel, spec_tokens: int) -> None:
    ids = prompt(300, model)
    base = prefill(make_runner(model), ids, Placement(1, (1, 2)), 64)
    longer = prefill(make_runner(model, spec_tokens=spec_tokens), ids, Placement(2, (3, 1)), 64)
    assert torch.equal(base, longer)


def decode(runner: ModelRunner, texts: list[list[int]], where: list[Placement], steps: int) -> list[torch.Tensor]:
    """Greedy decoding of several requests in one batch; returns each request's logits."""
    logits: list[list[torch.Tensor]] = [[] for _ in texts]
    for _ in range(steps):
        segments = [Segment(text[-1:], len(text) - 1, place) for text, place in zip(texts, where, strict=True)]
        out = runner.forward(segments).logits
        for i, text in enumerate(texts):
            logits[i].append(out[i])
            text.append(int(out[i].argmax()))
    return [torch.stack(rows) for rows in logits]


def test_sixteen_requests_get_the_bits_of_one(model: LoadedModel) -> None:
    lengths = [1, 3, 4, 5, 18, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 383]
    prompts = [prompt(n, model, seed=n) for n in lengths]
    alone = []
    for ids in prompts:
        runner, place = make_runner(model, pages=40), Placement(1, (1, 2))
        first = prefill(runner, ids, place, 256)[-1]
        text = [*ids, int(first.argmax())]
        alone.append(torch.cat([first[None], decode(runner, [text], [place], 12)[0]]))

    runner = make_runner(model, pages=40)
    where = placements(16, 2, seed=7)
    # all prompts in one forward, beside each other, then decoded as one batch
    firsts = runner.forward([Segment(ids, 0, p) for ids, p in zip(prompts, where, strict=True)]).logits
    texts = [[*ids, int(row.argmax())] for ids, row in zip(prompts, firsts, strict=True)]
    batched = decode(runner, texts, where, 12)
    for i in range(16):
        assert torch.equal(alone[i], torch.cat([firsts[i][None], batched[i]])), f"prompt of {lengths[i]} tokens"


def test_prefill_decode_and_verify_share_a_forward(model: LoadedModel) -> None:
    """One batch with a prompt chunk, a decoding request and a run of several tokens equals the three alone."""
    runner, where = make_runner(model, pages=40), placements(3, 2, seed=1)
    a, b, c = (prompt(n, model, seed=n) for n in (200, 131, 257))
    alone = [
        prefill(make_runner(model, pages=40), ids, place, 512)[-k:]
        for ids, place, k in zip((a, b, c), where, (100, 1, 4), strict=True)
    ]
    for ids, place, k in zip((a, b, c), where, (100, 1, 4), strict=True):
        prefill(runner, ids[:-k], place, 64)
    segments = [
        Segment(ids[-k:], len(ids) - k, place) for ids, place, k in zip((a, b, c), where, (100, 1, 4), strict=True)
    ]
    together = runner.forward(segments, every_row=True).logits.split([100, 1, 4])
    for mine, expected in zip(together, alone, strict=True):
        assert torch.equal(mine, expected)


def test_rejected_tokens_are_undone_by_overwriting(model: LoadedModel) -> None:
    """A run of 1 + k tokens of which only the first was right leaves the state of plain decoding."""
    k, ids = 3, prompt(254, model)
    plain, spec = make_runner(model, spec_tokens=k), make_runner(model, spec_tokens=k)
    place = Placement(2, (3, 5))
    prefill(plain, ids, place, 64)
    prefill(spec, ids, place, 64)
    for step in range(10):
        start = 254 + step
        token = prompt(1, model, seed=step)
        expected = plain.forward([Segment(token, start, place)]).logits
        wrong = prompt(k, model, seed=1000 + step)
        run = spec.forward([Segment(token + wrong, start, place)], every_row=True).logits
        assert torch.equal(expected[0], run[0])
        n = start + 1
        for name, runs in plain.arena.layout.live_runs(n, place).items():
            if name != "handoff":
                assert plain.arena.read(runs) == spec.arena.read(runs), f"{name} after {n} tokens"
