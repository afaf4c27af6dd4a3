"""The network computed by the kernels: the packed weights of a checkpoint, and a model over one arena."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property

import torch

from server.cache.arena import Arena
from server.kernels import abi
from server.kernels.binding import bind_weights
from server.kernels.library import Library
from server.kernels.packing import PackedWeights, pack_weights
from server.kernels.plan import StepPlan
from server.kernels.rope import BLOCK, RopeBlocks
from server.model.batch import Segment
from server.model.config import ModelConfig
from server.model.interface import BadStep, ForwardOutput, WeightsState
from server.model.network import DeepseekV4
from server.model.rope import rope_frequencies


class KernelsFailed(RuntimeError):
    """The kernels could not compute a step, and no row of it is at fault."""


class PackedModel:
    """A checkpoint in the layout of the kernels of ``library`` (see :class:`server.model.interface.LoadedModel`).

    The weights move: ``model`` cannot compute afterwards.
    """

    def __init__(self, model: DeepseekV4, library: Library) -> None:
        self.config, self.dtype, self.drafts = model.config, model.dtype, model.drafts
        abi.declare(library.functions, str(library.path))
        self.library = library
        self.weights = pack_weights(model, library.functions)

    def weights_state(self) -> WeightsState:
        return WeightsState() if self.weights.stored is None else self.weights.stored.state()

    def bind(self, arena: Arena) -> KernelModel:
        """This model over the pools of ``arena``, which must be in CPU memory."""
        return KernelModel(self.config, self.dtype, self.weights, self.library.functions, arena)


class KernelModel:
    """A :class:`PackedModel` bound to one arena (see :class:`server.model.interface.BoundModel`).

    A step's result is the same bits for any batch, chunk and number of threads. Calls release the GIL. A step that
    cannot be computed raises :class:`BadStep` and has written nothing. After :class:`MemoryError`,
    :class:`KernelsFailed` or :class:`WeightsUnreadable` some of its rows may be written.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, weights: PackedWeights, functions: ctypes.CDLL, arena: Arena
    ) -> None:
        if arena.device.type != "cpu":
            raise ValueError(f"the kernels compute in CPU memory, the arena is on {arena.device}")
        self._config, self._dtype, self._weights, self._functions, self._arena = (
            config, dtype, weights, functions, arena,
        )  # fmt: skip
        self._page_size = arena.layout.page_size if arena.layout.page_components else 0
        self._main, self._compress = (RopeBlocks(frequencies) for frequencies in rope_frequencies(config))
        self._reached: set[int] = set()
        self._detail = ctypes.c_int64(-1)
        self._threads = 1

    def set_threads(self, n: int) -> None:
        """Of a step, and of what torch computes for it in this thread (rotations, choices of rows)."""
        self._threads = n
        torch.set_num_threads(n)

    def forward(self, segments: Sequence[Segment], *, every_row: bool, with_hidden: bool = False) -> ForwardOutput:
        plan = self._plan(segments, every_row=every_row)
        output = self._output(plan, with_hidden=with_hidden)
        self._check(
            self._functions.kernels_forward(
                self._network, plan.step, output.logits.data_ptr(), output.streams.data_ptr(),
                None if output.hidden is None else output.hidden.data_ptr(), self._detail,
            ),
            plan,
        )  # fmt: skip
        return output

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.contiguous()
        n_rows = hidden.shape[0]
        if hidden.dtype != torch.float32 or hidden.shape[1:] != (self._config.hidden_size,):
            raise ValueError(f"rows of shape {list(hidden.shape)} and {hidden.dtype} are no input of the head")
        logits = torch.empty(n_rows, self._config.vocab_size)
        status = self._functions.kernels_logits(
            self._network, hidden.data_ptr(), n_rows, logits.data_ptr(), self._threads
        )
        self._check_weights(status)
        if status != abi.Status.OK:
            raise KernelsFailed(f"the kernels ended the logits of {n_rows} rows with {abi.Status(status).name}")
        return logits

    def draft(self, segments: Sequence[Segment], streams: torch.Tensor) -> ForwardOutput:
        plan = self._plan(segments, every_row=False, is_draft=True)
        before, output = self._before(streams, plan), self._output(plan)
        self._check(
            self._functions.kernels_draft(
                self._network, plan.step, before.data_ptr(), output.logits.data_ptr(), output.streams.data_ptr(),
                self._detail,
            ),
            plan,
        )  # fmt: skip
        return output

    def draft_rows(self, segments: Sequence[Segment], streams: torch.Tensor) -> None:
        plan = self._plan(segments, every_row=False, is_draft=True)
        before = self._before(streams, plan)
        self._check(
            self._functions.kernels_draft_window(self._network, plan.step, before.data_ptr(), self._detail), plan
        )

    @cached_property
    def _network(self) -> abi.Network:
        """Made at the first step: an arena that lacks a component of the model may be described, but not computed on.

        Raises :class:`LayoutError`.
        """
        network, self._structures = bind_weights(self._weights, self._config, self._arena)
        return network

    def _plan(self, segments: Sequence[Segment], *, every_row: bool, is_draft: bool = False) -> StepPlan:
        plan = StepPlan(segments, 0 if is_draft else self._page_size, every_row=every_row, threads=self._threads)
        reached = self._reached
        for segment in segments:
            blocks = range(segment.start // BLOCK, (segment.start + len(segment.token_ids)) // BLOCK + 1)
            if not reached.issuperset(blocks):
                self._reach(blocks)
        return plan

    def _reach(self, blocks: range) -> None:
        """Makes the rotations of these blocks of positions, and of the one before, which their first entry may begin
        in.
        """
        first, last = blocks.start * BLOCK, blocks.stop * BLOCK - 1
        self._main.reach(self._network.main, first, last)
        self._compress.reach(self._network.compress, max(first - BLOCK, 0), last)
        self._reached.update(blocks)

    def _output(self, plan: StepPlan, *, with_hidden: bool = False) -> ForwardOutput:
        config = self._config
        return ForwardOutput(
            torch.empty(plan.n_wanted, config.vocab_size),
            torch.empty(plan.n_rows, config.hc_mult, config.hidden_size, dtype=self._dtype),
            torch.empty(plan.n_rows, config.hidden_size) if with_hidden else None,
        )

    def _before(self, streams: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """The streams that a draft step begins with, as the kernels read them."""
        expected = (plan.n_rows, self._config.hc_mult, self._config.hidden_size)
        if tuple(streams.shape) != expected:
            raise BadStep(-1, f"streams of shape {list(streams.shape)} for {list(expected)}")
        return streams.to(self._dtype).contiguous()

    def _check_weights(self, status: int) -> None:
        if status == abi.Status.UNREADABLE and self._weights.stored is not None:
            raise self._weights.stored.failure()

    def _check(self, status: int, plan: StepPlan) -> None:
        if status == abi.Status.OK:
            return
        self._check_weights(status)
        row = self._detail.value
        if status == abi.Status.OUT_OF_MEMORY:
            raise MemoryError(f"no memory for a step of {plan.n_rows} rows")
        if status == abi.Status.NO_DRAFT:
            raise KernelsFailed("this model was loaded without its draft layer, or the arena has no window for it")
        if status not in _WORDS or not 0 <= row < plan.n_rows:
            raise KernelsFailed(f"the kernels ended a step with {abi.Status(status).name}")
        segment = plan.segments[plan.owners[row]]
        facts = {
            "token": plan.tokens[row],
            "position": plan.positions[row],
            "vocab": self._config.vocab_size,
            "slot": segment.placement.slot,
            "pages": list(segment.placement.pages),
        }
        raise BadStep(row, _WORDS[abi.Status(status)].format(**facts))


_WORDS = {
    abi.Status.BAD_TOKEN: "token id {token} is not one of the vocabulary's {vocab}",
    abi.Status.BAD_POSITION: "position {position} cannot be computed",
    abi.Status.BAD_SLOT: "slot {slot} is none of the arena's for requests",
    abi.Status.BAD_PAGE: "position {position}: one of the pages {pages} is none of the arena's for requests",
    abi.Status.BAD_SEGMENT: "position {position} does not follow from its segment",
}
