"""Two real processes whose addresses are all IPv6: HTTP, the bootstrap port, ``--prefill`` and Mooncake's."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from cluster import free_port

from tests.support.processes import process_pair


def has_ipv6() -> bool:
    try:
        free_port("::1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_every_address_may_be_ipv6(tmp_path: Path) -> None:
    with process_pair(tmp_path, host="::1") as pair:
        assert pair.address.startswith("[::1]:")
        body = {"prompt": [20, 30, 40], "max_tokens": 2}
        answer = httpx.post(f"{pair.d.url}/v1/completions", json=body, timeout=30)
        assert (answer.status_code, answer.headers["x-pd-prefill"]) == (200, pair.address)
        ready = pair.d.http.get("/ready").json()
        assert ready["reason"] == f"prefill {pair.address}: probe transfer ok over mooncake/tcp6"
        assert re.search(r"transfer endpoint \[::1\]:\d+", pair.p.log.read_text())
        for node in (pair.p, pair.d):
            assert f"node serves {node.url}" in node.log.read_text()
