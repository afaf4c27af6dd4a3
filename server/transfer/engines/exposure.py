"""What the data plane does not protect, logged at every start, with the ports in use; and who listens on a port."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

_LISTEN = "0A"
_WILDCARDS = ("0" * 8, "0" * 32)


def warn_of_data_plane() -> None:
    """Logs the warning that no option of a node makes unnecessary."""
    lowest, highest = os.environ.get("MC_MIN_RPC_PORT", "15000"), os.environ.get("MC_MAX_RPC_PORT", "17000")
    log.warning(
        "the data plane is not protected: Mooncake listens on all interfaces whatever --host is (ports %s to %s), and "
        "whoever reaches one can read and overwrite this node's state, key or no key. Close these ports to all but the "
        "peers: a firewall, a network namespace, or an internal network of their own",
        lowest,
        highest,
    )


def ports_on_all_interfaces() -> list[int]:
    """TCP ports on which this process listens for the whole network (Linux; empty where it cannot be known)."""
    own = sockets_of(Path("/proc/self"))
    try:
        return sorted({port for address, port, name in listening() if address in _WILDCARDS and name in own})
    except OSError:
        return []


def listening() -> list[tuple[str, int, str]]:
    """Every TCP socket that listens: its address (hex), port and name, as in :func:`sockets_of`. Raises OSError."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN:
                address, _, port = fields[1].rpartition(":")
                found.append((address, int(port, 16), f"socket:[{fields[9]}]"))
    return found


def sockets_of(process: Path) -> set[str]:
    """The names of the open files of a process, sockets among them; ``process`` is its folder in ``/proc``."""
    found = set()
    with contextlib.suppress(OSError):  # another user's
        for fd in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                found.add(os.readlink(fd))
    return found
