"""The files of the checkpoint: there, and complete. What is in them is looked at in :mod:`.trials`."""

from __future__ import annotations

from collections.abc import Iterator

from server.doctor.findings import Finding, ok
from server.doctor.memory import has_draft_layer
from server.doctor.plan import NodePlan
from server.model.config import load_config
from server.model.tensor_files import tensor_headers
from server.node.checks import check_model
from server.sizes import size


def files(plan: NodePlan) -> Iterator[Finding]:
    """``config.json`` and the headers of the weight files. Raises :class:`CheckpointError`."""
    model = plan.options.model
    check_model(model)
    config = load_config(model)
    headers = tensor_headers(model)
    paths = {header.file for header in headers}
    words = f"{model}: {config.num_hidden_layers} layers, {len(headers)} tensors"
    draft = "with a draft layer" if has_draft_layer(headers) else "no draft layer"
    yield ok("checkpoint", f"{words}, {size(sum(path.stat().st_size for path in paths))}, {draft}")
