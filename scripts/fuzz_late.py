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
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from control_relay import ControlRelay, To, control_relay
from process_pair import free_ports
from quickstart import HOST
from soak_client import End, Outcome, ask
from soak_nodes import STOP_S, Node, SoakFailed, until
from soak_plan import VOCABULARY, Question, Room

START_S = 120.0
LONGEST_S = 60.0
"""For anything that has to happen in a round."""
SLOTS, PAGES = 3, 6
"""The decode node's memory: every slot and page of it belongs to one of the rooms that come after."""
LATE = ("Reserve", "Abort", "Committed", "Rejected", "Waiting")
"""What is held back. ``Reserve`` always is."""
DROPPED_S = 15.0
"""For the prefill node to count a message that it does not obey."""
_STREAM = Room(0, 0, True, 0.0, None)
STALE = "pd_control_frames_dropped_total{stale}"


def fuzz_late(rounds: int, seed: int) -> dict[str, Any]:
    """Plays ``rounds`` against a pair of its own; the report."""
    started = time.monotonic()
    report = asyncio.run(_play(rounds, seed))
    return {"rounds": rounds, "seed": seed, "took_s": round(time.monotonic() - started, 1), **report}


async def _play(rounds: int, seed: int) -> dict[str, Any]:
    rng = random.Random(f"late {seed}")
    mistakes: list[str] = []
    n_late = 0
    http_p, http_d, control = free_ports(3)
    with tempfile.TemporaryDirectory(prefix="late-") as directory:
        logs = Path(directory)
        common = ["--poison", "--deadline", "transfer=60"]
        prefill = Node("prefill", ["launch_prefill", "--bootstrap-port", str(control), *common], http_p, logs)
        async with control_relay(f"{HOST}:{control}") as relay:
            memory = ["--slots", str(SLOTS), "--pages", str(PAGES), "--prefill", relay.address]
            decode = Node("decode", ["launch_decode", *memory, *common], http_d, logs)
            try:
                for node in (prefill, decode):
                    node.start()
                await _wait(lambda: _not_ready(decode), START_S)
                for number in range(rounds):
                    n, wrong = await _round(relay, prefill, decode, rng)
                    n_late += n
                    mistakes += [f"round {number}: {what}" for what in wrong]
            finally:
                await asyncio.gather(*(asyncio.to_thread(node.stop, STOP_S) for node in (prefill, decode)))
    return {"late": n_late, "registrations": relay.n_registrations, "mistakes": mistakes}


async def _round(relay: ControlRelay, prefill: Node, decode: Node, rng: random.Random) -> tuple[int, list[str]]:
    """One registration that ends with messages under way; how many came late, and what was wrong."""
    asked = [_question(rng, 300, 200) for _ in range(SLOTS)]
    expected = [await ask(decode.url, one, timeout_s=LONGEST_S) for one in asked]
    late = await _lose_registration(relay, decode, rng)
    streams = [asyncio.create_task(ask(decode.url, one, _STREAM, timeout_s=LONGEST_S)) for one in asked]

    async def not_decoding() -> str:
        is_so = (await decode.metrics())["pd_slots{committed}"] == SLOTS or all(one.done() for one in streams)
        return "" if is_so else "the new rooms are not all committed"

    await _wait(not_decoding)
    registered, stale = (await prefill.info())["peers"], (await prefill.metrics()).get(STALE, 0.0)
    for to, frame in late:
        relay.send(to, frame)
    relay.send(To.PREFILL, relay.registers[-2])

    async def not_dropped() -> str:
        n_dropped = (await prefill.metrics()).get(STALE, 0.0) - stale
        return "" if n_dropped >= len(late) else f"{n_dropped:g} of {len(late)} late messages were dropped as stale"

    obeyed, _ = await until(not_dropped, DROPPED_S)
    outcomes = await asyncio.gather(*streams)
    outcomes += await asyncio.gather(*(ask(decode.url, one, timeout_s=LONGEST_S) for one in asked))
    wrong = [_wrong(*both) for both in zip(outcomes, [*expected, *expected], strict=True)]
    if (await prefill.info())["peers"] != registered:
        wrong.append("an old Register has ended the registration")

    async def held() -> list[str]:
        return [what for node in (prefill, decode) for what in await node.held()]

    await _wait(held)
    return len(late), [what for what in (obeyed, *wrong) if what]


async def _lose_registration(relay: ControlRelay, decode: Node, rng: random.Random) -> list[tuple[To, bytes]]:
    """Has a room's messages held back and the decode node register anew; the messages."""
    relay.hold = frozenset({"Reserve", *rng.sample(LATE, 2)})
    lost = asyncio.create_task(ask(decode.url, _question(rng, 300, 2), timeout_s=LONGEST_S))
    n_before = relay.n_registrations

    async def not_held() -> str:
        return "" if relay.held else "no Reserve was sent"

    async def not_anew() -> str:
        return "" if relay.n_registrations > n_before else "the decode node has not registered anew"

    await _wait(not_held)
    relay.lose = frozenset({"Pong", "Abort"})
    await _wait(not_anew)
    relay.lose = relay.hold = frozenset()
    await lost
    late, relay.held = relay.held, []
    await _wait(lambda: _not_ready(decode))
    return late


def _question(rng: random.Random, n_tokens: int, max_tokens: int) -> Question:
    prompt = rng.choices(VOCABULARY, k=n_tokens)
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    return Question("/v1/completions", body)


def _wrong(outcome: Outcome, expected: Outcome) -> str:
    """What is wrong with an answer of the new registration."""
    if outcome.end is not End.ANSWERED:
        return f"not answered: {outcome}"
    return "" if outcome.choices == expected.choices else "an answer has other tokens than before"


async def _not_ready(node: Node) -> str:
    ready = await node.get("/ready")
    return "" if ready.is_success else ready.text


async def _wait(look: Callable[[], Awaitable[Any]], timeout_s: float = LONGEST_S) -> None:
    """Raises :class:`SoakFailed` with what is still missing after ``timeout_s``."""
    left, _ = await until(look, timeout_s)
    if left:
        raise SoakFailed(f"after {timeout_s:g} s: {left}")
