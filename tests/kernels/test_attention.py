"""One layer's attention: near the Python module, and the same bits however its rows are computed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from server.cache.layout import Placement
from server.kernels.build import Isa
from server.model.batch import Segment
from tests.support.checkpoints import write_checkpoint
from tests.support.kernel_functions import EVERY_ISA, bits
from tests.support.kernel_layers import Layers

SMALL: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_hash_layers": 1,
    "compress_ratios": [0, 4, 128, 0],
    "n_routed_experts": 2,
    "moe_intermediate_size": 8,
}
CASES: dict[str, dict[str, Any]] = {
    "whole sixteens": {},
    "nothing a multiple": {
        "hidden_size": 33, "num_attention_heads": 3, "o_groups": 3, "o_lora_rank": 5, "q_lora_rank": 19,
        "head_dim": 14, "qk_rope_head_dim": 6, "index_n_heads": 5, "index_head_dim": 18, "index_topk": 11,
        "sliding_window": 7,
    },
    "one head that rotates throughout": {
        "hidden_size": 20, "num_attention_heads": 1, "o_groups": 1, "head_dim": 22, "qk_rope_head_dim": 22,
        "index_n_heads": 1, "index_head_dim": 22, "index_topk": 1, "sliding_window": 1,
    },
    "eleven wide heads": {
        "num_attention_heads": 11, "o_groups": 1, "head_dim": 150, "index_n_heads": 70, "index_head_dim": 40,
        "index_topk": 30, "sliding_window": 40,
    },
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {"six groups": {"num_attention_heads": 6, "o_groups": 6, "o_lora_rank": 7}}
LAYERS = {"window only": 0, "CSA": 1, "HCA": 2}
CHUNKS = [100, 1, 7, 150, 1, 3, 64]
N = sum(CHUNKS)
PLACE = Placement(2, (3, 5))

LayersOf = Callable[..., Layers]


@pytest.fixture(scope="module")
def layers_of(tmp_path_factory: pytest.TempPathFactory) -> LayersOf:
    @lru_cache
    def write(case: str) -> Path:
        path = tmp_path_factory.mktemp("attention")
        write_checkpoint(path, seed=1, **{**SMALL, **(CASES | MORE)[case]})
        return path

    @lru_cache
    def made(case: str, **options: Any) -> Layers:
        return Layers(write(case), **options)

    def make(case: str, **options: Any) -> Layers:
        layers = made(case, **options)
        layers.reset()
        return layers

    return make


def run(
    layers: Layers, layer: int, x: torch.Tensor, chunk: int, place: Placement = PLACE, threads: int = 1
) -> torch.Tensor:
    """The kernel's output of a whole prompt, in chunks."""
    parts = [
        layers.kernel(layer, rows, [Segment([0] * len(rows), chunk * i, place)], threads)
        for i, rows in enumerate(x.split(chunk))
    ]
    return torch.cat(parts)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("case", CASES)
def test_output_and_state_are_near_those_of_the_module(layers_of: LayersOf, case: str, layer: int) -> None:
    layers = layers_of(case, spec_tokens=3)
    start = 0
    for i, n in enumerate(CHUNKS):
        x, segments = layers.random_rows(n, seed=i), [Segment([0] * n, start, PLACE)]
        expected = layers.python(layer, x, segments)
        error = (layers.kernel(layer, x, segments) - expected).abs().max() / expected.abs().max()
        assert error < 1e-5, f"rows {start} .. {start + n - 1}"
        start += n
    for name in layers.components(layer):
        ours, theirs = (layers.rows(arena, name, layer) for arena in (layers.kernel_arena, layers.arena))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5, equal_nan=True, msg=name)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("case", ["whole sixteens", "nothing a multiple"])
def test_bfloat16_is_as_near_to_fp32_as_the_module(layers_of: LayersOf, case: str, layer: int) -> None:
    """With the same weights of 16 bits. The module rounds every activation, the kernel only the state."""
    wide, narrow = layers_of(case), layers_of(case, dtype=torch.bfloat16)
    x = narrow.random_rows(N)
    segments = [Segment([0] * N, 0, PLACE)]
    exact = wide.python(layer, x.float(), segments)
    ours, theirs = ((out - exact).abs().mean() for out in (run(narrow, layer, x, N), narrow.python(layer, x, segments)))
    assert ours < theirs < 0.05 * exact.abs().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("case", CASES)
