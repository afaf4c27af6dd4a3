"""The options of a decode node."""

from __future__ import annotations

from dataclasses import dataclass

from server.node.cli import OneOf, option
from server.node.options import NodeOptions, http_port, peer_address

MAX_SPEC_TOKENS = 8
PREFILL = OneOf("prefill", required=True, unless="doctor")


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(NodeOptions):
    """The options of a decode node. ``prefill`` is empty with ``local_prefill``."""

    port: int = http_port(30001)
    prefill: tuple[str, ...] = option(
        PREFILL,
        "a prefill node to take state from (repeatable); an IPv6 address stands in brackets",
        default=(),
        type=peer_address,
        metavar="HOST:BOOTSTRAP_PORT",
    )
    local_prefill: bool = option(PREFILL, "compute prompts here, without any peer", default=False)
    spec_tokens: int = option(
        "speculative decoding",
        f"draft tokens of one step, 0 .. {MAX_SPEC_TOKENS}; 0 decodes without a draft",
        default=0,
        type=int,
        choices=range(MAX_SPEC_TOKENS + 1),
        metavar="K",
    )
    draft_state: str = option(
        "speculative decoding",
        "transfer: take the draft's window from the prefill node, refuse one that has none; recompute: start the draft "
        "cold after every prompt (right answers, fewer accepted tokens at first)",
        default="transfer",
        choices=("transfer", "recompute"),
    )
