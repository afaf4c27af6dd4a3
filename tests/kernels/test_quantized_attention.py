"""One layer's attention with official numerics and quantized rows: near the Python module where no rounding falls
otherwise, and the same bits however its rows are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from server.cache.layout import Placement
from server.model.batch import Segment
from server.model.numerics import OFFICIAL, PLAIN, Numerics
from tests.kernels.test_attention import CHUNKS, LAYERS, PLACE, SMALL, N, run
from tests.support.checkpoints import write_checkpoint
from tests.support.kernel_functions import EVERY_ISA, bits
from tests.support.kernel_layers import Layers

CASES: dict[str, dict[str, Any]] = {
    "whole sixteens": {"index_topk": 12},
    "nothing a multiple": {
        "hidden_size": 33, "num_attention_heads": 3, "o_groups": 3, "o_lora_rank": 5, "q_lora_rank": 19,
        "head_dim": 14, "qk_rope_head_dim": 6, "index_n_heads": 5, "index_head_dim": 8, "index_topk": 11,
        "sliding_window": 7,
    },
    "one head that rotates throughout": {
        "hidden_size": 20, "num_attention_heads": 1, "o_groups": 1, "head_dim": 16, "qk_rope_head_dim": 16,
        "index_n_heads": 1, "index_head_dim": 16, "index_topk": 1, "sliding_window": 1,
    },
    "blocks of several kinds": {
        "hidden_size": 200, "num_attention_heads": 6, "o_groups": 2, "o_lora_rank": 80, "q_lora_rank": 150,
        "head_dim": 150, "qk_rope_head_dim": 22, "index_n_heads": 70, "index_head_dim": 64, "index_topk": 30,
        "sliding_window": 40,
    },
}  # fmt: skip
Kind = tuple[Numerics, str, str]
"""Numerics, and how rows and the indexer's keys are stored."""
KINDS: dict[str, Kind] = {
    "plain": (PLAIN, "model", "auto"),
    "official": (OFFICIAL, "model", "auto"),
    "fp8 rows": (PLAIN, "fp8", "auto"),
    "official, fp8 rows": (OFFICIAL, "fp8", "auto"),
    "fp8 rows and keys": (PLAIN, "fp8", "fp8"),
    "official, fp8 keys": (OFFICIAL, "model", "fp8"),
}
every_kind = pytest.mark.parametrize("kind", list(KINDS.values())[1:], ids=list(KINDS)[1:])
every_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
every_case = pytest.mark.parametrize("case", CASES)

LayersOf = Callable[..., Layers]


@pytest.fixture(scope="module")
def layers_of(tmp_path_factory: pytest.TempPathFactory) -> LayersOf:
    @lru_cache
    def write(case: str) -> Path:
        path = tmp_path_factory.mktemp("attention")
        write_checkpoint(path, seed=1, **{**SMALL, **CASES[case]})
        return path

    @lru_cache
    def made(case: str, kind: Kind, **options: Any) -> Layers:
        numerics, kv_dtype, index_dtype = kind
        return Layers(write(case), numerics=numerics, kv_dtype=kv_dtype, index_dtype=index_dtype, **options)

    def make(case: str, kind: Kind, **options: Any) -> Layers:
        layers = made(case, kind, **options)
        layers.reset()
        return layers

    return make


def errors(layers: Layers, layer: int) -> torch.Tensor:
    """How far every row of a prompt in chunks is from the module's, against the largest output."""
    ours, theirs, start = [], [], 0
    for i, n in enumerate(CHUNKS):
        x, segments = layers.random_rows(n, seed=i), [Segment([0] * n, start, PLACE)]
        theirs.append(layers.python(layer, x, segments))
        ours.append(layers.kernel(layer, x, segments))
        start += n
    expected = torch.cat(theirs)
    return (torch.cat(ours) - expected).abs().amax(-1) / expected.abs().max()


@every_kind
@every_layer
@every_case
def test_rows_are_near_those_of_the_module(layers_of: LayersOf, case: str, layer: int, kind: Kind) -> None:
    """Where they differ in the last bit before a rounding, a channel differs by a step of the format: few rows do, by
    little. Without one of the roundings nearly all rows would.
    """
    found = errors(layers_of(case, kind, spec_tokens=3), layer)
    assert found.median() < 1e-5
    assert found.max() < 0.1


def without(attention: Any, name: str) -> None:
    """Takes one of the roundings away; ``name`` as in :data:`ROUNDINGS`."""
    *path, field = name.split(".")
    place = attention
    for part in path:
        place = getattr(place, part)
    setattr(place, field, 0)


ROUNDINGS = {
    "in_proj.quantized_input": LAYERS,
    "q_proj.quantized_input": LAYERS,
    "wo_b.first.quantized_input": LAYERS,
    "kv_simulation": LAYERS,
    "compressor.simulation": ("CSA", "HCA"),
    "indexer.simulation": ("CSA",),
    "query_simulation": ("CSA",),
}


@pytest.mark.parametrize(("name", "layer"), [(name, layer) for name, where in ROUNDINGS.items() for layer in where])
def test_every_rounding_is_seen(layers_of: LayersOf, name: str, layer: str) -> None:
    """What the test above would say if the kernels forgot one."""
    layers = layers_of("blocks of several kinds", KINDS["official"], spec_tokens=3)
    without(layers.network.layers[LAYERS[layer]].attention, name)
    found = errors(layers, LAYERS[layer])
    reached = found[found > 1e-4]
    assert len(reached) > 0.5 * len(found)


