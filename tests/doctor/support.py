"""A plan of a node that would work here, and changes of it."""

from __future__ import annotations

from typing import Any

from server.decode.options import DecodeOptions
from server.doctor.findings import Finding, Level
from server.doctor.plan import NodePlan, Port


def plan_of(
    *, peers: tuple[str, ...] | None = (), ports: tuple[Port, ...] = (), draft: bool | None = None, **options: Any
) -> NodePlan:
    """A decode node with the bundled checkpoint; ``options`` are fields of its command line."""
    return NodePlan("decode", DecodeOptions(**options), ports, peers, draft)


def only_error(findings: list[Finding]) -> str:
    """The words of the one finding, which is an error."""
    (finding,) = findings
    assert finding.level is Level.ERROR, finding
    return finding.words


def levels(findings: list[Finding]) -> list[Level]:
    return [finding.level for finding in findings]
