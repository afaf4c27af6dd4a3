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
    if options.doctor:
        return _doctor(options)
    return run(PROG, options, partial(_start, options))


def _doctor(options: PrefillOptions) -> int:
    from server.doctor.examination import examine
    from server.doctor.plan import NodePlan, Port

    ports = (Port("--port", options.port), Port("--bootstrap-port", options.bootstrap_port))
    draft = None if options.draft is None else options.draft == "on"
    return examine(NodePlan("prefill", options, ports, (), draft))


async def _start(options: PrefillOptions) -> int:
    keys = check_options(options, peers=())
    http, bootstrap = take_ports(options.host, options.port, options.bootstrap_port)
    with http, bootstrap:
        transport = check_model_and_transport(options, with_peers=True)
        from server.prefill.start import load_and_serve  # imports torch

        return await load_and_serve(options, keys, http, bootstrap, transport)
