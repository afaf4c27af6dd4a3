"""Servers in processes of their own: started, waited for, given faults, measured and stopped, for tools and tests.

Everything here is synchronous. Coroutines call what waits (HTTP, an orderly end) with ``asyncio.to_thread``.
"""

from cluster.node import BIN, LOGS, ROOT, ClusterFailed, Node, Resources
from cluster.nodes import Cluster, Pair
from cluster.ports import HOST, PortTaken, free_port, free_ports, require_free_port
from cluster.signals import StopRequested, StopSignals
from cluster.wait import nothing_left, until, until_async

__all__ = [
    "BIN",
    "HOST",
    "LOGS",
    "ROOT",
    "Cluster",
    "ClusterFailed",
    "Node",
    "Pair",
    "PortTaken",
    "Resources",
    "StopRequested",
    "StopSignals",
    "free_port",
    "free_ports",
    "nothing_left",
    "require_free_port",
    "until",
    "until_async",
]
