"""Options that other machines see: keys, addresses, ports, and the prefill nodes of a decode node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator

from server.doctor.findings import Finding, error, ok, warning
from server.doctor.plan import NodePlan
from server.faults.spec import FaultSet
from server.node.checks import check_families, check_transfer_host, read_keys
from server.node.ports import take_port
from server.transfer.addresses import is_ipv6, join_address
from server.transfer.deadlines import parse_deadlines
from server.transfer.handshake import try_handshake


def options(plan: NodePlan) -> Iterator[Finding]:
    """What is only read when a node starts. Raises :class:`DeadlineError` and :class:`FaultError`."""
    parse_deadlines(plan.options.deadlines)
    FaultSet.parse(plan.options.faults, plan.role)
    if plan.options.faults:
        yield warning("faults", f"on purpose: {', '.join(plan.options.faults)}; without --fault none are injected")


def keys(plan: NodePlan) -> Iterator[Finding]:
    """Key files, and whether peers may be used without one. Raises :class:`AuthError`."""
    found = read_keys(plan.options)
    if plan.peers is not None:
        found.guard.check_peers(plan.peers)
        words = {
            "key": f"peers need the key in {plan.options.auth_key_file}",
            "loopback": "no key: only peers on this machine are taken",
        }
        if found.guard.rule in words:
            yield ok("peers' key", words[found.guard.rule])
        else:
            yield warning("peers' key", "--insecure: any machine may be a peer; give both nodes an --auth-key-file")
    if found.api_key is not None:
        yield ok("API key", "clients need it")
    elif plan.options.host in ("0.0.0.0", "::"):
        yield warning("API key", f"none, and --host {plan.options.host} lets everybody ask: give an --api-key-file")
    else:
        yield ok("API key", "none: whoever reaches the HTTP port may ask")


def addresses(plan: NodePlan) -> Iterator[Finding]:
    """IPv4 or IPv6, the same for all. Raises :class:`TransportMisconfigured`."""
    subject, host = "addresses", plan.options.transfer_host
    if plan.peers is None:
        yield ok(subject, f"{plan.options.host}; no peers")
        return
    check_transfer_host(plan.options)
    check_families(plan.options, plan.peers)
    if not is_ipv6(host):
        if "MC_USE_IPV6" in os.environ:
            yield error(subject, f"MC_USE_IPV6 is set, and then Mooncake cannot reach {host}: unset it")
        else:
            yield ok(subject, f"peers reach this node at {host} (IPv4; IPv6 is not needed)")
        return
    with socket.socket(socket.AF_INET6) as trial:
        try:
            trial.bind((host, 0))
        except OSError as reason:
            yield error(subject, f"{host} cannot be used ({reason.strerror}): is IPv6 on, and is it this machine's?")
        else:
            yield ok(subject, f"peers reach this node at {host} (IPv6)")


def ports(plan: NodePlan) -> Iterator[Finding]:
    """Whether the node could listen now; the ports are free again afterwards. Raises :class:`PortError`."""
    host = plan.options.host
    with contextlib.ExitStack() as taken:  # all at once: two that are one number are found out
        for port in plan.ports:
            taken.enter_context(take_port(host, port.number, port.option))
            where = join_address(host, port.number) if port.number else f"a port of {host}"
            yield ok("port", f"{where} is free ({port.option})")


def peers(plan: NodePlan) -> Iterator[Finding]:
    """Whether every prefill node that is named takes this one's connection and key."""
    guard = read_keys(plan.options).guard
    for address in plan.peers or ():
        trouble = asyncio.run(try_handshake(address, guard))
        if trouble is None:
            yield ok("peer", f"prefill {address} takes the connection")
        elif trouble.refused:
            yield error("peer", trouble.reason)
        else:
            yield warning(
                "peer", f"{trouble.reason}: start that node (until then answers are 503), or correct --prefill"
            )
