"""Whether weights and pools fit into the memory that is free, for this process and in its control group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from server.cache.layout import ArenaLayout
from server.cache.specs import ITEMSIZE, CacheGeometry
from server.doctor.findings import Finding, error, ok, warning
from server.doctor.plan import NodePlan
from server.model.config import load_config
from server.model.draft import Draft, draft_of
from server.model.state import state_components
from server.model.tensor_files import TensorHeader, tensor_headers
from server.node.checks import check_model

LIBRARIES_NBYTES = 500 << 20
"""A node without weights and pools: Python, torch, Mooncake, the HTTP server."""
TIGHT = 0.9
"""A node that needs more than this part of what is free leaves too little for requests."""
_INTEGERS = ("I64", "I32")
"""Stored dtypes that no ``--dtype`` changes."""


@dataclass(frozen=True)
class FreeMemory:
    """``nbytes`` that this process may still take, and what sets that limit."""

    nbytes: int
    limit: str


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
        components=state_components(config, options.dtype, plan.spec_tokens, draft=draft),
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


def free_memory(root: Path = Path("/")) -> FreeMemory:
    """The least of what the machine and every control group above this process leave. ``root`` is of the file system.

    Raises :class:`OSError` where the system does not say (no Linux).
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    machine = FreeMemory(int(fields["MemAvailable"].split()[0]) << 10, "of this machine")
    return min([machine, *_of_control_groups(root)], key=lambda free: free.nbytes)


def _of_control_groups(root: Path) -> Iterator[FreeMemory]:
    """Version 2 (``0::/path``) and version 1 (``N:memory:/path``). Inside a container the path may be one of outside:
    then the group's own folder is the top one.
    """
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top = root / "sys/fs/cgroup/memory"
        else:
            continue
        own = top / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(top) and (free := _of_group(folder, *names)) is not None:
                yield FreeMemory(max(0, free), f"by the limit of the control group {folder.relative_to(root)}")


def _of_group(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    """Bytes below the limit of one group; None where it has none. Files in the page cache give way."""
    try:
        limit = (folder / limit_name).read_text().strip()
        if limit == "max":
            return None
        used = int((folder / usage_name).read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return int(limit) - used + int(counts.get(cache_name, 0))


def size(nbytes: int) -> str:
    """``1.5 GiB``, ``20 MiB``."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"
