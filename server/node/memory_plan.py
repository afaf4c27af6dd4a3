"""What a node's memory is used for: planned from the config and the options, before anything is loaded.

Start-up, ``--doctor`` and ``scripts/plan.py`` all take their numbers from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from server.cache.capacity import fitted, item_nbytes, most_at_once, page_nbytes, slot_nbytes, snapshot_nbytes
from server.cache.layout import ArenaLayout
from server.cache.row_formats import ITEMSIZE
from server.cache.specs import CacheGeometry, LayoutError, Scope
from server.model.config import ModelConfig
from server.model.state import state_components
from server.model.weight_sizes import WeightSizes, weight_sizes
from server.node.free_memory import FreeMemory, MemoryLimit
from server.node.options import OFF, NodeOptions
from server.sizes import size

LIBRARIES_NBYTES = 500 << 20
"""A node without weights and pools: Python, torch, Mooncake, the HTTP server."""
_SNAPSHOTS_PART = 8
"""Snapshots may take this part of the bytes of all pages."""
_SHOWN_LENGTHS = (2048, 8192, 32768, 131072)
"""Tokens of the requests whose concurrency is told."""


@dataclass(frozen=True)
class Snapshots:
    """What snapshots of prefixes may take, in main memory: ``nbytes`` in all, of ``one_nbytes`` each."""

    nbytes: int = 0
    one_nbytes: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose. ``geometry`` counts page and slot 0, which are never handed out; ``longest`` is the context in
    tokens that the config allows. ``snapshots`` are those that lie where weights and pools do.
    """

    weights: WeightSizes
    geometry: CacheGeometry
    longest: int
    snapshots: Snapshots = Snapshots()

    @property
    def pools(self) -> int:
        return ArenaLayout.from_geometry(self.geometry).nbytes

    @property
    def total(self) -> int:
        """All that a node keeps in memory."""
        return self.weights.loaded + self.pools + self.snapshots.nbytes + LIBRARIES_NBYTES

    @property
    def pages(self) -> int:
        return self.geometry.pages - 1

    @property
    def slots(self) -> int:
        return self.geometry.slots - 1

    @property
    def page_nbytes(self) -> int:
        return page_nbytes(self.geometry)

    @property
    def slot_nbytes(self) -> int:
        return slot_nbytes(self.geometry)

    @property
    def context(self) -> int:
        """Tokens of the longest request, prompt and answer: it also needs room for the tokens drafted behind it."""
        return min(self.longest, self.pages * self.geometry.page_size - self.geometry.spec_tokens)

    def parts(self) -> str:
        """The sum in words."""
        pools = f"{size(self.pools)} for {self.pages:,} pages and {self.slots:,} slots"
        snapshots = f", {size(self.snapshots.nbytes)} snapshots" if self.snapshots.nbytes else ""
        mapped = f", {size(self.weights.mapped)} more stay in their files" if self.weights.mapped else ""
        libraries = f"about {size(LIBRARIES_NBYTES)} libraries"
        return f"{size(self.weights.loaded)} weights, {pools}{snapshots}, {libraries}{mapped}"

    def lines(self) -> Iterator[str]:
        """The plan as a table: what every component takes, and what fits."""
        geometry, names = self.geometry, max(len(spec.name) for spec in self.geometry.components)
        yield f"{size(self.total)}: {self.parts()}"
        for spec in geometry.components:
            is_page = spec.scope is Scope.PAGE
            one, items = item_nbytes(spec, geometry.page_size), geometry.pages if is_page else geometry.slots
            yield (
                f"{spec.name:<{names}}  {spec.rows_per_item(geometry.page_size):>5,} rows of {spec.row_nbytes:>9,} B "
                f"{'a page' if is_page else 'a slot'} = {one:>11,} B, {size(one * items)} in all"
            )
        yield f"a page of {geometry.page_size} tokens {self.page_nbytes:,} B, a slot {self.slot_nbytes:,} B"
        if (snapshots := self.snapshots).nbytes:
            n_snapshots = snapshots.nbytes // snapshots.one_nbytes
            yield f"snapshots of prefixes {snapshots.one_nbytes:,} B, at most {n_snapshots:,} at once"
        lengths = [n for n in _SHOWN_LENGTHS if n < self.context] + [self.context]
        at_once = ", ".join(f"{most_at_once(geometry, n):,} of {n:,} tokens" for n in lengths)
        yield f"longest prompt {self.context - 1:,} tokens; requests at once: {at_once}"


