"""The ports of a node: taken before anything is loaded, so that a node that cannot have them fails at once."""

from __future__ import annotations

import errno
import itertools
import os
import socket
from pathlib import Path

from server.transfer.addresses import join_address
from server.transfer.engines.exposure import listening, sockets_of

BACKLOG = 64
"""Connections that wait while the node loads its checkpoint. They are answered when it serves."""
_COMMAND_WORDS, _COMMAND_CHARS = 3, 80


class PortError(Exception):
    """An address that cannot be listened on; names the option to change."""


def take_port(host: str, port: int, option: str) -> socket.socket:
    """A socket that listens on ``host`` and ``port``; ``option`` is the command line's name for the port.

    It listens at once: two sockets that are only bound may share a port, and the second would notice far too late.
    Who connects before the node serves waits for its answer. Raises :class:`PortError`.
    """
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise PortError(f"--host {host}: no such host ({getattr(error, 'strerror', None) or error})") from error
    listener = socket.socket(family, kind, number)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise PortError(_why_not(error, host, port, option)) from error
    return listener


def take_ports(host: str, port: int, bootstrap_port: int) -> tuple[socket.socket, socket.socket]:
    """The HTTP port and the bootstrap port of a prefill node. Raises :class:`PortError`."""
    if port == bootstrap_port != 0:
        raise PortError(f"--port and --bootstrap-port are both {port}: give them two different ports")
    http = take_port(host, port, "--port")
    try:
        return http, take_port(host, bootstrap_port, "--bootstrap-port")
    except PortError:
        http.close()
        raise


def url_of(listener: socket.socket) -> str:
    """``http://host:port``; an IPv6 address stands in brackets."""
    return f"http://{join_address(*listener.getsockname()[:2])}"


def _why_not(error: OSError, host: str, port: int, option: str) -> str:
    where = join_address(host, port)
    match error.errno:
        case errno.EADDRINUSE:
            return f"{option} {port} is in use on {host}{_by_whom(port)}: stop that or choose another {option}"
        case errno.EADDRNOTAVAIL:
            return f"--host {host} is not an address of this machine"
        case errno.EACCES:
            return f"cannot listen on {where} ({error.strerror}): choose a {option} from 1024 on"
        case _:
            return f"cannot listen on {where} ({error.strerror}): see --host and {option}"


def _by_whom(port: int) -> str:
    """`` by launch_decode (pid 17)``, or nothing where that cannot be seen (Linux; processes of the same user)."""
    try:
        wanted = {name for _, number, name in listening() if number == port}
        for process in Path("/proc").glob("[0-9]*"):
            if wanted & sockets_of(process):
                if process.name == str(os.getpid()):
                    return " by this node itself"
                return f" by {_command(process)} (pid {process.name})"
    except OSError:
        pass
    return ""


def _command(process: Path) -> str:
    """Its first words, such as ``python launch_decode``. Never an option: those may be secret."""
    words = (process / "cmdline").read_bytes().decode("utf-8", "replace").rstrip("\0").split("\0")
    plain = list(itertools.takewhile(lambda word: word == "-m" or not word.startswith("-"), words[:_COMMAND_WORDS]))
    return " ".join(word.rsplit("/", 1)[-1] for word in plain)[:_COMMAND_CHARS]
