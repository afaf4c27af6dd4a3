"""What is to be examined: the node that a command line describes."""

from __future__ import annotations

from dataclasses import dataclass

from server.node.options import NodeOptions


@dataclass(frozen=True)
class Port:
    """A port that the node will listen on; ``option`` is its name on the command line, ``number`` 0 any free one."""

    option: str
    number: int


@dataclass(frozen=True)
class NodePlan:
    """A node as it would be started. ``peers`` are the prefill nodes that it would connect to; None: there is no
    transport. ``draft`` None loads a draft layer where the checkpoint has one.
    """

    role: str
    options: NodeOptions
    ports: tuple[Port, ...]
    peers: tuple[str, ...] | None
    draft: bool | None
    spec_tokens: int = 0
