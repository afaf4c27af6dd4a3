"""``launch_decode``: the command line of the decode node."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from server.cache.specs import DRAFT
from server.decode.node import DecodeNode
from server.decode.settings import DecodeSettings
from server.node.build import (
    check_families,
    check_model,
    check_transfer_host,
    lay_groundwork,
    prove_transport,
    read_keys,
    run,
)
from server.node.options import NodeOptions, node_parser, peer_address
from server.node.ports import take_port
from server.node.run import serve
from server.transfer.engines.exposure import warn_of_data_plane

DEFAULT_PORT = 30001
MAX_SPEC_TOKENS = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a decode node until it is told to stop; returns the exit code."""
    parser = node_parser(
        "launch_decode", "Takes prompts' state from prefill nodes, decodes, and serves the API.", port=DEFAULT_PORT
    )
    where = parser.add_argument_group("prefill").add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--prefill",
        action="append",
        type=peer_address,
        metavar="HOST:BOOTSTRAP_PORT",
        help="a prefill node to take state from (repeatable); an IPv6 address stands in brackets",
    )
    where.add_argument("--local-prefill", action="store_true", help="compute prompts here, without any peer")
    speculation = parser.add_argument_group("speculative decoding")
    speculation.add_argument(
        "--spec-tokens",
        type=int,
        choices=range(MAX_SPEC_TOKENS + 1),
        default=0,
        metavar="K",
        help=f"draft tokens of one step, 0 .. {MAX_SPEC_TOKENS}; 0 decodes without a draft",
    )
    speculation.add_argument(
        "--draft-state",
        choices=("transfer", "recompute"),
        default="transfer",
        help="transfer: take the draft's window from the prefill node, refuse one that has none; recompute: start the "
        "draft cold after every prompt (right answers, fewer accepted tokens at first)",
    )
    args = parser.parse_args(argv)
    options = NodeOptions.from_namespace(args)
    peers = None if args.local_prefill else tuple(args.prefill)

    async def start() -> int:
        keys = read_keys(options.security)
        if peers is not None:
            check_transfer_host(options)
            check_families(options, peers)
            keys.guard.check_peers(peers)
        http = take_port(options.host, options.port, "--port")
        if peers is not None:
            warn_of_data_plane()
        check_model(options.model)
        if peers is not None:
            prove_transport(options)
        k, cold = args.spec_tokens, args.draft_state == "recompute"
        ground = lay_groundwork("decode", options, keys, draft=k > 0, spec_tokens=k)
        own = frozenset({DRAFT}) if cold else frozenset()
        settings = DecodeSettings(**ground.settings(), prefill=peers, own_components=own)
        return await serve(DecodeNode(settings, ground.parts), ground, http, spec_tokens=k, cold_draft=cold)

    return run(parser.prog, options, start)


if __name__ == "__main__":
    sys.exit(main())
