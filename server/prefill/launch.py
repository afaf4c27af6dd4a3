"""``launch_prefill``: the command line of the prefill node."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from server.model.loader import has_draft
from server.node.build import build_resources, check_model_and_transport, check_options
from server.node.cli import option, parse
from server.node.options import NodeOptions, http_port, port_number
from server.node.ports import take_ports
from server.node.run import run, serve
from server.prefill.node import PrefillNode, PrefillSettings

PROG = "launch_prefill"


@dataclass(frozen=True, kw_only=True)
class PrefillOptions(NodeOptions):
    """The options of a prefill node."""

    port: int = http_port(30000)
    bootstrap_port: int = option(
        "prefill", "port where decode nodes register and reserve (ZMQ; 0: any free one)", default=8998, type=port_number
    )
    draft: str | None = option(
        "draft",
        "compute the NextN draft's window state for decode nodes that speculate (default: on where there is one)",
        choices=("on", "off"),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a prefill node until a signal ends it; returns the exit code."""
    options = parse(PrefillOptions, PROG, "Computes prompts and pushes their state to decode nodes.", argv)
    return run(PROG, options, partial(_start, options))


async def _start(options: PrefillOptions) -> int:
    keys = check_options(options, peers=())
    http, bootstrap = take_ports(options.host, options.port, options.bootstrap_port)
    with http, bootstrap:
        transport = check_model_and_transport(options, with_peers=True)
        draft = has_draft(options.model) if options.draft is None else options.draft == "on"
        resources = build_resources("prefill", options, keys.guard, draft=draft)
        settings = PrefillSettings(
            **vars(resources.settings),
            bootstrap_host=options.host,
            bootstrap_port=bootstrap.getsockname()[1],
            bootstrap_listener=bootstrap,
            transport=transport,
        )
        node = PrefillNode(settings, resources.context)
        return await serve(node, resources.engine(node.on_engine_event), options, http, api_key=keys.api_key)


if __name__ == "__main__":
    sys.exit(main())
