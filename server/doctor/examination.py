"""Runs every check, each with a deadline, and prints what it found."""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from server.doctor import checkpoint, child, machine, memory, network
from server.doctor.findings import Finding, Level, error
from server.doctor.plan import NodePlan
from server.node.run import STARTUP_ERRORS


@dataclass(frozen=True)
class Check:
    """``find`` may take ``deadline_s`` seconds; what it raises is an error of ``subject``."""

    subject: str
    find: Callable[[NodePlan], Iterable[Finding]]
    deadline_s: float = 10.0


CHECKS = (
    Check("packages", machine.packages),
    Check("libraries", machine.libraries),
    Check("compiler", machine.compiler),
    Check("open files", machine.open_files),
    Check("options", network.options),
    Check("keys", network.keys),
    Check("addresses", network.addresses),
    Check("ports", network.ports),
    Check("checkpoint", checkpoint.files, 60.0),
    Check("torch", child.compute, 4 * child.TIMEOUT_S + 5),
    Check("memory", memory.memory, 60.0),
    Check("mooncake", machine.mooncake),
    Check("transfer", child.transfer, child.TIMEOUT_S + 5),
    Check("peers", network.peers, 30.0),
)


def examine(plan: NodePlan, checks: Sequence[Check] = CHECKS) -> int:
    """Prints a line for every finding as soon as it is known, or, with ``--doctor json``, one document at the end.

    The exit code: 0, or 1 if there is an error.
    """
    findings, form = [], plan.options.doctor
    for finding in _all(plan, checks):
        findings.append(finding)
        if form == "text":
            _print(finding.as_text())
    n_errors, n_warnings = (sum(f.level is level for f in findings) for level in (Level.ERROR, Level.WARNING))
    if form == "text":
        outcome = "this node would not work" if n_errors else "this node can start"
        _print(f"\n{_count(n_errors, 'error')}, {_count(n_warnings, 'warning')}: {outcome}")
    else:
        _print(json.dumps({"ok": not n_errors, "findings": [asdict(f) for f in findings]}, indent=2))
    return 1 if n_errors else 0


def _all(plan: NodePlan, checks: Sequence[Check]) -> Iterator[Finding]:
    for check in checks:
        yield from run_check(check, plan)


def run_check(check: Check, plan: NodePlan) -> list[Finding]:
    """What ``check`` finds. A thread that does not come to its end is left behind: it does not keep the process."""
    found: queue.SimpleQueue[list[Finding]] = queue.SimpleQueue()
    threading.Thread(target=lambda: found.put(_find(check, plan)), name=check.subject, daemon=True).start()
    try:
        return found.get(timeout=check.deadline_s)
    except queue.Empty:
        words = f"no answer within {check.deadline_s:g} s: a disk or a host that does not answer?"
        return [error(check.subject, words)]


def _find(check: Check, plan: NodePlan) -> list[Finding]:
    try:
        return list(check.find(plan))
    except STARTUP_ERRORS as reason:
        return [error(check.subject, str(reason))]
    except Exception as reason:  # noqa: BLE001  (whatever a library raises is a finding)
        return [error(check.subject, f"{type(reason).__name__}: {reason}")]


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
