"""The options that both nodes have, and the types of options: what cannot be is refused with a sentence."""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from server.cache.row_formats import INDEX_DTYPES, KV_DTYPES
from server.node.cli import OneOf, option
from server.node.free_memory import MemoryLimit, memory_limit
from server.sizes import nbytes_of

MAX_THREADS = 1024
"""A typing error must not take all threads of a machine."""
MAX_KEPT_ROOMS = 10_000
PAGES, SLOTS = 256, 32
OFF, AUTO = "off", "auto"
"""Of ``--prefix-cache``."""
BUNDLED_MODEL = Path(__file__).resolve().parent.parent / "assets" / "tiny-dsv4"


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


def collector_url(text: str) -> str:
    """The URL of an OpenTelemetry collector, as an option's type."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is not the URL of a collector, such as http://127.0.0.1:4318")
    if importlib.util.find_spec("opentelemetry") is None or importlib.util.find_spec("opentelemetry.sdk") is None:
        raise argparse.ArgumentTypeError("traces need the extra otlp: pip install 'dsv4-pd-server[otlp]'")
    return text


def host_name(text: str) -> str:
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


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds")
    return value


def positive(text: str) -> int:
    value = whole_number(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def count(text: str) -> int:
    """A whole number from 0 on, as an option's type."""
    value = whole_number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is less than 0")
    return value


def thread_count(text: str) -> int:
    value = positive(text)
    if value > MAX_THREADS:
        raise argparse.ArgumentTypeError(
            f"{value} threads are more than {MAX_THREADS}: name those of this machine's cores"
        )
    return value


def room_count(text: str) -> int:
    value = positive(text)
    if value > MAX_KEPT_ROOMS:
        raise argparse.ArgumentTypeError(f"{value} records are more than {MAX_KEPT_ROOMS}")
    return value


