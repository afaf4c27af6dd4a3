"""The files of the checkpoint: there, and complete. What is in them is looked at in :mod:`.trials`."""

from __future__ import annotations

from collections.abc import Iterator

from server.doctor.findings import Finding, ok
from server.doctor.memory import kind_of_draft
from server.doctor.plan import NodePlan
from server.model.config import Quantization, load_config
from server.model.draft import Draft
from server.model.tensor_files import tensor_headers
from server.node.checks import check_model
from server.sizes import size

DRAFTS = {
    Draft.NONE: "no draft layer",
    Draft.NEXTN: "with a draft layer",
    Draft.DSPARK: "with a DSpark draft, which is not loaded",
    Draft.OTHER: "with draft tensors that are no single NextN layer, which are not loaded",
}


def files(plan: NodePlan) -> Iterator[Finding]:
    """``config.json`` and the headers of the weight files. Raises :class:`CheckpointError`."""
    model = plan.options.model
    check_model(model)
    config = load_config(model)
    headers = tensor_headers(model)
    paths = {header.file for header in headers}
    draft = kind_of_draft(headers)
    words = f"{model}: {config.num_hidden_layers} layers, {len(headers)} tensors{_quantized(config.quantization)}"
    yield ok("checkpoint", f"{words}, {size(sum(path.stat().st_size for path in paths))}, {DRAFTS[draft]}")


def _quantized(stored: Quantization) -> str:
    if not stored.linears:
        return ""
    experts = f" and {stored.experts or 'plain'} experts" if stored.experts_stated else ""
    return f" with {stored.linears} weights{experts}"
