"""What a model's config says about memory and hand-offs: the nodes' own arithmetic, without a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from server.cache.capacity import pages_for
from server.cache.layout import ArenaLayout
from server.cache.row_formats import AUTO, FP8, MODEL, MXFP4
from server.cache.specs import CacheGeometry
from server.model.config import ModelConfig
from server.model.state import state_components
from server.model.weight_sizes import WeightSizes, weight_sizes
from server.node.memory_plan import MemoryPlan, default_snapshots, snapshot_size


@dataclass(frozen=True)
class RowFormat:
    """How state is stored: ``--kv-dtype`` and ``--index-dtype``."""

    kv_dtype: str
    index_dtype: str

    @property
    def name(self) -> str:
        return self.kv_dtype if self.kv_dtype == MODEL else f"{self.kv_dtype}, keys {self.index_dtype}"


ROW_FORMATS = (RowFormat(MODEL, AUTO), RowFormat(FP8, FP8), RowFormat(FP8, MXFP4))


@dataclass(frozen=True)
class Paper:
    """A node for ``slots`` requests of up to ``context`` tokens each, prompt and answer."""

    config: ModelConfig
    dtype: str
    context: int
    slots: int
    page_size: int
    draft: bool
    spec_tokens: int = 0

    def geometry(self, rows: RowFormat) -> CacheGeometry:
        """The node's pools. Raises :class:`LayoutError` for a page size that cannot be."""
        components = state_components(
            self.config,
            self.dtype,
            self.spec_tokens,
            draft=self.draft,
            kv_dtype=rows.kv_dtype,
            index_dtype=rows.index_dtype,
        )
        pages = self.slots * pages_for(self.context + self.spec_tokens, self.page_size)
        return CacheGeometry(
            self.page_size, pages + 1, self.slots + 1, self.config.sliding_window, self.spec_tokens, components
        )

    def node(self, rows: RowFormat, *, packed: bool = False) -> MemoryPlan:
        """What a prefill node's memory is used for: one on the CPU, as to snapshots of prefixes."""
        context, geometry = min(self.context, self.config.max_position_embeddings), self.geometry(rows)
        snapshots = default_snapshots(geometry, snapshot_size(self.config, geometry, self.dtype))
        return MemoryPlan(self._packed if packed else self._dequantized, geometry, context, snapshots)

    @cached_property
    def _dequantized(self) -> WeightSizes:
        return weight_sizes(self.config, self.dtype, draft=self.draft)

    @cached_property
    def _packed(self) -> WeightSizes:
        return weight_sizes(self.config, self.dtype, draft=self.draft, packed=True)

    def handoff_nbytes(self, rows: RowFormat, n_tokens: int) -> int:
        """Bytes that are sent for a prompt of ``n_tokens``."""
        layout = ArenaLayout.from_geometry(self.geometry(rows))
        return sum(layout.live_nbytes(n_tokens).values())

    def snapshot_nbytes(self, rows: RowFormat) -> int:
        """Bytes of a snapshot, which a prefill node keeps beside the pages of a prefix."""
        return snapshot_size(self.config, self.geometry(rows), self.dtype)
