"""Real nodes for the length of a block or a fixture: ended, by pid, on every way out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from cluster import HOST, Cluster, Node, Pair

END_S = 20.0
DRAIN_S = 1.0
"""A test that is over waits no longer for what is under way."""
SLOW_MODEL = ("--kernels", "python")
"""For tests that meet requests on their way: with the kernels a long prompt is over before a signal comes."""


@contextlib.contextmanager
def process_pair(
    directory: Path, prefill: Sequence[str] = (), decode: Sequence[str] = (), host: str = HOST
) -> Iterator[Pair]:
    """A pair that serves; ``prefill`` and ``decode`` are further options."""
    pair = Pair(directory, prefill, decode, host=host)
    try:
        pair.heal()
        yield pair
    finally:
        pair.stop(END_S, DRAIN_S)


@contextlib.contextmanager
def running_node(node: Node, wrapper: Sequence[str] = (), output: int | None = None) -> Iterator[Node]:
    """One node, which is not awaited. ``wrapper`` and ``output`` are those of :meth:`cluster.Node.start`."""
    try:
        node.start(wrapper=wrapper, output=output)
        yield node
    finally:
        Cluster([node]).stop(END_S, DRAIN_S)