def port_number(text: str) -> int:
    """A TCP port, as an option's type; 0 takes any free one."""
    value = whole_number(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{value} is not a port (0 .. 65535)")
    return value


def memory_size(text: str) -> int:
    """Bytes, as an option's type: ``2GiB``, ``500MB`` or a number."""
    try:
        nbytes = nbytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not nbytes:
        raise argparse.ArgumentTypeError("0 bytes are no memory")
    return nbytes


def prefix_cache_size(text: str) -> str | int:
    """``off``, ``auto``, or bytes, as an option's type."""
    return text if text in (OFF, AUTO) else memory_size(text)


def device_name(text: str) -> str:
    """``cpu`` or ``cuda:N``, as an option's type. Whether there is such a device, torch knows (:mod:`.checks`)."""
    kind, colon, index = text.partition(":")
    if text == "cpu" or (kind == "cuda" and not colon):
        return "cpu" if text == "cpu" else "cuda:0"
    if kind != "cuda" or not index.isascii() or not index.isdigit() or len(index) > 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not a device: give cpu, cuda, or cuda:N, such as cuda:1")
    return f"cuda:{int(index)}"


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


SECURITY = "security (the data plane has none: see README.md)"
PEERS, CLIENTS = OneOf(SECURITY), OneOf(SECURITY)
HTTP = "HTTP (more limits, without options: see README.md, Security)"
OBSERVING = "records and traces"
TESTING = "testing and logs"


def http_port(default: int) -> int:
    """The option ``--port``: each role has its own default."""
    port: int = option("network", "HTTP port (0: any free one)", default=default, type=port_number)
    return port


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """The values of a command line. Sizes are counts; tokens, pages and slots as named.

    ``deadlines`` (as ``PHASE=SECONDS``), ``faults``, keys and files are as given, not read yet. Some defaults follow
    from other options: the name that is served, the transfer host, determinism; and ``pages`` and ``slots``, which are
    0 where ``memory`` gives them (:mod:`server.node.memory_plan`).
    """

    model: Path = option("model", "checkpoint directory", default=BUNDLED_MODEL, type=Path, metavar="DIR")
    served_model_name: str = option("model", "name in the API (default: the directory's name)", metavar="NAME")
    dtype: str = option("model", "weights and activations", default="float32", choices=("float32", "bfloat16"))
    kv_dtype: str = option(
        "model",
        "how windows and compressed entries are stored; fp8: rows of about one byte a channel (docs/layout.md). Both "
        "nodes of a pair need the same",
        default="model",
        choices=KV_DTYPES,
    )
    index_dtype: str = option(
        "model",
        "the same of the indexer's keys; auto: mxfp4 with --kv-dtype fp8, else model",
        default="auto",
        choices=INDEX_DTYPES,
    )
    device: str = option(
        "model",
        "where the model and its state live: cpu, or cuda:N for one GPU (cuda: the first)",
        default="cpu",
        type=device_name,
        metavar="DEVICE",
    )
    weights: str = option(
        "model",
        "dequantized: in memory, as numbers of --dtype; packed: as stored, in the checkpoint's files, which may be "
        "larger than the memory: read when they are used (docs/weights.md)",
        default="dequantized",
        choices=("dequantized", "packed"),
    )
    weights_memory: int | None = option(
        "model",
        "with --weights packed: most memory for weights, such as 8GiB (default: half of what is free)",
        type=memory_size,
        metavar="BYTES",
    )

    chat_format: str = option(
        "chat",
        "how conversations become prompts: by the checkpoint's template, or as DeepSeek-V4 writes them; auto: the "
        "template, or, where there is none but the tokens of DeepSeek-V4, theirs",
        default="auto",
        choices=("auto", "template", "deepseek_v4"),
    )
    tool_parser: str = option(
        "chat",
        "how calls of tools are found in answers; auto: by the tags that the chat format names",
        default="auto",
        choices=("auto", "none", "deepseek_v4", "hermes"),
    )
    reasoning_parser: str = option(
        "chat",
        "how reasoning is told from the rest of an answer; auto: by the tags that the chat format names",
        default="auto",
        choices=("auto", "none", "deepseek"),
    )

    kernels: str = option(
        "compute",
        "cpu: the compiled kernels; python: the model in Python, many times slower; auto: the kernels if the device is "
        "the CPU and they can be loaded",
        default="auto",
        choices=("auto", "cpu", "python"),
    )
    numerics: str = option(
        "compute",
        "plain: the formulas in --dtype; official: also rounded where the reference quantizes (docs/numerics.md). Both "
        "nodes of a pair need the same",
        default="plain",
        choices=("plain", "official"),
    )
    deterministic: bool = option(
        "compute",
        "results do not depend on the rest of the batch (default: on with --device cpu)",
        action=argparse.BooleanOptionalAction,
    )
    threads: int = option("compute", "CPU threads of one operation", default=1, type=thread_count, metavar="N")
    chunk_tokens: int = option(
        "compute", "most prompt tokens of one step, in tokens", default=256, type=positive, metavar="N"
    )

    memory: MemoryLimit | None = option(
        "memory",
        "what the node may take, weights and all: 12GiB, or 0.8 of what is free (on the machine and in its control "
        "groups, or on the GPU). Gives --pages and --slots, as far as they are not given (docs/memory.md)",
        type=memory_limit,
        metavar="BYTES",
    )
    pages: int = option(
        "memory", f"pages of compressed entries (default: {PAGES}, or by --memory)", type=positive, metavar="N"
    )
    slots: int = option(
        "memory", f"requests that can run at once (default: {SLOTS}, or by --memory)", type=positive, metavar="N"
    )
    page_size: int = option("memory", "tokens of one page", default=256, type=positive, metavar="N")
    prefix_cache: str | int = option(
        "memory",
        "keep complete pages of requests that are over, for prompts that begin alike (docs/memory.md). off: none; "
        "auto: all that is free, and on a prefill node snapshots of an eighth of the bytes of all pages, or of one for "
        "each slot if that is more; BYTES, such as 2GiB: at most so many of pages that nobody reads, and of snapshots",
        default=AUTO,
        type=prefix_cache_size,
        metavar="BYTES",
    )
    poison: bool = option("memory", "fill free memory with NaN, so that stray reads show", default=False)

    host: str = option("network", "address to listen on, IPv4 or IPv6", default="127.0.0.1", type=host_name)
    port: int = http_port(0)
    transport: str = option(
        "network",
        "what Mooncake moves state over; auto takes RDMA where there is a card",
        default="tcp",
        choices=("tcp", "auto"),
    )
    transfer_host: str = option(
        "network",
        "address at which the peers reach this node's Mooncake endpoint (default: --host)",
        type=host_name,
        metavar="HOST",
    )

    auth_key_file: Path | None = option(
        PEERS,
        "secret that prefill and decode nodes share; encrypts and authenticates the control connection (without it "
        "only peers on this machine are used). To make one: (umask 077 && openssl rand -hex 32 > FILE)",
        type=Path,
        metavar="FILE",
    )
    insecure: bool = option(PEERS, "use peers of other machines without a key: trust the network", default=False)
    api_key: str | None = option(
        CLIENTS,
        "clients must send it as a Bearer token, except to /health, /ready, /metrics and the page's files (the process "
        "list shows it: rather use --api-key-file)",
        metavar="KEY",
    )
    api_key_file: Path | None = option(CLIENTS, "the same, from a file", type=Path, metavar="FILE")

    max_queue: int = option(
        "limits",
        "requests that may wait for a slot and pages; more are refused with 503",
        default=1024,
        type=positive,
        metavar="N",
    )
    default_max_tokens: int = option(
        "limits",
        "tokens to generate for a request without max_tokens, if the checkpoint's generation_config.json has no "
        "max_new_tokens; never more than fits the context. Pages are reserved for all of them",
        default=2048,
        type=positive,
        metavar="N",
    )
    deadlines: tuple[str, ...] = option(
        "limits",
        "how long a phase may stay silent, e.g. prefill=30 (repeatable; phases and defaults: docs/protocol.md)",
        default=(),
        flag="--deadline",
        metavar="PHASE=SECONDS",
    )
    drain_timeout_s: float = option(
        "limits",
        "after SIGTERM, SIGINT or SIGHUP: time for what is under way; a second signal ends at once",
        default=30.0,
        type=seconds,
        flag="--drain-timeout",
        metavar="SECONDS",
    )

    max_connections: int = option(
        HTTP,
        "open HTTP connections; for one more, the one that has waited longest for a request is closed",
        default=1024,
        type=positive,
        metavar="N",
    )
    keep_alive_s: float = option(
        HTTP,
        "how long a connection may be open without a request: longer than proxies and clients keep theirs",
        default=75.0,
        type=seconds,
        flag="--keep-alive",
        metavar="SECONDS",
    )
    cors_origins: tuple[str, ...] = option(
        HTTP,
        "let browsers use the API from pages of this origin, e.g. https://chat.example; *: from any (repeatable)",
        default=(),
        flag="--cors-origin",
        metavar="ORIGIN",
    )

    keep_rooms: int = option(
        OBSERVING,
        "records of rooms that ended, for /rooms; up to 8 KB of memory each",
        default=256,
        type=room_count,
        metavar="N",
    )
    otlp: str | None = option(
        OBSERVING,
        "send traces to this OpenTelemetry collector (OTLP over HTTP, extra otlp), e.g. http://127.0.0.1:4318",
        type=collector_url,
        metavar="URL",
    )

    permute_ids: int | None = option(TESTING, "hand out pages and slots in a shuffled order", type=int, metavar="SEED")
    faults: tuple[str, ...] = option(
        TESTING, "inject a fault, e.g. drop:swa (repeatable)", default=(), flag="--fault", metavar="NAME:ARG"
    )
    doctor: str | None = option(
        TESTING,
        "start nothing: look whether a node with these options would work on this machine, and say what to do where "
        "not; exit code 0 or 1",
        nargs="?",
        const="text",
        choices=("text", "json"),
    )
    log_level: str = option(TESTING, "verbosity", default="info", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        resolved = {
            "served_model_name": self.served_model_name or self.model.resolve().name,
            "deterministic": self.device == "cpu" if self.deterministic is None else self.deterministic,
            "transfer_host": self.transfer_host or self.host,
            "pages": self.pages or (PAGES if self.memory is None else 0),
            "slots": self.slots or (SLOTS if self.memory is None else 0),
        }
        for name, value in resolved.items():
            object.__setattr__(self, name, value)
