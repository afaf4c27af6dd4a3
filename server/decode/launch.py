"""``launch_decode``: the command line of the decode node."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from server.cache.specs import DRAFT
from server.decode.node import DecodeNode
from server.decode.settings import DecodeSettings
from server.node.build import build_resources, check_model_and_transport, check_options
from server.node.cli import OneOf, option, parse
from server.node.options import NodeOptions, http_port, peer_address
from server.node.ports import take_port
from server.node.run import run, serve

PROG = "launch_decode"
MAX_SPEC_TOKENS = 8
PREFILL = OneOf("prefill", required=True)


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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a decode node until a signal ends it; returns the exit code."""
    options = parse(DecodeOptions, PROG, "Takes prompts' state from prefill nodes, decodes, and serves the API.", argv)
    return run(PROG, options, partial(_start, options))


async def _start(options: DecodeOptions) -> int:
    peers = None if options.local_prefill else options.prefill
    keys = check_options(options, peers)
    with take_port(options.host, options.port, "--port") as http:
        check_model_and_transport(options, with_peers=peers is not None)
        k, cold = options.spec_tokens, options.draft_state == "recompute"
        resources = build_resources("decode", options, keys.guard, draft=k > 0, spec_tokens=k)
        own = frozenset({DRAFT}) if cold else frozenset()
        settings = DecodeSettings(**vars(resources.settings), prefill=peers, own_components=own)
        node = DecodeNode(settings, resources.context)
        engine = resources.engine(node.on_engine_event, cold_draft=cold)
        return await serve(node, engine, options, http, api_key=keys.api_key)


if __name__ == "__main__":
    sys.exit(main())
