"""Checks that load native code, in a process of their own: what hangs or crashes there is a finding, not the end.

What the process does is in :mod:`.trials`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from server.cache.specs import LayoutError
from server.doctor.findings import Finding, Level, error
from server.doctor.memory import needed_memory
from server.doctor.plan import NodePlan
from server.model.config import CheckpointError

TIMEOUT_S = 60.0
_MAX_WORDS_CHARS = 400


def compute(plan: NodePlan) -> Iterator[Finding]:
    """torch and the device, kernels, tensors and tokenizer: all of them import torch, which takes seconds."""
    options = plan.options
    request = {
        "model": str(options.model),
        "device": options.device,
        "kernels": options.kernels,
        "numerics": options.numerics,
        "draft": plan.draft,
        "chat": [options.chat_format, options.tool_parser, options.reasoning_parser],
        "device_nbytes": _on_device(plan),
    }
    return ask(("torch", "kernels", "tensors", "tokenizer"), request)


def _on_device(plan: NodePlan) -> int:
    """Bytes that the node needs on a GPU; 0 without one, or for a checkpoint that cannot say it: others report that."""
    if plan.options.device == "cpu":
        return 0
    try:
        needed = needed_memory(plan)
    except (CheckpointError, LayoutError):
        return 0
    return needed.weights.loaded + needed.pools


def transfer(plan: NodePlan) -> Iterator[Finding]:
    """Whether Mooncake really moves bytes from one endpoint on this machine to another."""
    if plan.peers is not None:
        options = plan.options
        request = {"host": options.transfer_host, "transport": options.transport, "device": options.device}
        yield from ask(("transfer",), request)


def ask(trials: Sequence[str], request: dict[str, Any], timeout_s: float = TIMEOUT_S) -> Iterator[Finding]:
    """Findings of each trial. One that has no answer within ``timeout_s`` or ends its process is an error; those after
    it are made in another.
    """
    while trials:
        found, trouble = _run(trials, request, timeout_s)
        for findings in found:
            yield from findings
        trials = trials[len(found) :]
        if trials:
            yield error(trials[0], trouble)
            trials = trials[1:]


def _run(trials: Sequence[str], request: dict[str, Any], timeout_s: float) -> tuple[list[list[Finding]], str]:
    """The findings of each trial that one process came to, and what was wrong with it if these are not all."""
    command = [sys.executable, "-m", "server.doctor.trials", *trials]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        try:
            stdout, stderr = process.communicate(json.dumps(request).encode(), timeout_s)
            trouble = _why(process.returncode, stderr)
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, _ = process.communicate()
            trouble = f"no answer within {timeout_s:g} s: a library hangs while it is loaded or used"
    return [[_finding(each) for each in json.loads(line)] for line in stdout.splitlines()], trouble


def _finding(fields: dict[str, str]) -> Finding:
    return Finding(Level(fields["level"]), fields["subject"], fields["words"])


def _why(returncode: int, stderr: bytes) -> str:
    last = (stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1][:_MAX_WORDS_CHARS]
    if returncode < 0:
        name = signal.Signals(-returncode).name
        return f"the process that tried it was ended by {name} ({last}): a build for another CPU?"
    return f"the process that tried it ended with {returncode}: {last}"