def plan_memory(
    config: ModelConfig,
    options: NodeOptions,
    free: FreeMemory | None,
    *,
    draft: bool,
    spec_tokens: int,
    packed_memory: int | None = None,
    takes_snapshots: bool = False,
) -> MemoryPlan:
    """The plan of a node. ``free`` is what ``--memory`` is a part of, and what must hold weights and pools; None: not
    known. ``packed_memory`` is the most memory for weights that stay in their files; None: they are loaded. Snapshots
    of prefixes count where the model is on the CPU.

    Raises :class:`LayoutError` with the numbers for what does not fit.
    """
    components = state_components(
        config,
        options.dtype,
        spec_tokens,
        draft=draft,
        kv_dtype=options.kv_dtype,
        index_dtype=options.index_dtype,
    )
    geometry = CacheGeometry(
        page_size=options.page_size,
        pages=max(options.pages, 1) + 1,  # item 0 is never handed out
        slots=max(options.slots, 1) + 1,
        window=config.sliding_window,
        spec_tokens=spec_tokens,
        components=components,
    )
    weights = weight_sizes(config, options.dtype, draft=draft, packed=packed_memory is not None)
    if packed_memory is not None:
        weights = weights.within(packed_memory)
    plan = MemoryPlan(weights, geometry, config.max_position_embeddings)
    one_nbytes = snapshot_size(config, geometry, options.dtype) if takes_snapshots and options.device == "cpu" else 0
    if options.memory is not None:
        plan = _within(plan, options, options.memory, free, one_nbytes)
    elif one_nbytes:
        plan = replace(plan, snapshots=snapshots_of(options, plan.geometry, one_nbytes))
    if free is not None and plan.total - LIBRARIES_NBYTES > free.nbytes:
        raise LayoutError(
            f"{size(plan.total)} needed ({plan.parts()}), {size(free.nbytes)} free ({free.limit}): "
            f"{less_memory(options)}"
        )
    return plan


def snapshot_size(config: ModelConfig, geometry: CacheGeometry, dtype: str) -> int:
    """Bytes of one snapshot of a prefix."""
    streams_nbytes = config.hc_mult * config.hidden_size * ITEMSIZE[dtype]
    return snapshot_nbytes(ArenaLayout.from_geometry(geometry), streams_nbytes)


def snapshots_of(options: NodeOptions, geometry: CacheGeometry, one_nbytes: int) -> Snapshots:
    """What ``--prefix-cache`` gives to snapshots of ``one_nbytes`` each."""
    if options.prefix_cache == OFF:
        return Snapshots()
    if isinstance(options.prefix_cache, int):
        return Snapshots(options.prefix_cache, one_nbytes)
    return default_snapshots(geometry, one_nbytes)


def default_snapshots(geometry: CacheGeometry, one_nbytes: int) -> Snapshots:
    """An eighth of the bytes of all pages, or one for each slot if that is more."""
    pages, slots = geometry.pages - 1, geometry.slots - 1
    return Snapshots(max(pages * page_nbytes(geometry) // _SNAPSHOTS_PART, slots * one_nbytes), one_nbytes)


def packed_memory(options: NodeOptions, free: FreeMemory | None) -> int | None:
    """Most memory for weights that stay in their files: ``--weights-memory``, or half of what is free. None: they are
    loaded. Raises :class:`LayoutError` where it is not known what is free.
    """
    if options.weights != "packed":
        return None
    if options.weights_memory is not None:
        return options.weights_memory
    if free is None:
        raise LayoutError("--weights packed: this system does not say how much is free; give --weights-memory")
    return free.nbytes // 2


def _within(
    plan: MemoryPlan, options: NodeOptions, limit: MemoryLimit, free: FreeMemory | None, one_nbytes: int
) -> MemoryPlan:
    """``plan`` with the pages and slots that ``limit`` leaves room for; those that are given stay.

    If snapshots of ``one_nbytes`` are taken (0: none), their share is that of the pools that would fit without them.
    """
    allowed = limit.of(free)
    first = plan.weights.loaded + LIBRARIES_NBYTES
    longest = plan.longest + plan.geometry.spec_tokens
    given = f"--memory {limit.text} allows {size(allowed)}"
    given_items = {"pages": options.pages or None, "slots": options.slots or None}
    snapshots = Snapshots()
    try:
        geometry = fitted(plan.geometry, allowed - first, longest, **given_items)
        if one_nbytes:
            snapshots = snapshots_of(options, geometry, one_nbytes)
            geometry = fitted(plan.geometry, allowed - first - snapshots.nbytes, longest, **given_items)
    except LayoutError as error:
        parts = f"{size(plan.weights.loaded)} weights and about {size(LIBRARIES_NBYTES)} libraries"
        if snapshots.nbytes:
            parts += f" and {size(snapshots.nbytes)} snapshots"
        raise LayoutError(f"{given}, of which {parts} are needed: {error}; {less_memory(options)}") from error
    fit = replace(plan, geometry=geometry, snapshots=snapshots)
    if fit.total > allowed:
        raise LayoutError(f"{given}, {size(fit.total)} are needed ({fit.parts()}): {less_memory(options)}")
    return fit


def less_memory(options: NodeOptions) -> str:
    """What a user can do where memory is short."""
    changes = ["fewer --pages or --slots"] if options.pages or options.slots else []
    if options.memory is not None:
        changes.append("a larger --memory")
    if options.weights == "packed":
        changes.append("a smaller --weights-memory")
    elif options.dtype == "float32":
        changes.append("--dtype bfloat16")
    return "give " + ", ".join(changes or ["fewer --pages or --slots"])
