"""Checks that load native code, each in a process of its own: what hangs or crashes there is a finding, not the end.

What the process does is in :mod:`.trials`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

from server.doctor.findings import Finding, Level, error
from server.doctor.memory import has_draft_layer, needed_memory
from server.doctor.plan import NodePlan
from server.model.tensor_files import tensor_headers
from server.node.checks import check_model

TIMEOUT_S = 60.0
_MAX_WORDS_CHARS = 400


def torch(plan: NodePlan) -> list[Finding]:
    """Whether torch can be imported and has the device, with memory for this node if that is a GPU."""
    options = plan.options
    needed = 0
    if options.device == "cuda":
        parts = needed_memory(plan)
        needed = parts.weights + parts.pools
    return ask("torch", {"device": options.device, "needed": needed})


def kernels(plan: NodePlan) -> list[Finding]:
    """Which implementation of the network would compute, and for which instruction set it is built."""
    return ask("kernels", {"kernels": plan.options.kernels, "device": plan.options.device})


def tensors(plan: NodePlan) -> list[Finding]:
    """Whether every tensor is there in the shape that ``config.json`` asks for."""
    model, draft = plan.options.model, plan.draft
    check_model(model)
    if draft is None:
        draft = has_draft_layer(tensor_headers(model))
    return ask("tensors", {"model": str(model), "draft": draft})


def transfer(plan: NodePlan) -> list[Finding]:
    """Whether Mooncake really moves bytes from one endpoint on this machine to another."""
    if plan.peers is None:
        return []
    return ask("transfer", {"host": plan.options.transfer_host, "transport": plan.options.transport})


def ask(trial: str, request: dict[str, Any], timeout_s: float = TIMEOUT_S) -> list[Finding]:
    """What :mod:`.trials` finds; an error if it has no answer."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "server.doctor.trials", trial],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [error(trial, f"no answer within {timeout_s:g} s: a library hangs while it is loaded or used")]
    if done.returncode == 0:
        return [Finding(Level(f["level"]), f["subject"], f["words"]) for f in json.loads(done.stdout)]
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:_MAX_WORDS_CHARS]
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return [error(trial, f"the process that tried it was ended by {name} ({last}): a build for another CPU?")]
    return [error(trial, f"the process that tried it ended with {done.returncode}: {last}")]
