"""Whether weights and pools fit into the memory that is free, for this process and in its control group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from server.doctor.findings import Finding, error, ok, warning
from server.doctor.plan import NodePlan
from server.model.config import load_config
from server.model.draft import Draft, draft_of
from server.model.tensor_files import TensorHeader, tensor_headers
from server.node.checks import check_model
from server.node.free_memory import FreeMemory, free_memory
from server.node.memory_plan import LIBRARIES_NBYTES, MemoryPlan, less_memory, packed_memory, plan_memory
from server.sizes import size

TIGHT = 0.9
"""A node that needs more than this part of what is free leaves too little for requests."""


def memory(plan: NodePlan, root: Path = Path("/")) -> Iterator[Finding]:
    """Needed against free memory of the CPU; a GPU's is compared where torch is (:mod:`.child`)."""
    subject, options, free = "memory", plan.options, free_memory(root)
    if options.device != "cpu":
        n_own, parts = LIBRARIES_NBYTES, "libraries; weights and pools are on the GPU"
    else:
        needed = needed_memory(plan, free if options.memory else None)
        n_own, parts = needed.total, needed.parts()
    words = f"{size(n_own)} needed ({parts}), {size(free.nbytes)} free ({free.limit})"
    if n_own > free.nbytes:
        yield error(subject, f"{words}: {less_memory(options)}, or end something else")
    elif n_own > TIGHT * free.nbytes:
        yield warning(subject, f"{words}: little is left for requests; {less_memory(options)}")
    else:
        yield ok(subject, words)


def needed_memory(plan: NodePlan, free: FreeMemory | None = None) -> MemoryPlan:
    """By the config, and the headers of the files where only they say whether there is a draft layer; ``free`` is what
    ``--memory`` is a part of. Raises :class:`CheckpointError` and :class:`LayoutError`.
    """
    options = plan.options
    check_model(options.model)
    config, draft = load_config(options.model), plan.draft
    if draft is None:
        draft = kind_of_draft(tensor_headers(options.model)) is Draft.NEXTN
    budget = packed_memory(options, free or free_memory())
    return plan_memory(
        config,
        options,
        free,
        draft=draft,
        spec_tokens=plan.spec_tokens,
        packed_memory=budget,
        takes_snapshots=plan.role == "prefill",
    )


def kind_of_draft(headers: list[TensorHeader]) -> Draft:
    return draft_of(header.key for header in headers)