@every_kind
@every_layer
@every_case
def test_chunks_and_threads_change_no_bit(layers_of: LayersOf, case: str, layer: int, kind: Kind) -> None:
    """A row that the step itself made is the one that a later step reads back."""
    layers = layers_of(case, kind)
    x = layers.random_rows(N)
    whole = run(layers, layer, x, N)
    assert whole.isfinite().all()
    state = layers.kernel_state(layer, N, PLACE)
    for chunk, threads, place in (
        (1, 1, (1, (1, 4))),
        (7, 2, (4, (9, 2))),
        (64, 3, (5, (7, 8))),
        (256, 2, (6, (12, 11))),
    ):
        assert torch.equal(bits(whole), bits(run(layers, layer, x, chunk, Placement(*place), threads))), (
            f"chunk {chunk}"
        )
        assert layers.kernel_state(layer, N, Placement(*place)) == state, f"state after chunks of {chunk}"


@every_kind
@every_layer
def test_requests_beside_each_other_change_no_bit(layers_of: LayersOf, layer: int, kind: Kind) -> None:
    """Chunks, decode steps and runs of several tokens in one step, each as if it were alone."""
    layers = layers_of("nothing a multiple", kind, spec_tokens=2)
    done = [0, 3, 4, 127, 128, 252, 300, 9]
    new = [130, 1, 3, 1, 1, 5, 1, 64]
    texts = [layers.random_rows(a + b, seed=i) for i, (a, b) in enumerate(zip(done, new, strict=True))]
    places = [Placement(i + 1, (2 * i + 1, 2 * i + 2)) for i in range(len(done))]
    alone = [run(layers, layer, x, 50, place)[n:] for x, n, place in zip(texts, done, places, strict=True)]
    for threads in (1, 2):
        layers.reset()
        for x, n, place in zip(texts, done, places, strict=True):
            if n:
                run(layers, layer, x[:n], 256, place)
        segments = [Segment([0] * b, a, place) for a, b, place in zip(done, new, places, strict=True)]
        x = torch.cat([x[n:] for x, n in zip(texts, done, strict=True)])
        assert torch.equal(bits(layers.kernel(layer, x, segments, threads)), bits(torch.cat(alone)))


@every_kind
@every_case
def test_every_instruction_set_gives_the_same_bits(layers_of: LayersOf, case: str, kind: Kind) -> None:
    for layer in LAYERS.values():
        results = []
        for isa in EVERY_ISA:
            layers = layers_of(case, kind, isa=isa)
            x = layers.random_rows(N)
            clean, state = run(layers, layer, x, 90), layers.kernel_state(layer, N, PLACE)
            x[30, 1], x[200, 0] = torch.nan, torch.inf
            results.append((bits(clean), bits(run(layers, layer, x, 90)), state))
        for isa, (clean, damaged, state) in zip(EVERY_ISA, results, strict=True):
            assert torch.equal(clean, results[0][0]), isa
            assert torch.equal(damaged, results[0][1]), isa
            assert state == results[0][2], isa


@every_kind
def test_a_poisoned_entry_is_seen(layers_of: LayersOf, kind: Kind) -> None:
    """Also by the indexer: a score that is not a number is among the best."""
    for case, layer, n, names in (
        ("blocks of several kinds", 1, 100, ["c4_kv"]),  # it sees 25 entries and reads them all
        ("nothing a multiple", 1, 140, ["c4_kv", "c4_index"]),  # 35, of which it reads 11
        ("nothing a multiple", 2, 140, ["c128_kv"]),
    ):
        layers = layers_of(case, kind)
        x = layers.random_rows(n + 1)
        run(layers, layer, x[:n], n)
        for entry in range(n // layers.config.compress_ratios[layer]):
            parts = [layers.rows(layers.kernel_arena, name, layer)[PLACE.pages[0], entry] for name in names]
            kept = [part.clone() for part in parts]
            for part in parts:
                part.view(torch.uint8).fill_(0xFF)
            out = layers.kernel(layer, x[n:], [Segment([0], n, PLACE)])
            assert out.isnan().all(), f"{names}, entry {entry}"
            for part, values in zip(parts, kept, strict=True):
                part.copy_(values)


@every_kind
@every_layer
def test_a_step_reads_no_later_row_and_nothing_before_valid_from(layers_of: LayersOf, layer: int, kind: Kind) -> None:
    """Rings and pages are poisoned: whatever was not written is NaN."""
    layers = layers_of("nothing a multiple", kind, spec_tokens=3)
    x = layers.random_rows(30)
    x[20:] = torch.nan
    out = run(layers, layer, x, 30)
    assert out[:20].isfinite().all()
    assert out[20:].isnan().all()
    if layer != LAYERS["window only"]:
        return
    layers.reset()
    assert layers.kernel(layer, x[:20], [Segment([0] * 20, 400, PLACE)])[:3].isnan().all()
    layers.reset()
    late = [Segment([0] * 20, 400, PLACE, valid_from=400)]
    expected = layers.python(layer, x[:20], late)
    torch.testing.assert_close(layers.kernel(layer, x[:20], late), expected, rtol=1e-4, atol=1e-5)
