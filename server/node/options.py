"""The command line that both nodes share: groups, defaults and units in one place."""

from __future__ import annotations

import argparse
import ipaddress
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from server import __version__

MAX_THREADS = 1024
"""A typing error must not take all threads of a machine."""
BUNDLED_MODEL = Path(__file__).resolve().parent.parent / "assets" / "tiny-dsv4"


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, and names an option that there is not before one that is missing."""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        words = sys.argv[1:] if args is None else list(args)
        known = self._option_string_actions
        for name in (word.partition("=")[0] for word in words):
            if name.startswith("--") and name != "--" and name not in known:
                self.error(f"there is no option {name}")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows every default, except where there is none to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, argparse.SUPPRESS, []):
            return action.help
        return super()._get_help_string(action)


@dataclass(frozen=True)
class Limits:
    """How much a node takes on and how long it waits; ``deadlines`` as ``PHASE=SECONDS``, not checked yet."""

    max_queue: int
    default_max_tokens: int
    deadlines: tuple[str, ...]
    drain_timeout_s: float


@dataclass(frozen=True)
class Security:
    """Who may use the node: files and keys as given, not read yet."""

    auth_key_file: Path | None
    insecure: bool
    api_key: str | None
    api_key_file: Path | None


@dataclass(frozen=True)
class HttpOptions:
    """What the HTTP port does for clients beside answering."""

    max_connections: int
    keep_alive_s: float
    cors_origins: tuple[str, ...]


@dataclass(frozen=True)
class NodeOptions:
    """Parsed options that both nodes have. Sizes are counts; tokens, pages and slots as named."""

    model: Path
    served_model_name: str
    dtype: str
    device: str
    deterministic: bool
    threads: int
    chunk_tokens: int
    pages: int
    slots: int
    page_size: int
    poison: bool
    permute_ids: int | None
    host: str
    port: int
    transport: str
    transfer_host: str
    security: Security
    limits: Limits
    http: HttpOptions
    faults: tuple[str, ...]
    log_level: str

    @staticmethod
    def from_namespace(args: argparse.Namespace) -> NodeOptions:
        """Resolves what depends on other options: the served name, and determinism, which is the default on a CPU."""
        deterministic = args.device == "cpu" if args.deterministic is None else args.deterministic
        return NodeOptions(
            model=args.model,
            served_model_name=args.served_model_name or args.model.resolve().name,
            dtype=args.dtype,
            device=args.device,
            deterministic=deterministic,
            threads=args.threads,
            chunk_tokens=args.chunk_tokens,
            pages=args.pages,
            slots=args.slots,
            page_size=args.page_size,
            poison=args.poison,
            permute_ids=args.permute_ids,
            host=args.host,
            port=args.port,
            transport=args.transport,
            transfer_host=args.transfer_host or args.host,
            security=Security(args.auth_key_file, args.insecure, args.api_key, args.api_key_file),
            limits=Limits(args.max_queue, args.default_max_tokens, tuple(args.deadline), args.drain_timeout),
            http=HttpOptions(args.max_connections, args.keep_alive, tuple(args.cors_origin)),
            faults=tuple(args.fault),
            log_level=args.log_level,
        )


def node_parser(prog: str, description: str, *, port: int) -> argparse.ArgumentParser:
    """A parser with every option that both nodes have; ``port`` is the default HTTP port."""
    parser = _Parser(prog=prog, description=description, formatter_class=_Help, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)

    model = parser.add_argument_group("model")
    model.add_argument("--model", type=Path, default=BUNDLED_MODEL, metavar="DIR", help="checkpoint directory")
    model.add_argument("--served-model-name", metavar="NAME", help="name in the API (default: the directory's name)")
    model.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="weights and activations")
    model.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the model and its state live")

    compute = parser.add_argument_group("compute")
    compute.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="results do not depend on the rest of the batch (default: on with --device cpu)",
    )
    compute.add_argument("--threads", type=_threads, default=1, metavar="N", help="CPU threads of one operation")
    compute.add_argument(
        "--chunk-tokens", type=_positive, default=256, metavar="N", help="most prompt tokens of one step, in tokens"
    )

    memory = parser.add_argument_group("memory")
    memory.add_argument("--pages", type=_positive, default=256, metavar="N", help="pages of compressed entries")
    memory.add_argument("--slots", type=_positive, default=32, metavar="N", help="requests that can run at once")
    memory.add_argument("--page-size", type=_positive, default=256, metavar="N", help="tokens of one page")
    memory.add_argument("--poison", action="store_true", help="fill free memory with NaN, so that stray reads show")

    network = parser.add_argument_group("network")
    network.add_argument("--host", type=_host, default="127.0.0.1", help="address to listen on, IPv4 or IPv6")
    network.add_argument("--port", type=port_number, default=port, help="HTTP port (0: any free one)")
    network.add_argument(
        "--transport",
        choices=("tcp", "auto"),
        default="tcp",
        help="what Mooncake moves state over; auto takes RDMA where there is a card",
    )

    network.add_argument(
        "--transfer-host",
        type=_host,
        metavar="HOST",
        help="address at which the peers reach this node's Mooncake endpoint (default: --host)",
    )

    _add_security(parser)
    _add_limits(parser)
    _add_http(parser)

    testing = parser.add_argument_group("testing and logs")
    testing.add_argument("--permute-ids", type=int, metavar="SEED", help="hand out pages and slots in a shuffled order")
    testing.add_argument(
        "--fault", action="append", default=[], metavar="NAME:ARG", help="inject a fault, e.g. drop:swa (repeatable)"
    )
    testing.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="verbosity")
    return parser


def _add_limits(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-queue",
        type=_positive,
        default=1024,
        metavar="N",
        help="requests that may wait for a slot and pages; more are refused with 503",
    )
    limits.add_argument(
        "--default-max-tokens",
        type=_positive,
        default=2048,
        metavar="N",
        help="tokens to generate for a request without max_tokens, if the checkpoint's generation_config.json has no "
        "max_new_tokens; never more than fits the context. Pages are reserved for all of them",
    )
    limits.add_argument(
        "--deadline",
        action="append",
        default=[],
        metavar="PHASE=SECONDS",
        help="how long a phase may stay silent, e.g. prefill=30 (repeatable; phases and defaults: docs/protocol.md)",
    )
    limits.add_argument(
        "--drain-timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="after SIGTERM, SIGINT or SIGHUP: time for what is under way; a second signal ends at once",
    )


def _add_http(parser: argparse.ArgumentParser) -> None:
    http = parser.add_argument_group("HTTP (more limits, without options: see README.md, Security)")
    http.add_argument(
        "--max-connections",
        type=_positive,
        default=1024,
        metavar="N",
        help="open HTTP connections; for one more, the one that has waited longest for a request is closed",
    )
    http.add_argument(
        "--keep-alive",
        type=_seconds,
        default=75.0,
        metavar="SECONDS",
        help="how long a connection may be open without a request: longer than proxies and clients keep theirs",
    )
    http.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let browsers use the API from pages of this origin, e.g. https://chat.example; *: from any (repeatable)",
    )


def _add_security(parser: argparse.ArgumentParser) -> None:
    security = parser.add_argument_group("security (the data plane has none: see README.md)")
    peers = security.add_mutually_exclusive_group()
    peers.add_argument(
        "--auth-key-file",
        type=Path,
        metavar="FILE",
        help="secret that prefill and decode nodes share; encrypts and authenticates the control connection (without "
        "it only peers on this machine are used). To make one: (umask 077 && openssl rand -hex 32 > FILE)",
    )
    peers.add_argument(
        "--insecure", action="store_true", help="use peers of other machines without a key: trust the network"
    )
    clients = security.add_mutually_exclusive_group()
    clients.add_argument(
        "--api-key",
        metavar="KEY",
        help="clients must send it as a Bearer token, except to /health, /ready and /metrics (the process list shows "
        "it: rather use --api-key-file)",
    )
    clients.add_argument("--api-key-file", type=Path, metavar="FILE", help="the same, from a file")


def peer_address(text: str) -> str:
    """``host:port`` of a prefill node, as an option's type. IPv6 addresses stand in brackets."""
    if "/" in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is a URL or path, not HOST:BOOTSTRAP_PORT, such as 127.0.0.1:8998 (the prefill node's "
            "--bootstrap-port)"
        )
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:BOOTSTRAP_PORT")
    if (":" in host or "[" in host) and not (host.startswith("[") and _is_ipv6(host[1:-1]) and host.endswith("]")):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not HOST:BOOTSTRAP_PORT: an IPv6 address stands in brackets, such as [::1]:8998"
        )
    return text


def _host(text: str) -> str:
    """A name or an address; an IPv6 address may stand in brackets, as in a URL."""
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if (":" in host or host != text) and not _is_ipv6(host):
        raise argparse.ArgumentTypeError(f"{text!r} is not a host: give a name or an address without a port")
    return host


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds")
    return value


def _positive(text: str) -> int:
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def _threads(text: str) -> int:
    value = _positive(text)
    if value > MAX_THREADS:
        raise argparse.ArgumentTypeError(
            f"{value} threads are more than {MAX_THREADS}: name those of this machine's cores"
        )
    return value


def port_number(text: str) -> int:
    """A TCP port, as an option's type; 0 takes any free one."""
    value = _whole(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{value} is not a port (0 .. 65535)")
    return value


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
