"""Hostile clients beside small requests: is every small one answered right and soon, and does memory come back?"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from cluster import Node, Pair
from hostile import http_clients
from hostile.http_clients import GROWTH, Attack

from fuzzing.witness import Answers, Witness

WITHIN_S = 10.0
"""A small request beside an attack is answered within this time. It takes a few hundredths of a second alone."""
FORGET_S = 20.0
LINGER_S = 1.0
"""Small requests are asked for so long after an attack: its work may outlive its clients."""


def attack_pair(pair: Pair, attacks: Sequence[Attack], seed: int, seconds: float) -> tuple[dict[str, Any], list[str]]:
    """Attacks each node of a running pair in every way for ``seconds``; a report, and what was wrong."""
    small = Witness(pair.d.url)
    ends = time.monotonic() + seconds
    quiet = small.ask(lambda: time.monotonic() > ends)
    report: dict[str, Any] = {"quiet": _shown(quiet)}
    mistakes = [f"quiet: {mistake}" for mistake in quiet.mistakes(WITHIN_S)[:3]]
    registered = pair.p.info()["peers"]
    before = {node: node.resources().rss_mib for node in pair.nodes}
    for attack in attacks:
        for node in (pair.d, pair.p):
            name = f"{attack} at {node.role}"
            treated, beside = _beside(small, attack, node.url, seed, seconds)
            left = _memory_left(before)
            report[name] = {**_shown(beside), "clients": dict(treated), "memory": left}
            unclear = [f"a client got {how}" for how in http_clients.server_errors(treated)]
            mistakes += [f"{name}: {mistake}" for mistake in [*beside.mistakes(WITHIN_S)[:3], *unclear]]
            mistakes += [f"{name}: the {each} node keeps {now}" for each, now in left.items() if now.endswith("!")]
            if pair.p.info()["peers"] != registered:
                mistakes.append(f"{name}: the decode node was lost and has registered anew")
                registered = pair.p.info()["peers"]
    return report, mistakes


def _shown(answers: Answers) -> dict[str, Any]:
    percentiles = {f"p{percent}_ms": round(1000 * answers.percentile(percent), 1) for percent in (50, 99)}
    return {"answered": len(answers.seconds), **percentiles}


def _beside(small: Witness, attack: Attack, url: str, seed: int, seconds: float) -> tuple[Counter[str], Answers]:
    """The attack's clients, and the small requests beside them and a little longer."""
    treated: Counter[str] = Counter()
    over = threading.Event()

    def attacks() -> None:
        treated.update(http_clients.run(attack, url, seed, seconds))
        time.sleep(LINGER_S)
        over.set()

    threading.Thread(target=attacks, daemon=True).start()
    return treated, small.ask(over.is_set)


def _memory_left(before: dict[Node, float]) -> dict[str, str]:
    """Waits until each node's memory is within :data:`GROWTH` of what it was; what it is, with ``!`` where it stays
    (that is what it was, for the next attack).
    """
    deadline = time.monotonic() + FORGET_S
    left = {}
    for node, mib in before.items():
        while (now := node.resources().rss_mib) > GROWTH * mib and time.monotonic() < deadline:
            time.sleep(0.2)
        is_too_much = now > GROWTH * mib
        left[node.role] = f"{now:.0f} MiB of {mib:.0f}" + ("!" if is_too_much else "")
        before[node] = now if is_too_much else mib
    return left
