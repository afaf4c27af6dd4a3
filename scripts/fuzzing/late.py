"""Control messages that come after their registration is over: none may be obeyed.

A relay between the nodes holds back what the decode node says in a room, until the decode node has lost the prefill
node, has fenced and freed the room's memory and has registered anew. Then other rooms have that memory, and the old
messages come.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from cluster import Cluster, Node, nothing_left, until_async
from cluster.asking import VOCABULARY, End, Outcome, Question, ask
from cluster.relay import ControlRelay, Passed, control_relay

LONGEST_S = 60.0
"""For anything that has to happen in a round."""
SLOTS, PAGES = 3, 6
"""The decode node's memory: every slot and page of it belongs to one of the rooms that come after."""
LATE = ("Reserve", "Abort", "Committed", "Rejected", "Waiting")
"""What is held back. ``Reserve`` always is."""
DROPPED_S = 15.0
"""For the prefill node to count a message that it does not obey."""


def fuzz_late(rounds: int, seed: int) -> dict[str, Any]:
    """Plays ``rounds`` against a pair of its own; the report."""
    started = time.monotonic()
    report = asyncio.run(_play(rounds, seed))
    return {"rounds": rounds, "seed": seed, "took_s": round(time.monotonic() - started, 1), **report}


async def _play(rounds: int, seed: int) -> dict[str, Any]:
    rng = random.Random(f"late {seed}")
    mistakes: list[str] = []
    n_late = 0
    common = ["--poison", "--deadline", "transfer=60"]
    with tempfile.TemporaryDirectory(prefix="late-") as logs:
        prefill = Node("prefill", Path(logs) / "prefill.log", *common)
        async with control_relay(prefill.address) as relay:
            memory = ["--slots", str(SLOTS), "--pages", str(PAGES)]
            decode = Node("decode", Path(logs) / "decode.log", "--prefill", relay.address, *memory, *common)
            async with Cluster([prefill, decode]).started() as nodes:
                await asyncio.to_thread(nodes.wait_ready)
                for number in range(rounds):
                    n, wrong = await _round(relay, prefill, decode, rng)
                    n_late += n
                    mistakes += [f"round {number}: {what}" for what in wrong]
    return {"late": n_late, "registrations": relay.n_registrations, "mistakes": mistakes}


async def _round(relay: ControlRelay, prefill: Node, decode: Node, rng: random.Random) -> tuple[int, list[str]]:
    """One registration that ends with messages under way; how many came late, and what was wrong."""
    asked = [_question(rng, 300, 200) for _ in range(SLOTS)]
    expected = [await ask(decode.url, one, timeout_s=LONGEST_S) for one in asked]
    late = await _lose_registration(relay, decode, rng)
    streams = [asyncio.create_task(ask(decode.url, one, stream=True, timeout_s=LONGEST_S)) for one in asked]
    await until_async(
        lambda: decode.counts("slots")["committed"] == SLOTS or all(one.done() for one in streams),
        LONGEST_S,
        "the new rooms are all committed",
    )
    registered, stale = await asyncio.to_thread(lambda: (prefill.info()["peers"], _n_stale(prefill)))
    for passed in late:
        relay.send(passed)
    relay.send(relay.registers[-2])

    def not_dropped() -> list[str]:
        n_dropped = _n_stale(prefill) - stale
        return [] if n_dropped >= len(late) else [f"{n_dropped:g} of {len(late)} late messages were dropped as stale"]

    obeyed, _ = await nothing_left(not_dropped, DROPPED_S)
    outcomes = await asyncio.gather(*streams)
    outcomes += await asyncio.gather(*(ask(decode.url, one, timeout_s=LONGEST_S) for one in asked))
    wrong = [*obeyed, *(_wrong(*both) for both in zip(outcomes, [*expected, *expected], strict=True))]
    if (await asyncio.to_thread(prefill.info))["peers"] != registered:
        wrong.append("an old Register has ended the registration")
    await until_async(lambda: not (prefill.held() or decode.held()), LONGEST_S, "both nodes hold nothing")
    return len(late), [what for what in wrong if what]


async def _lose_registration(relay: ControlRelay, decode: Node, rng: random.Random) -> list[Passed]:
    """Has a room's messages held back and the decode node register anew; the messages."""
    relay.hold = {"Reserve", *rng.sample(LATE, 2)}
    lost = asyncio.create_task(ask(decode.url, _question(rng, 300, 2), timeout_s=LONGEST_S))
    n_before = relay.n_registrations
    await until_async(lambda: relay.held, LONGEST_S, "a Reserve is sent")
    relay.lose = {"Pong", "Abort"}
    await until_async(lambda: relay.n_registrations > n_before, LONGEST_S, "the decode node registers anew")
    relay.lose = relay.hold = frozenset()
    await lost
    late, relay.held = relay.held, []
    await asyncio.to_thread(decode.wait_for, "/ready", LONGEST_S)
    return late


def _n_stale(prefill: Node) -> float:
    return prefill.samples("pd_control_frames_dropped_total").get(("stale",), 0.0)


def _question(rng: random.Random, n_tokens: int, max_tokens: int) -> Question:
    prompt = rng.choices(VOCABULARY, k=n_tokens)
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    return Question("/v1/completions", body)


def _wrong(outcome: Outcome, expected: Outcome) -> str:
    """What is wrong with an answer of the new registration."""
    if outcome.end is not End.ANSWERED:
        return f"not answered: {outcome}"
    return "" if outcome.choices == expected.choices else "an answer has other tokens than before"
