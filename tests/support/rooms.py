"""What a decode node with one request that runs, one that failed and much else would answer, all texts full of HTML."""

from __future__ import annotations

from typing import Any

HOSTILE = "<img src=x onerror=hacked=1>&amp;"
"""Where it becomes HTML, ``window.hacked`` is set, or there is an image."""
RUNNING, FAILED = "6204699896858097551", "17"
_PREFILL = ("prefill_queue", "prefill", "transfer")


def record(room: str, began_unix_us: int, names: tuple[str, ...], *, runs: bool, **more: Any) -> dict[str, Any]:
    """A decode node's record: 100 ms in each of the phases, the last of which has no end if it ``runs``."""
    phases: list[dict[str, Any]] = [
        {
            "name": name,
            "node": "prefill" if name in _PREFILL else "decode",
            "attempt": 1,
            "start_us": i * 100_000,
            "end_us": (i + 1) * 100_000,
        }
        for i, name in enumerate(names)
    ]
    if runs:
        phases[-1]["end_us"] = None
    ttft = names.index("decode") * 100_000 if "decode" in names else None
    return {
        "room": room,
        "node": "decode",
        "request_id": f"cmpl-{HOSTILE}-0",
        "began_unix_us": began_unix_us,
        "phase": names[-1] if runs else None,
        "outcome": None if runs else "stop",
        "failure": None,
        "ttft_us": ttft,
        "total_us": None if runs else len(names) * 100_000,
        "phases": phases,
        "attempts": [{"epoch": 1, "peer": HOSTILE, "slot": 1, "n_pages": 1, "failure": None}],
        "tokens": {
            "prompt": 22,
            "max_new": 32,
            "generated": 11,
            "steps": 5,
            "proposed": 12,
            "accepted": 6,
            "reused": 0,
        },
        "transfer": {
            "nbytes": {"c4_kv": 3840, "swa": 33792},
            "held_nbytes": {},
            "pieces": {"pages": 1, "swa": 1},
            "writing_us": 2900,
            "gb_s": 0.045,
            "compute_us": 31000,
            "digest_us": 240,
            "chunks": 1,
        },
        "clocks": {"offset_us": 12034, "uncertainty_us": 600},
        "trace_id": None,
    } | more


def rooms(now_unix_us: int) -> dict[str, Any]:
    way = ("receive", "queue", "reserve", "prefill_queue", "prefill", "transfer", "done", "verify", "first_token")
    failure = {"code": "component_mismatch", "reason": HOSTILE, "component": "swa"}
    refusal = {"request_id": HOSTILE, "room": None, "unix_us": now_unix_us, "failure": failure | {"code": "overloaded"}}
    return {
        "node": "decode",
        "kept": 256,
        "running": [record(RUNNING, now_unix_us - 2_000_000, (*way, "decode"), runs=True)],
        "ended": [
            record(FAILED, now_unix_us - 3_000_000, way[:8], runs=False, failure=failure, outcome="component_mismatch")
        ],
        "refused": [refusal],
    }


def state(now_unix_us: int) -> dict[str, Any]:
    slots = {"free": 29, "reserved": 1, "committed": 1, "quarantined": 1}
    pages = {"free": 252, "reserved": 2, "committed": 1, "quarantined": 1}
    return {
        "node": "decode",
        "unix_us": now_unix_us,
        "slots": {"counts": slots, "per_cell": 1, "cells": "CRQ" + "." * 29},
        "pages": {"counts": pages, "per_cell": 1, "cells": "CRRQ" + "." * 252},
        "requests": {"running": 1, "waiting": 0},
        "nbytes": {"c4_kv": 3840, "swa": 33792},
        "pieces": 9,
        "peers": [{"peer": HOSTILE, "nbytes": 130568, "pieces": 9, "gb_s": 0.045}],
        "tokens": {"prompt": 22, "generated": 11},
        "accept_lengths": {"1": 2, "2": 1, "3": 1, "4": 1},
        "failures": {"component_mismatch": 1, "overloaded": 1},
        "quarantine": [
            {"room": FAILED, "epoch": 2, "prefill": HOSTILE, "seconds": 0.4, "code": "peer_lost", "reason": HOSTILE}
        ],
    }


def empty_state(now_unix_us: int, node: str = "decode") -> dict[str, Any]:
    """Of a node that has just started."""
    cells = {
        name: {"counts": {"free": n}, "per_cell": 1, "cells": "." * n} for name, n in (("slots", 32), ("pages", 256))
    }
    return {
        "node": node,
        "unix_us": now_unix_us,
        **cells,
        "requests": {"running": 0, "waiting": 0},
        "nbytes": {},
        "pieces": 0,
        "peers": [],
        "tokens": {"prompt": 0, "generated": 0},
        "accept_lengths": {},
        "failures": {},
        "quarantine": [],
    }
