"""``launch_prefill``: the command line of the prefill node."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from server.model.loader import has_draft
from server.node.build import check_model, check_transfer_host, lay_groundwork, prove_transport, read_keys, run
from server.node.options import NodeOptions, node_parser, port_number
from server.node.ports import take_ports
from server.node.run import serve
from server.prefill.node import PrefillNode, PrefillSettings
from server.transfer.engines.exposure import warn_of_data_plane

DEFAULT_PORT = 30000
DEFAULT_BOOTSTRAP_PORT = 8998


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a prefill node until it is told to stop; returns the exit code."""
    parser = node_parser(
        "launch_prefill", "Computes prompts and pushes their state to decode nodes.", port=DEFAULT_PORT
    )
    parser.add_argument_group("prefill").add_argument(
        "--bootstrap-port",
        type=port_number,
        default=DEFAULT_BOOTSTRAP_PORT,
        help="port where decode nodes register and reserve (ZMQ; 0: any free one)",
    )
    parser.add_argument_group("draft").add_argument(
        "--draft",
        choices=("on", "off"),
        help="compute the NextN draft's window state for decode nodes that speculate (default: on where there is one)",
    )
    args = parser.parse_args(argv)
    options = NodeOptions.from_namespace(args)

    async def start() -> int:
        check_transfer_host(options)
        keys = read_keys(options.security)
        http, bootstrap = take_ports(options.host, options.port, args.bootstrap_port)
        warn_of_data_plane()
        check_model(options.model)
        transport = prove_transport(options)
        draft = has_draft(options.model) if args.draft is None else args.draft == "on"
        ground = lay_groundwork("prefill", options, keys, draft=draft)
        settings = PrefillSettings(
            **ground.settings(),
            bootstrap_host=options.host,
            bootstrap_port=bootstrap.getsockname()[1],
            bootstrap_listener=bootstrap,
            transport=transport,
        )
        return await serve(PrefillNode(settings, ground.parts), ground, http)

    return run(parser.prog, options, start)


if __name__ == "__main__":
    sys.exit(main())
