"""A model of kernels from its weights to its errors: what it holds, what it refuses, and that threads change no bit."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from server.cache.arena import Arena
from server.cache.layout import ArenaLayout, Placement
from server.cache.specs import CacheGeometry, LayoutError
from server.kernels import abi
from server.kernels.choice import choose_kernels
from server.kernels.model import KernelsFailed, PackedModel
from server.kernels.rope import BLOCK, RopeBlocks
from server.model.batch import Segment
from server.model.config import CheckpointError, load_config
from server.model.interface import BadStep, LoadedModel
from server.model.loader import load_model
from server.model.numerics import OFFICIAL
from server.model.rope import Rotation, rope_frequencies
from server.model.state import state_components
from tests.support.checkpoints import BUNDLED, VOCAB_SIZE, save_official, tensors_of, write_checkpoint
from tests.support.models import load
from tests.support.quantized import take_for_quantized
from tests.support.runners import make_runner, prompt

PLACE = Placement(2, (3, 1))


@pytest.fixture(scope="module")
def packed() -> LoadedModel:
    return load(BUNDLED, "cpu")


def test_weights_move_from_one_model_to_the_other() -> None:
    kernels = choose_kernels("auto", "cpu")
    if kernels.library is None:
        pytest.skip(kernels.reason)
    model = load_model(BUNDLED, draft=True)
    n_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
    packed = kernels.take(model)
    assert isinstance(packed, PackedModel)
    assert not any(each.numel() for each in model.parameters())
    held = sum(each.numel() * each.element_size() for each in packed.weights.memory if isinstance(each, torch.Tensor))
    assert n_bytes <= held < 1.5 * n_bytes, "panels are padded to whole vectors, which small matrices feel most"


def test_matrices_say_whose_inputs_the_reference_quantizes() -> None:
    kernels = choose_kernels("auto", "cpu")
    if kernels.library is None:
        pytest.skip(kernels.reason)
    model = take_for_quantized(load_model(BUNDLED, numerics=OFFICIAL))
    layers = PackedModel(model, kernels.library).weights.layers
    for layer in layers:
        attention, experts = layer.attention, layer.experts
        yes = [attention.in_proj, attention.q_proj, attention.wo_b.first, experts.up[0], experts.down[0]]
        no = [attention.index_proj, attention.state_proj, attention.wo_a.first, experts.gate, layer.hc_attn.fn]
        assert [each.quantized_input for each in yes] == [1] * len(yes)
        assert [each.quantized_input for each in no] == [0] * len(no)
    plain = PackedModel(take_for_quantized(load_model(BUNDLED)), kernels.library).weights.layers
    assert not any(layer.attention.in_proj.quantized_input for layer in plain)


@pytest.mark.parametrize(
    ("segment", "row", "words"),
    [
        (Segment([5, VOCAB_SIZE, 6], 0, PLACE), 2, f"row 2: token id {VOCAB_SIZE} is not one of the vocabulary's"),
        (Segment([5, -1], 0, PLACE), 2, f"row 2: token id -1 is not one of the vocabulary's {VOCAB_SIZE}"),
        (Segment([5], 0, Placement(20, (3,))), 1, "row 1: slot 20 is none of the arena's"),
        (Segment([5], 0, Placement(-1, (3,))), 1, "row 1: slot -1 is none of the arena's"),
        (Segment([5] * 4, 0, Placement(2, (16,))), 4, r"row 4: position 3: one of the pages \[16\] is none"),
        (Segment([5], 256, Placement(2, (3,))), 1, "row 1: position 256 lies on page 1 of a request with 1 pages"),
        (Segment([5], 3, PLACE, valid_from=9), 1, "row 1: position 3 does not follow from its segment"),
    ],
)
def test_a_bad_row_is_refused_and_nothing_is_written(
    packed: LoadedModel, segment: Segment, row: int, words: str
) -> None:
    runner = make_runner(packed)
    before = runner.arena.buffer.clone()
    with pytest.raises(BadStep, match=words) as caught:
        runner.forward([Segment([7], 0, Placement(1, (1,))), segment])
    assert caught.value.row == row
    assert torch.equal(before, runner.arena.buffer)


def test_a_draft_that_was_not_loaded_is_named(packed: LoadedModel) -> None:
    runner = make_runner(packed)
    streams = runner.forward([Segment([7], 0, PLACE)]).streams
    with pytest.raises(KernelsFailed, match="this model was loaded without its draft layer"):
        runner.draft([Segment([8], 0, PLACE)], streams)


def test_streams_of_another_shape_are_refused() -> None:
    runner = make_runner(load(BUNDLED, "cpu", draft=True))
    streams = runner.forward([Segment([7, 8], 0, PLACE)]).streams
    with pytest.raises(BadStep, match=r"streams of shape \[2, 2, 128\] for \[1, 2, 128\]"):
        runner.draft([Segment([8], 0, PLACE)], streams)


def test_an_arena_without_a_component_can_be_described_but_not_computed_on(packed: LoadedModel) -> None:
    components = tuple(c for c in state_components(packed.config, "float32") if c.name != "c128_state")
    geometry = CacheGeometry(256, 4, 4, packed.config.sliding_window, 0, components)
    bound = packed.bind(Arena(ArenaLayout.from_geometry(geometry)))
    with pytest.raises(LayoutError, match="no component named 'c128_state'"):
        bound.forward([Segment([7], 0, PLACE)], every_row=False)


def test_a_table_of_experts_that_do_not_exist_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, seed=1)
    tensors = tensors_of(tmp_path)
    tensors["layers.1.ffn.gate.tid2eid"][17, 0] = 6
    save_official(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"layers\.1\.ffn\.gate\.tid2eid names an expert that is none of 6"):
        load(tmp_path, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    model = load(BUNDLED, "cpu", dtype=dtype, draft=True)
    text, found = prompt(300, model), []
    for threads in (1, 2, 3):
        runner = make_runner(model, threads=threads)
        whole = runner.forward([Segment(text, 0, PLACE)], every_row=True, with_hidden=True)
        step = runner.forward([Segment([9], len(text), PLACE)])
        drafted = runner.draft([Segment([9], len(text), PLACE, valid_from=len(text))], step.streams)
        outputs = [each for output in (whole, step, drafted) for each in vars(output).values() if each is not None]
        found.append([*outputs, runner.arena.buffer])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_threads_bound_what_torch_computes_between_the_kernels(packed: LoadedModel) -> None:
    before = torch.get_num_threads()
    try:
        for threads in (2, 1):
            make_runner(packed, threads=threads)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def row_of(table: abi.RopeTable, position: int, width: int) -> torch.Tensor:
    """What the kernels read for a position: cos and sin in turns."""
    start = table.blocks[position // table.block] + position % table.block * width * ctypes.sizeof(ctypes.c_float)
    return torch.tensor(list((ctypes.c_float * width).from_address(start)))


def test_rotations_are_those_of_the_python_model_and_made_when_they_are_reached() -> None:
    _, frequencies = rope_frequencies(load_config(BUNDLED))
    blocks, table = RopeBlocks(frequencies), abi.RopeTable()
    for first, last in ((5, 6), (1_000_000, 1_000_000), (BLOCK - 1, BLOCK)):
        blocks.reach(table, first, last)
        for position in (first, last):
            pairs = torch.empty(1, 2 * len(frequencies))
            pairs[0, ::2], pairs[0, 1::2] = 1, 0
            turned = Rotation(torch.tensor([position]), frequencies).apply_(pairs)
            assert torch.equal(turned[0], row_of(table, position, len(turned[0])))
    assert sum(bool(table.blocks[i]) for i in range(table.n_blocks)) == 3, "nothing between them was made"


def test_a_long_segment_between_reached_blocks_has_its_rotations(packed: LoadedModel) -> None:
    runner, place = make_runner(packed), Placement(2, tuple(range(1, 11)))
    for start in (0, 2 * BLOCK):  # requests of other lengths were here before
        runner.forward([Segment([5], start, Placement(3, place.pages))])
    output = runner.forward([Segment([5] * (BLOCK + 2), BLOCK - 1, place, valid_from=BLOCK - 1)])
    assert output.logits.shape[0] == 1
