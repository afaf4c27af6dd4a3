"""Ports of this machine for servers that are about to start."""

from __future__ import annotations

import socket

from server.transfer.addresses import family_of

HOST = "127.0.0.1"
_given: set[int] = set()


class PortTaken(Exception):
    """Nothing can listen on a port. The message says which, and the option that chooses another."""


def free_port(host: str = HOST) -> int:
    """A port that nobody listens on and that was not given out here before. Restarts on it work."""
    while True:
        with socket.socket(family_of(host)) as listener:
            listener.bind((host, 0))
            port = int(listener.getsockname()[1])
        if port not in _given:
            _given.add(port)
            return port


def free_ports(count: int, host: str = HOST) -> list[int]:
    """``count`` different ports, as :func:`free_port` draws them."""
    return [free_port(host) for _ in range(count)]


def require_free_port(host: str, port: int, purpose: str) -> None:
    """Raises :class:`PortTaken` if nothing can listen on the port."""
    with socket.socket(family_of(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortTaken(
                f"{purpose} port {host}:{port} cannot be used ({error.strerror}); "
                f"stop what uses it or choose another with --{purpose}-port"
            ) from error
