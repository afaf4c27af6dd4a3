"""``--device``: what it may be, and what is said where there is no such device. No GPU is needed for that."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from server.cache.device import Mark
from server.node.build import build_resources
from server.node.checks import DeviceUnavailable, check_device, check_wheel
from server.node.cli import parse
from server.node.options import NodeOptions


@pytest.mark.parametrize(
    ("given", "device", "deterministic"),
    [("cpu", "cpu", True), ("cuda", "cuda:0", False), ("cuda:0", "cuda:0", False), ("cuda:07", "cuda:7", False)],
)
def test_a_device_by_its_name(given: str, device: str, *, deterministic: bool) -> None:
    options = parse(NodeOptions, "node", "", ["--device", given])
    assert (options.device, options.deterministic) == (device, deterministic)


@pytest.mark.parametrize("given", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1:2", "cuda:9999", "cpu:0", "CUDA", ""])
def test_what_is_no_device_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(NodeOptions, "node", "", [f"--device={given}"])
    assert f"{given!r} is not a device: give cpu, cuda, or cuda:N" in capsys.readouterr().err


def gpus(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """A torch with CUDA that sees ``n`` GPUs."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: n > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n)


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceUnavailable, match=r"--device cuda:0: this torch .* is built without CUDA"):
        build_resources("decode", NodeOptions(device="cuda:0"))


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    with pytest.raises(DeviceUnavailable, match="torch sees no GPU: is the driver there"):
        check_device("cuda:0")
    gpus(monkeypatch, 2)
    check_device("cuda:1")
    with pytest.raises(DeviceUnavailable, match="--device cuda:2: there is no such GPU, torch sees cuda:0 to cuda:1"):
        check_device("cuda:2")


@pytest.mark.parametrize("installed", ["mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"])
def test_memory_of_a_gpu_needs_the_cuda_build_of_mooncake(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    def version(name: str) -> str:
        if name != installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.3.13.post1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert check_wheel("cpu").name == installed
    if installed == "mooncake-transfer-engine":
        assert check_wheel("cuda:0").name == installed
    else:
        with pytest.raises(DeviceUnavailable, match="non-cuda moves the host's memory alone: install mooncake"):
            check_wheel("cuda:0")


def test_a_mark_waits_for_its_own_device_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking

        def record(self, stream: object) -> None:
            calls.append(("record", stream))

        def synchronize(self) -> None:
            calls.append("synchronize")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    mark = Mark(torch.device("cuda:1"))
    assert calls == [("record", "stream of cuda:1")]
    mark.wait()
    assert calls[1:] == ["synchronize"]
    Mark(torch.device("cpu")).wait()
    assert len(calls) == 2
