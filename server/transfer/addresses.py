"""``host:port`` as text, with IPv6 addresses in brackets: ``127.0.0.1:8998``, ``[::1]:8998``."""

from __future__ import annotations

import socket


def join_address(host: str, port: int) -> str:
    """As it stands in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host without brackets, and port. Raises :class:`ValueError`."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_ipv6(host: str) -> bool:
    """Whether it is an IPv6 address, bare or in brackets. Names are not looked up: they stand for IPv4 addresses."""
    return ":" in host


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if is_ipv6(host) else socket.AF_INET
