"""The options of a prefill node."""

from __future__ import annotations

from dataclasses import dataclass

from server.node.cli import option
from server.node.options import NodeOptions, count, http_port, port_number


@dataclass(frozen=True, kw_only=True)
class PrefillOptions(NodeOptions):
    """The options of a prefill node."""

    port: int = http_port(30000)
    bootstrap_port: int = option(
        "prefill", "port where decode nodes register and reserve (ZMQ; 0: any free one)", default=8998, type=port_number
    )
    snapshot_every: int = option(
        "prefill",
        "pages between snapshots of a prompt's state, beside those where prompts end and part (0: only those)",
        default=8,
        type=count,
        metavar="PAGES",
    )
    draft: str | None = option(
        "draft",
        "compute the NextN draft's window state for decode nodes that speculate (default: on where there is one)",
        choices=("on", "off"),
    )
