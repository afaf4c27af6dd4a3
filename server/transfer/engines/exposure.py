"""What the data plane does not protect, said at every start, with the ports in use."""

from __future__ import annotations

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
    try:
        sockets = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
        lines = [
            line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()
        ]
    except OSError:
        return []
    listening = [line for line in lines if len(line) > 9 and line[3] == _LISTEN and f"socket:[{line[9]}]" in sockets]
    ends = [line[1].split(":") for line in listening]
    return sorted({int(port, 16) for address, port in ends if address in _WILDCARDS})
