"""``launch_prefill``: the command line of the prefill node."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from server.node.checks import check_model_and_transport, check_options
from server.node.cli import parse
from server.node.ports import take_ports
from server.node.run import run
from server.prefill.options import PrefillOptions

PROG = "launch_prefill"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a prefill node until a signal ends it; returns the exit code."""
    options = parse(PrefillOptions, PROG, "Computes prompts and pushes their state to decode nodes.", argv)
    return run(PROG, options, partial(_start, options))


async def _start(options: PrefillOptions) -> int:
    keys = check_options(options, peers=())
    http, bootstrap = take_ports(options.host, options.port, options.bootstrap_port)
    with http, bootstrap:
        transport = check_model_and_transport(options, with_peers=True)
        from server.prefill.start import load_and_serve  # imports torch

        return await load_and_serve(options, keys, http, bootstrap, transport)
