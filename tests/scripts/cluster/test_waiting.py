"""Waiting for what another process does, and ports for it."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from cluster import Node, free_ports, nothing_left, until


def unreachable() -> list[str]:
    raise httpx.ConnectError("nobody")


def test_a_wait_that_is_over_says_what_did_not_come() -> None:
    seen = iter([False, True])
    assert until(lambda: next(seen), 5.0, "it comes") < 5.0
    with pytest.raises(TimeoutError, match=r"not within 0 s: it comes"):
        until(lambda: False, 0.0, "it comes")
    with pytest.raises(TimeoutError):
        until(unreachable, 0.0, "a node that cannot be reached counts as not yet")


async def test_what_is_left_after_a_wait_is_returned() -> None:
    seen = iter([["a slot"], []])
    assert (await nothing_left(lambda: next(seen), 5.0))[0] == []
    assert (await nothing_left(lambda: ["a slot"], 0.0))[0] == ["a slot"]
    assert "nobody" in (await nothing_left(unreachable, 0.0))[0][0]


def test_no_port_is_given_twice() -> None:
    ports = free_ports(20)
    assert len({*ports, *free_ports(20)}) == 40


def test_a_node_without_a_file_of_faults_takes_none(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="prefill"):
        Node("prefill", tmp_path / "log").arm("drop:swa")
