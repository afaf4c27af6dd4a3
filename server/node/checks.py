"""From options to what can be known before anything is loaded: keys, addresses, the directory, the transport.

It imports no torch, which takes seconds.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from server.model.config import CheckpointError
from server.node.options import NodeOptions
from server.transfer.addresses import is_ipv6, split_address
from server.transfer.auth import AuthError, Guard, read_secret
from server.transfer.engines.base import TransferEngine, TransportMisconfigured
from server.transfer.engines.exposure import warn_of_data_plane
from server.transfer.engines.mooncake import (
    WHEEL_WITH_CUDA,
    WHEEL_WITHOUT_CUDA,
    MooncakeEngine,
    Wheel,
    installed_wheel,
)
from server.transfer.manifest import TransportIdentity

MIN_API_KEY_CHARS = 8
_WILDCARDS = ("0.0.0.0", "::", "")


class DeviceUnavailable(Exception):
    """``--device`` names what this machine, this build of torch, or this build of Mooncake does not have."""


@dataclass(frozen=True)
class Keys:
    """Who may use the node: ``api_key`` is what clients need, if any; ``guard`` is the rule for peers."""

    api_key: str | None = None
    guard: Guard = field(default_factory=Guard)


def check_options(options: NodeOptions, peers: Sequence[str] | None) -> Keys:
    """Before a port is taken: the keys, and the addresses of a node with ``peers`` (None: there will never be any).

    Raises :class:`AuthError`, :class:`CheckpointError` or :class:`TransportMisconfigured`.
    """
    keys = read_keys(options)
    check_weights(options)
    if peers is not None:
        check_transfer_host(options)
        check_families(options, peers)
        keys.guard.check_peers(peers)
    return keys


def check_model_and_transport(options: NodeOptions, *, with_peers: bool) -> TransportIdentity | None:
    """Before anything is loaded: the directory, and what the transport says of itself where there are peers.

    Raises :class:`CheckpointError`, :class:`DeviceUnavailable` or :class:`TransferError`.
    """
    if with_peers:
        check_wheel(options.device)
        warn_of_data_plane()
    check_model(options.model)
    return TransportIdentity.of_new(transport_factory(options)) if with_peers else None


def read_keys(options: NodeOptions) -> Keys:
    """The keys of the options and of their files. Raises :class:`AuthError` for what protects nothing."""
    api_key = options.api_key
    if options.api_key_file is not None:
        api_key = read_secret(options.api_key_file, min_chars=MIN_API_KEY_CHARS)
    if api_key is not None and len(api_key) < MIN_API_KEY_CHARS:
        raise AuthError(f"--api-key has {len(api_key)} characters, at least {MIN_API_KEY_CHARS} are needed")
    return Keys(api_key, Guard.from_options(options.auth_key_file, insecure=options.insecure))


def check_weights(options: NodeOptions) -> None:
    """Refuses what cannot be of where weights are. Raises :class:`CheckpointError`."""
    if options.weights != "packed" and options.weights_memory is not None:
        raise CheckpointError("--weights-memory is for --weights packed: dequantized weights are in memory as a whole")
    if options.weights == "packed" and options.device != "cpu":
        raise CheckpointError(f"--weights packed is computed on the CPU, not with --device {options.device}")


def check_transfer_host(options: NodeOptions) -> None:
    """Refuses a wildcard address, at which no peer can find the node, and a host that does not exist.

    Raises :class:`TransportMisconfigured`.
    """
    host = options.transfer_host
    if host in _WILDCARDS:
        raise TransportMisconfigured(f"no peer can write to {host}: give --transfer-host the address of this node")
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        option = "--host" if host == options.host else "--transfer-host"
        raise TransportMisconfigured(f"{option} {host}: no such host ({error})") from error


def check_families(options: NodeOptions, peers: Sequence[str]) -> None:
    """Mooncake speaks IPv4 or IPv6, not both: a pair's addresses must be of one kind. Names stand for IPv4 addresses.

    Raises :class:`TransportMisconfigured`.
    """
    for peer in peers:
        if is_ipv6(split_address(peer)[0]) != is_ipv6(options.transfer_host):
            raise TransportMisconfigured(
                f"prefill {peer} and this node's own {options.transfer_host} (--host or --transfer-host) are an IPv4 "
                "and an IPv6 address: Mooncake speaks one of the two, so give both nodes addresses of the same kind"
            )


def check_model(model: Path) -> None:
    """Refuses, before anything else is read, a ``--model`` that is no directory. Raises :class:`CheckpointError`."""
    if not model.exists():
        raise CheckpointError(
            f"--model {model}: there is no such directory (a checkpoint is read from this machine, not from a hub)"
        )
    if not model.is_dir():
        raise CheckpointError(f"--model {model} is a file: give the directory of a checkpoint")


def check_device(device: str) -> None:
    """Refuses a device that torch does not have. Raises :class:`DeviceUnavailable`. Imports torch if it is a GPU."""
    if device == "cpu":
        return
    import torch

    if torch.version.cuda is None:
        raise DeviceUnavailable(
            f"--device {device}: this torch ({torch.__version__}) is built without CUDA: install its CUDA build, or "
            "give --device cpu"
        )
    if not torch.cuda.is_available():
        raise DeviceUnavailable(
            f"--device {device}: torch sees no GPU: is the driver there (nvidia-smi), and CUDA_VISIBLE_DEVICES right?"
        )
    n_devices = torch.cuda.device_count()
    if (torch.device(device).index or 0) >= n_devices:
        raise DeviceUnavailable(f"--device {device}: there is no such GPU, torch sees cuda:0 to cuda:{n_devices - 1}")


def check_wheel(device: str) -> Wheel:
    """The installed build of Mooncake, if it can move memory of ``device``: the one without CUDA takes addresses of a
    GPU for the host's. Raises :class:`DeviceUnavailable` or :class:`TransportUnavailable`.
    """
    wheel = installed_wheel()
    if device != "cpu" and wheel.name == WHEEL_WITHOUT_CUDA:
        raise DeviceUnavailable(
            f"--device {device}: {wheel.name} moves the host's memory alone: install {WHEEL_WITH_CUDA} in its place "
            "(SETUP_EXTRAS=cuda,dev scripts/setup)"
        )
    return wheel


def transport_factory(options: NodeOptions) -> Callable[[], TransferEngine]:
    """Builds Mooncake endpoints that peers reach at this node's transfer host."""
    kind = "tcp" if options.transport == "tcp" else "auto"
    return lambda: MooncakeEngine(options.transfer_host, transport=kind)  # type: ignore[arg-type]
