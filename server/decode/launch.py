"""``launch_decode``: the command line of the decode node."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from server.decode.options import DecodeOptions
from server.node.checks import check_model_and_transport, check_options
from server.node.cli import parse
from server.node.ports import take_port
from server.node.run import run

PROG = "launch_decode"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a decode node until a signal ends it; returns the exit code."""
    options = parse(DecodeOptions, PROG, "Takes prompts' state from prefill nodes, decodes, and serves the API.", argv)
    if options.doctor:
        return _doctor(options)
    return run(PROG, options, partial(_start, options))


def _doctor(options: DecodeOptions) -> int:
    from server.doctor.examination import examine
    from server.doctor.plan import NodePlan, Port

    ports = (Port("--port", options.port),)
    peers = None if options.local_prefill else options.prefill
    return examine(NodePlan("decode", options, ports, peers, options.spec_tokens > 0, options.spec_tokens))


async def _start(options: DecodeOptions) -> int:
    peers = None if options.local_prefill else options.prefill
    keys = check_options(options, peers)
    with take_port(options.host, options.port, "--port") as http:
        check_model_and_transport(options, with_peers=peers is not None)
        from server.decode.start import load_and_serve  # imports torch

        return await load_and_serve(options, keys, peers, http)
