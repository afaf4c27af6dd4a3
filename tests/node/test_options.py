"""Options that both nodes have: what cannot be is refused with a sentence."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from server.chat.registry import CHAT_FORMATS
from server.model.config import CheckpointError
from server.node.build import build_resources
from server.node.checks import check_families, check_weights
from server.node.cli import parse
from server.node.options import NodeOptions, peer_address
from server.transfer.deadlines import DeadlineError
from server.transfer.engines.base import TransportMisconfigured


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--max-queue", "0", "0 is not a positive number"),
        ("--default-max-tokens", "0", "0 is not a positive number"),
        ("--drain-timeout", "-1", "-1 is no number of seconds"),
        ("--drain-timeout", "inf", "inf is no number of seconds"),
        ("--max-connections", "0", "0 is not a positive number"),
        ("--keep-alive", "nan", "nan is no number of seconds"),
        ("--port", "65536", "65536 is not a port"),
        ("--keep-rooms", "0", "0 is not a positive number"),
        ("--keep-rooms", "10001", "10001 records are more than 10000"),
        ("--weights-memory", "much", "'much' is no number of bytes, such as 500MB, 1.5GiB or 4096"),
        ("--weights-memory", "0", "0 bytes are no memory"),
        ("--otlp", "127.0.0.1:4318", "'127.0.0.1:4318' is not the URL of a collector"),
        ("--otlp", "grpc://127.0.0.1:4317", "is not the URL of a collector"),
    ],
)
def test_a_number_out_of_range_is_refused(
    option: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(NodeOptions, "node", "", [option, value])
    assert words in capsys.readouterr().err


def test_traces_without_the_extra_are_refused_with_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        parse(NodeOptions, "node", "", ["--otlp", "http://127.0.0.1:4318"])
    assert "pip install 'dsv4-pd-server[otlp]'" in capsys.readouterr().err


def test_connections_are_kept_longer_than_proxies_keep_theirs() -> None:
    options = parse(NodeOptions, "node", "", [])
    assert options.keep_alive_s >= 75  # nginx: 60 s, cloud balancers: 60 s, httpx: 5 s
    assert options.cors_origins == ()


@pytest.mark.parametrize(
    ("given", "host"), [("::1", "::1"), ("[::1]", "::1"), ("fe80::1%lo", "fe80::1%lo"), ("node-1.lan", "node-1.lan")]
)
def test_a_host_may_be_a_name_or_an_address_of_either_kind(given: str, host: str) -> None:
    options = parse(NodeOptions, "node", "", ["--host", given])
    assert (options.host, options.transfer_host) == (host, host)


@pytest.mark.parametrize("given", ["127.0.0.1:80", "[::1]:80", "[node]", "::1::2"])
def test_a_host_with_a_port_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(NodeOptions, "node", "", ["--transfer-host", given])
    assert "is not a host: give a name or an address without a port" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["[::1]:8998", "10.0.0.1:1", "node-1.lan:65535", "[fe80::1%lo]:8998"])
def test_an_address_of_a_prefill_node(address: str) -> None:
    assert peer_address(address) == address


@pytest.mark.parametrize("address", ["::1:8998", "[::1:8998", "[node]:8998", "[]:1", "::1"])
def test_an_ipv6_address_without_its_brackets_is_refused(address: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not HOST:BOOTSTRAP_PORT"):
        peer_address(address)


@pytest.mark.parametrize(
    ("host", "peers"),
    [("127.0.0.1", ["10.0.0.1:1", "[::1]:8998"]), ("::1", ["127.0.0.1:8998"]), ("::1", ["node:8998"])],
)
def test_ipv4_and_ipv6_in_one_pair_are_refused_before_anything_is_loaded(host: str, peers: list[str]) -> None:
    options = NodeOptions(host=host)
    with pytest.raises(TransportMisconfigured, match=re.escape(f"prefill {peers[-1]} and this node's own {host}")):
        check_families(options, peers)
    check_families(options, ["[::2]:1"] if host == "::1" else ["node:1", "127.0.0.1:1"])


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_deadline_is_looked_at_before_a_model_is_loaded(role: str) -> None:
    options = NodeOptions(model=Path("/nowhere"), deadlines=("commit=soon",))
    with pytest.raises(DeadlineError, match="--deadline commit=soon: 'soon' is no number of seconds"):
        build_resources(role, options)


@pytest.mark.parametrize(
    ("arguments", "n_tokens", "n_pages"),
    [
        ([], 2048, 8),
        (["--default-max-tokens", "300"], 300, 2),
        (["--pages", "2"], 508, 2),  # what two pages hold, less three drafted tokens and one of the prompt
    ],
)
def test_the_default_of_max_tokens_is_told_with_its_cost(arguments: list[str], n_tokens: int, n_pages: int) -> None:
    options = parse(NodeOptions, "node", "", arguments)
    settings = build_resources("decode", options, spec_tokens=3).settings
    assert settings.facts["default_max_tokens"] == n_tokens
    assert settings.facts["default_max_tokens_pages"] == n_pages
    assert n_tokens < settings.max_context
    assert settings.facts["chat_format"] in CHAT_FORMATS
    assert isinstance(settings.facts["can_think"], bool)


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ([], ("model", "model")),
        (["--kv-dtype", "fp8"], ("fp8", "mxfp4")),
        (["--kv-dtype", "fp8", "--index-dtype", "fp8"], ("fp8", "fp8")),
    ],
)
def test_how_rows_are_stored_is_told(arguments: list[str], facts: tuple[str, str]) -> None:
    resources = build_resources("decode", parse(NodeOptions, "node", "", arguments))
    assert (resources.settings.facts["kv_dtype"], resources.settings.facts["index_dtype"]) == facts
    stored = resources.context.arena.layout.component("c4_index").dtype
    assert stored == {"model": "float32", "mxfp4": "mxfp4_index", "fp8": "fp8_index"}[facts[1]]


def test_what_computes_and_why_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("DSV4_KERNELS_BUILD", "absent")
    resources = build_resources("decode", parse(NodeOptions, "node", "", []))
    identity, reason = resources.context.identity.kernels, str(resources.settings.facts["kernels_reason"])
    assert identity.startswith("python-torch")
    assert reason.startswith("DSV4_KERNELS_BUILD=absent names no build")
    assert caplog.messages.count(f"{identity} kernels ({reason})") == 1
    labels = {"kernels": identity, "reason": reason}
    assert resources.context.metrics.registry.get_sample_value("pd_kernels_info", labels) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--weights-memory", "1GiB"], "--weights-memory is for --weights packed: dequantized weights are in memory"),
        (
            ["--weights", "packed", "--device", "cuda"],
            "--weights packed is computed on the CPU, not with --device cuda",
        ),
    ],
)
def test_where_weights_cannot_be_is_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        check_weights(parse(NodeOptions, "node", "", arguments))


def test_packed_weights_are_bounded_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    packed = ["--weights", "packed", "--weights-memory"]
    with pytest.raises(CheckpointError, match=r"--weights-memory 1024: this checkpoint needs at least \d+ bytes"):
        build_resources("decode", parse(NodeOptions, "node", "", [*packed, "1KiB"]))
    resources = build_resources("decode", parse(NodeOptions, "node", "", [*packed, "64MiB"]))
    state = resources.context.weights()
    assert (state["mode"], state["budget_nbytes"], state["misses"]) == ("packed", 64 << 20, 0)
    registry = resources.context.metrics.registry
    assert registry.get_sample_value("pd_weights_budget_bytes") == 64 << 20
    for name in ("hits", "misses", "evictions", "read_bytes"):
        assert registry.get_sample_value(f"pd_weights_{name}_total") == 0


def test_loaded_weights_have_no_metrics() -> None:
    resources = build_resources("decode", parse(NodeOptions, "node", "", []))
    assert resources.context.weights()["mode"] == "dequantized"
    assert resources.context.metrics.registry.get_sample_value("pd_weights_misses_total") is None
