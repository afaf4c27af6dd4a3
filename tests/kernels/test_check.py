"""A step with an id that leads nowhere is refused by name, with the row, before anything is written."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from server.cache.arena import Arena
from server.cache.layout import ArenaLayout, Placement
from server.cache.specs import CacheGeometry
from server.kernels import abi
from server.kernels.binding import bind_weights
from server.kernels.model import PackedModel
from server.kernels.plan import StepPlan
from server.kernels.rope import RopeBlocks
from server.model.batch import Segment
from server.model.rope import rope_frequencies
from server.model.state import state_components
from tests.support.checkpoints import BUNDLED, VOCAB_SIZE
from tests.support.models import load

PAGES, SLOTS = 4, 3


class Bound:
    """The bundled network over an arena of its own, with ropes up to position 1023."""

    def __init__(self, packed: PackedModel) -> None:
        self.packed, self.config, self.functions = packed, packed.config, packed.library.functions
        components = state_components(packed.config, "float32", 0, draft=True)
        geometry = CacheGeometry(256, PAGES, SLOTS, packed.config.sliding_window, 0, components)
        self.arena = Arena(ArenaLayout.from_geometry(geometry), poison=True)
        self.network, self.memory = bind_weights(packed.weights, packed.config, self.arena)
        self.ropes = [RopeBlocks(frequencies) for frequencies in rope_frequencies(packed.config)]
        for rope, table in zip(self.ropes, (self.network.main, self.network.compress), strict=True):
            rope.reach(table, 0, 1023)


@pytest.fixture(scope="module")
def bound() -> Bound:
    packed = load(BUNDLED, "cpu", draft=True)
    assert isinstance(packed, PackedModel)
    return Bound(packed)


class Arrays:
    """The arrays of a step of two segments, rows 0..3 from position 6 on and rows 4..5 from position 300 on."""

    def __init__(self) -> None:
        segments = [
            Segment([5, 6, 7, 8], 6, Placement(1, (1,))),
            Segment([9, 10], 300, Placement(2, (2, 3))),
        ]
        self.plan = StepPlan(segments, 256, every_row=False, threads=1)
        self.step = self.plan.step

    def set(self, name: str, index: int, value: int) -> None:
        address = getattr(self.step, name)
        ctypes.c_int64.from_address(address + 8 * index).value = value

    def add_segment(self) -> None:
        """Tells the kernels of a third segment: what lies behind the arrays of two is no row of it."""
        self.step.segments = 3

    def move(self, start: int) -> None:
        """Lets the second segment begin at ``start``."""
        self.set("start", 1, start)
        self.set("position", 4, start)
        self.set("position", 5, start + 1)


CHANGES: dict[str, tuple[abi.Status, int, Callable[[Arrays], None]]] = {
    "negative token": (abi.Status.BAD_TOKEN, 2, lambda a: a.set("token", 2, -1)),
    "token above the vocabulary": (abi.Status.BAD_TOKEN, 5, lambda a: a.set("token", 5, VOCAB_SIZE)),
    "negative position": (abi.Status.BAD_POSITION, 1, lambda a: a.set("position", 1, -1)),
    "position without a rope": (abi.Status.BAD_POSITION, 4, lambda a: a.move(1 << 40)),
    "position of a rope that was not made": (abi.Status.BAD_POSITION, 4, lambda a: a.move(1 << 15)),
    "position that does not follow": (abi.Status.BAD_SEGMENT, 3, lambda a: a.set("position", 3, 12)),
    "no such segment": (abi.Status.BAD_SEGMENT, 0, lambda a: a.set("segment", 0, 2)),
    "negative segment": (abi.Status.BAD_SEGMENT, 5, lambda a: a.set("segment", 5, -1)),
    "row of another segment": (abi.Status.BAD_SEGMENT, 1, lambda a: a.set("segment", 1, 1)),
    "first row elsewhere": (abi.Status.BAD_SEGMENT, 4, lambda a: a.set("first_row", 1, 3)),
    "first row beyond": (abi.Status.BAD_SEGMENT, 0, lambda a: a.set("first_row", 0, 6)),
    "negative start": (abi.Status.BAD_SEGMENT, 0, lambda a: a.set("start", 0, -6)),
    "window from later on": (abi.Status.BAD_SEGMENT, 0, lambda a: a.set("valid_from", 0, 7)),
    "negative start of the window": (abi.Status.BAD_SEGMENT, 4, lambda a: a.set("valid_from", 1, -1)),
    "slot above the arena's": (abi.Status.BAD_SLOT, 4, lambda a: a.set("slot", 1, SLOTS)),
    "slot of nobody": (abi.Status.BAD_SLOT, 0, lambda a: a.set("slot", 0, 0)),
    "negative slot": (abi.Status.BAD_SLOT, 0, lambda a: a.set("slot", 0, -1)),
    "page above the arena's": (abi.Status.BAD_PAGE, 5, lambda a: a.set("pages", 3, PAGES)),
    "page of nobody": (abi.Status.BAD_PAGE, 5, lambda a: a.set("pages", 3, 0)),
    "negative page": (abi.Status.BAD_PAGE, 3, lambda a: a.set("pages", 0, -1)),
    "segment without rows": (abi.Status.BAD_SEGMENT, -1, lambda a: a.add_segment()),
    "too few pages": (abi.Status.BAD_PAGE, 3, lambda a: setattr(a.step, "max_pages", 0)),
    "logits of no row": (abi.Status.BAD_SEGMENT, 6, lambda a: a.set("wanted", 1, 6)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_step_is_refused_by_name_and_row_and_writes_nothing(bound: Bound, change: str) -> None:
    status, row, apply = CHANGES[change]
    arrays = Arrays()
    apply(arrays)
    before = bound.arena.buffer.clone()
    logits = torch.full((2, bound.config.vocab_size), -1.0)
    detail = ctypes.c_int64(-7)
    functions, network = bound.functions, bound.network
    assert functions.kernels_forward(network, arrays.step, logits.data_ptr(), None, None, detail) == status
    assert detail.value == row
    assert torch.equal(bound.arena.buffer, before)
    assert (logits == -1).all()


def test_a_step_that_is_well_made_runs_without_outputs(bound: Bound) -> None:
    detail = ctypes.c_int64(-7)
    arrays = Arrays()
    assert bound.functions.kernels_forward(bound.network, arrays.step, None, None, None, detail) == abi.Status.OK
    assert detail.value == -1


def test_a_network_without_a_draft_refuses_to_draft(bound: Bound) -> None:
    network = abi.Network.from_buffer_copy(bound.network)
    network.draft = ctypes.POINTER(abi.Draft)()
    arrays, detail = Arrays(), ctypes.c_int64()
    functions = bound.functions
    before = torch.zeros(6, bound.config.hc_mult, bound.config.hidden_size)
    status = functions.kernels_draft(network, arrays.step, before.data_ptr(), None, None, detail)
    assert status == abi.Status.NO_DRAFT
    assert functions.kernels_draft_window(network, arrays.step, before.data_ptr(), detail) == abi.Status.NO_DRAFT
