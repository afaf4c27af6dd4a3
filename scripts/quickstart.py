"""The part of scripts/quickstart after the set-up (see there)."""

from __future__ import annotations

import sys
import time

import httpx
from cluster import BIN, HOST, LOGS, ROOT
from demo.main import main
from process_pair import Pair, PairFailed
from prometheus_client.parser import text_string_to_metric_families

__all__ = ["BIN", "HOST", "LOGS", "ROOT", "main", "transfer_bytes", "wait_ready"]
POLL_S = 0.2


def wait_ready(pair: Pair, client: httpx.Client, prefill_url: str, decode_url: str, timeout_s: float) -> None:
    """Returns once the prefill process is alive and the decode process has proved a transfer from it."""
    deadline = time.monotonic() + timeout_s
    waiting = [f"{prefill_url}/health", f"{decode_url}/ready"]
    reason = "no answer yet"
    while waiting:
        pair.check()
        try:
            response = client.get(waiting[0], timeout=5.0)
            if response.is_success:
                waiting.pop(0)
                continue
            reason = f"HTTP {response.status_code} {response.text[:200]}"
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
        if time.monotonic() > deadline:
            raise PairFailed(f"{waiting[0]} was not ready after {timeout_s:g} s: {reason}")
        time.sleep(POLL_S)


def transfer_bytes(client: httpx.Client, url: str) -> dict[str, int]:
    """Bytes moved so far by component, from ``pd_transfer_bytes_total``."""
    text = client.get(f"{url}/metrics", timeout=5.0).raise_for_status().text
    return {
        sample.labels["component"]: int(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "pd_transfer_bytes_total"
    }


if __name__ == "__main__":
    sys.exit(main())