def test_chunks_and_threads_change_no_bit(layers_of: LayersOf, case: str, layer: int, dtype: torch.dtype) -> None:
    """In bf16 this also says that a row which the step itself wrote is the one that a later step reads back."""
    layers = layers_of(case, dtype=dtype)
    x = layers.random_rows(N)
    whole = run(layers, layer, x, N)
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


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_requests_beside_each_other_change_no_bit(layers_of: LayersOf, layer: int) -> None:
    """Chunks, decode steps and runs of several tokens in one step, each as if it were alone."""
    layers = layers_of("nothing a multiple", spec_tokens=2)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_every_instruction_set_gives_the_same_bits(layers_of: LayersOf, case: str, dtype: torch.dtype) -> None:
    for layer in LAYERS.values():
        results = []
        for isa in EVERY_ISA:
            layers = layers_of(case, isa=isa, dtype=dtype)
            x = layers.random_rows(N)
            clean, state = run(layers, layer, x, 90), layers.kernel_state(layer, N, PLACE)
            x[30, 1], x[200, 0] = torch.nan, torch.inf
            results.append((bits(clean), bits(run(layers, layer, x, 90)), state))
        for isa, (clean, damaged, state) in zip(EVERY_ISA, results, strict=True):
            assert torch.equal(clean, results[0][0]), isa
            assert torch.equal(damaged, results[0][1]), isa
            assert state == results[0][2], isa


def test_groups_are_added_in_a_binary_tree(layers_of: LayersOf) -> None:
    """So that nodes which share out the groups can add the same partial sums in the same order."""
    layers = layers_of("six groups")
    wo_b = layers.network.layers[0].attention.wo_b
    every = torch.frombuffer(bytearray(ctypes.string_at(wo_b.first.data, wo_b.groups * wo_b.stride)), dtype=torch.uint8)
    x = layers.random_rows(20)
    whole, parts = run(layers, 0, x, 20), []
    for i in range(wo_b.groups):
        only = torch.zeros(wo_b.groups, wo_b.stride, dtype=torch.uint8)
        only[i] = every.view(wo_b.groups, -1)[i]
        layers.reset()
        layers.network.layers[0].attention.wo_b.first.data = only.data_ptr()
        parts.append(run(layers, 0, x, 20))
    assert torch.equal(whole, ((parts[0] + parts[1]) + (parts[2] + parts[3])) + (parts[4] + parts[5]))
    assert not torch.equal(whole, sum(parts[1:], parts[0]))


@pytest.mark.parametrize("isa", EVERY_ISA)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_a_number_is_seen_by_those_who_read_it(layers_of: LayersOf, value: float, isa: Isa) -> None:
    layers = layers_of("nothing a multiple", isa=isa)
    window, bad = layers.config.sliding_window, 40
    x = layers.random_rows(60)
    clean = run(layers, 0, x, 16)
    layers.reset()
    run(layers, 0, x[: bad + 1], 16)
    layers.rows(layers.kernel_arena, "swa", 0)[PLACE.slot, bad % window, 3] = value
    after = torch.cat([layers.kernel(0, x[i : i + 1], [Segment([0], i, PLACE)]) for i in range(bad + 1, 60)])
    reached = torch.arange(bad + 1, 60) < bad + window
    assert after[reached].isnan().all()
    assert torch.equal(after[~reached], clean[bad + 1 :][~reached])


def test_a_poisoned_entry_is_seen(layers_of: LayersOf) -> None:
    """Also by the indexer: a score that is not a number is among the best."""
    for case, layer, n, names in (
        ("eleven wide heads", 1, 100, ["c4_kv"]),  # it sees 25 entries and reads them all
        ("nothing a multiple", 1, 140, ["c4_kv", "c4_index"]),  # 35, of which it reads 11
        ("nothing a multiple", 2, 140, ["c128_kv"]),
    ):
        layers = layers_of(case)
        x = layers.random_rows(n + 1)
        run(layers, layer, x[:n], n)
        for entry in range(n // layers.config.compress_ratios[layer]):
            parts = [layers.rows(layers.kernel_arena, name, layer)[PLACE.pages[0], entry] for name in names]
            for part in parts:
                part[-1] = torch.nan
            out = layers.kernel(layer, x[n:], [Segment([0], n, PLACE)])
            assert out.isnan().all(), f"{names}, entry {entry}"
            for part in parts:
                part[-1] = 1.0


def test_a_step_reads_no_later_row_and_nothing_before_valid_from(layers_of: LayersOf) -> None:
    """Rings and pages are poisoned: whatever was not written is NaN."""
    layers = layers_of("nothing a multiple", spec_tokens=3)
    x = layers.random_rows(30)
    x[20:] = torch.nan
    for layer in LAYERS.values():
        layers.reset()
        out = run(layers, layer, x, 30)
        assert out[:20].isfinite().all()
        assert out[20:].isnan().all()
    layers.reset()
    assert layers.kernel(0, x[:20], [Segment([0] * 20, 400, PLACE)])[:3].isnan().all()
    late = [Segment([0] * 20, 400, PLACE, valid_from=400)]
    layers.reset()
    assert layers.kernel(0, x[:20], late).isfinite().all()
    expected = layers.python(0, x[:20], late)
    torch.testing.assert_close(layers.kernel(0, x[:20], late), expected, rtol=1e-4, atol=1e-5)
