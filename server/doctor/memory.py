"""Whether weights and pools fit into the memory that is free, for this process and in its control group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from server.cache.layout import ArenaLayout
from server.cache.row_formats import ITEMSIZE
from server.cache.specs import CacheGeometry
from server.doctor.findings import Finding, error, ok, warning
from server.doctor.plan import NodePlan
from server.model.config import load_config
from server.model.draft import Draft, draft_of
from server.model.state import state_components
from server.model.tensor_files import TensorHeader, tensor_headers
from server.node.checks import check_model
from server.node.free_memory import free_memory
from server.sizes import size

LIBRARIES_NBYTES = 500 << 20
"""A node without weights and pools: Python, torch, Mooncake, the HTTP server."""
TIGHT = 0.9
"""A node that needs more than this part of what is free leaves too little for requests."""
_INTEGERS = ("I64", "I32")
"""Stored dtypes that no ``--dtype`` changes."""


@dataclass(frozen=True)
class NeededMemory:
    """Bytes of a node that is loaded."""

    weights: int
    pools: int

    @property
    def total(self) -> int:
        return self.weights + self.pools + LIBRARIES_NBYTES


def memory(plan: NodePlan, root: Path = Path("/")) -> Iterator[Finding]:
    """Needed against free memory of the CPU; a GPU's is compared where torch is (:mod:`.child`)."""
    subject, options = "memory", plan.options
    needed, free = needed_memory(plan), free_memory(root)
    n_own = needed.total if options.device == "cpu" else LIBRARIES_NBYTES
    parts = (
        f"{size(needed.weights)} weights, {size(needed.pools)} for {options.pages} pages and {options.slots} slots, "
        f"about {size(LIBRARIES_NBYTES)} libraries"
    )
    words = f"{size(n_own)} needed ({parts}), {size(free.nbytes)} free ({free.limit})"
    less = "give fewer --pages or --slots" + (", --dtype bfloat16" if options.dtype == "float32" else "")
    if n_own > free.nbytes:
        yield error(subject, f"{words}: {less}, or end something else")
    elif n_own > TIGHT * free.nbytes:
        yield warning(subject, f"{words}: little is left for requests; {less}")
    else:
        yield ok(subject, words)


def needed_memory(plan: NodePlan) -> NeededMemory:
    """From the headers of the files. Raises :class:`CheckpointError` and :class:`LayoutError`."""
    options = plan.options
    check_model(options.model)
    config, headers = load_config(options.model), tensor_headers(options.model)
    draft = kind_of_draft(headers) is Draft.NEXTN if plan.draft is None else plan.draft
    geometry = CacheGeometry(
        page_size=options.page_size,
        pages=options.pages + 1,
        slots=options.slots + 1,
        window=config.sliding_window,
        spec_tokens=plan.spec_tokens,
        components=state_components(
            config,
            options.dtype,
            plan.spec_tokens,
            draft=draft,
            kv_dtype=options.kv_dtype,
            index_dtype=options.index_dtype,
        ),
    )
    loaded = [header for header in headers if draft or not header.key.startswith("mtp.")]
    weights = sum(_loaded_nbytes(header, ITEMSIZE[options.dtype]) for header in loaded)
    return NeededMemory(weights, ArenaLayout.from_geometry(geometry).nbytes)


def _loaded_nbytes(header: TensorHeader, itemsize: int) -> int:
    """Of a tensor whose numbers take ``itemsize`` bytes: a byte of I8 holds two, a scale becomes part of its weight."""
    if header.dtype in _INTEGERS:
        return 8 * header.n_elements
    return {"I8": 2, "F8_E8M0": 0}.get(header.dtype, 1) * header.n_elements * itemsize


def kind_of_draft(headers: list[TensorHeader]) -> Draft:
    return draft_of(header.key for header in headers)
