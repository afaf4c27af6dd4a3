"""Compressed entries and the state they are made of: near the Python module, and not one row too many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from server.cache.layout import Placement
from server.kernels.build import Isa
from server.model.batch import Segment
from tests.kernels.test_attention import CASES, SMALL
from tests.support.checkpoints import write_checkpoint
from tests.support.kernel_functions import EVERY_ISA, bits
from tests.support.kernel_layers import Layers

KINDS = {"CSA": (1, False), "index": (1, True), "HCA": (2, False)}
"""The layer of a compressor, and whether it is the indexer's."""
every_kind = pytest.mark.parametrize(("layer", "index"), KINDS.values(), ids=KINDS)

LayersOf = Callable[..., Layers]


@pytest.fixture(scope="module")
def layers_of(tmp_path_factory: pytest.TempPathFactory) -> LayersOf:
    @lru_cache
    def write(case: str) -> Path:
        path = tmp_path_factory.mktemp("compressor")
        write_checkpoint(path, seed=1, **{**SMALL, **CASES[case]})
        return path

    return lambda case, **options: Layers(write(case), spec_tokens=2, **options)


def names_of(layer: int, index: bool) -> tuple[str, tuple[str, ...]]:
    """The components of a compressor: its entries, and its state."""
    if layer == 2:
        return "c128_kv", ("c128_state",)
    return ("c4_index", ("c4_index_state_a", "c4_index_state_b")) if index else ("c4_kv", ("c4_state_a", "c4_state_b"))


SEGMENTS = [
    [Segment([0] * 300, 0, Placement(1, (4, 2))), Segment([0], 0, Placement(2, (3,)))],
    [Segment([0] * 83, 300, Placement(1, (4, 2))), Segment([0] * 2, 1, Placement(2, (3,)))],
    [
        Segment([0], 383, Placement(1, (4, 2))),
        Segment([0], 3, Placement(2, (3,))),
        Segment([0] * 8, 0, Placement(3, (7,))),
    ],
    [Segment([0] * 3, 8, Placement(3, (7,))), Segment([0] * 5, 4, Placement(2, (3,)))],
]
"""Steps that close nothing, one entry, entry 0, and many; longer and shorter than a ring."""


@every_kind
@pytest.mark.parametrize("case", CASES)
def test_entries_and_state_are_near_those_of_the_module(
    layers_of: LayersOf, case: str, layer: int, index: bool
) -> None:
    layers = layers_of(case)
    entries, states = names_of(layer, index)
    for i, segments in enumerate(SEGMENTS):
        x = layers.random_rows(sum(len(s.token_ids) for s in segments), seed=i)
        layers.python_compress(layer, x, segments, index=index)
        layers.kernel_compress(layer, x, segments, index=index)
        for name in (entries, *states):  # everything else is still poisoned, in both
            ours, theirs = (layers.rows(arena, name, layer) for arena in (layers.kernel_arena, layers.arena))
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True, msg=f"{name}, step {i}")


@every_kind
@pytest.mark.parametrize("isa", EVERY_ISA)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_state_that_is_not_finite_is_seen_in_its_entry_alone(
    layers_of: LayersOf, layer: int, index: bool, isa: Isa, value: float
) -> None:
    """NaN in a score must not be dropped by the maximum; a score of -infinity has no weight."""
    layers = layers_of("nothing a multiple", isa=isa)
    entries, states = names_of(layer, index)
    width = layers.rows(layers.kernel_arena, entries, layer).shape[-1]
    x, place, n = layers.random_rows(257), Placement(2, (3, 5)), 254
    channel = 1
    layers.kernel_compress(layer, x[:n], [Segment([0] * n, 0, place)], index=index)
    for name in states:
        ring = layers.rows(layers.kernel_arena, name, layer)[place.slot]
        ring[(n - 1) % len(ring), width + channel] = value
    layers.kernel_compress(layer, x[n:256], [Segment([0] * 2, n, place)], index=index)
    page = layers.rows(layers.kernel_arena, entries, layer)[place.pages[0]]
    assert page[:-1].isfinite().all()
    last = page[-1]
    assert last.isfinite().all() if value == -torch.inf else last.isnan().all()


@every_kind
def test_chunks_and_threads_change_no_bit(layers_of: LayersOf, layer: int, index: bool) -> None:
    layers = layers_of("nothing a multiple")
    entries, _ = names_of(layer, index)
    n = 400
    x = layers.random_rows(n)

    def pages(chunk: int, threads: int, place: Placement) -> torch.Tensor:
        for start, rows in zip(range(0, n, chunk), x.split(chunk), strict=True):
            layers.kernel_compress(layer, rows, [Segment([0] * len(rows), start, place)], index=index, threads=threads)
        return bits(layers.rows(layers.kernel_arena, entries, layer)[list(place.pages)])

    whole = pages(n, 1, Placement(1, (1, 2)))
    assert not torch.equal(whole[0, 0], whole[0, 1])
    for chunk, threads in ((1, 1), (7, 2), (64, 3), (256, 2)):
        assert torch.equal(whole, pages(chunk, threads, Placement(2, (6, 4)))), f"chunks of {chunk}"


@every_kind
@pytest.mark.parametrize("case", CASES)
def test_every_instruction_set_gives_the_same_bits(layers_of: LayersOf, case: str, layer: int, index: bool) -> None:
    entries, _ = names_of(layer, index)

    def pages(isa: Isa, segments: Sequence[Segment]) -> torch.Tensor:
        layers = layers_of(case, isa=isa)
        layers.kernel_compress(layer, layers.random_rows(300), segments, index=index)
        return bits(layers.rows(layers.kernel_arena, entries, layer))

    results = [pages(isa, [Segment([0] * 300, 0, Placement(2, (3, 5)))]) for isa in EVERY_ISA]
    assert all(torch.equal(results[0], other) for other in results)
