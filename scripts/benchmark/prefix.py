"""What prefix reuse saves, and what it costs where nothing is shared: a pair that keeps prefixes, and one that does
not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from cluster import Node

from .client import decode, ttft_s
from .in_process import decode_round
from .measurement import BenchFailed, Measurement, Prompt
from .servers import BASELINE, Server, a_pair, node_options, running
from .session import Prompts, Session

CACHE, OFF = "cache", "off"
RATIOS = ((CACHE, OFF), (OFF, OFF + BASELINE), (CACHE, OFF + BASELINE))
PAGES, SLOTS = 256, 32
STREAMS, STREAM_PROMPT = 4, 64
A_ROUND = 5
"""Prompts of each variant in a round without anything shared, in turn: the round's value is their median."""
PATIENCE = 10
"""Times --seconds for a measurement of whole chats, or of the overhead: a small ratio needs many rounds."""
ANSWER_S = 600.0


def measure_prefix(session: Session) -> Iterator[Measurement]:
    """Prompts that share most, then prompts that share nothing: by then pages must be evicted for each."""
    options = node_options(session, "bundled, long", pages=PAGES, slots=SLOTS)
    pairs = {CACHE: a_pair("prefix-cache", options, keeps_prefixes=True), OFF: a_pair("prefix-off", options)}
    if session.baseline is not None:
        pairs[OFF + BASELINE] = a_pair("prefix-baseline", options, session.baseline)
    with running(pairs):
        fresh = Fresh(session.prompts)
        yield from _shared_prefix(session, pairs, fresh)
        yield from _chat(session, pairs, fresh)
        yield from _nothing_shared(session, pairs, fresh)


class Fresh:
    """Prompts that no other one begins like."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts, self._numbers = prompts, itertools.count(1)

    def one(self, n_tokens: int) -> Prompt:
        return self._prompts.one(n_tokens, STRIDE * next(self._numbers))


STRIDE = 37
"""Tokens from the start of one prompt to that of the next: enough that they differ, few enough for thousands."""


@dataclass(frozen=True)
class Cost:
    """Of one prompt: seconds to its first token, and the bytes of state that were sent for it."""

    ttft_s: float
    nbytes: int


def cost_of(pair: Server, prompt: Prompt) -> Cost:
    before = pair.moved()
    seconds = ttft_s(pair.url, prompt)
    return Cost(seconds, pair.moved() - before)


def _two(what: str, **size: object) -> tuple[Measurement, Measurement]:
    """Of seconds and of bytes. The values of the second are added beside those of the first."""
    times, nbytes = (
        Measurement("prefix", f"{what}: {name}", unit, RATIOS, size={"checkpoint": "bundled", "figure": what, **size})
        for name, unit in (("time to the first token", "ms"), ("state sent", "bytes"))
    )
    return times, nbytes


def _shared_prefix(session: Session, pairs: dict[str, Server], fresh: Fresh) -> Iterator[Measurement]:
    sizes = session.sizes
    times, sent = _two(f"{sizes.shared_prefix:,} shared tokens and {sizes.suffix} of its own")
    prefix = fresh.one(sizes.shared_prefix)
    session.on_step(times.name)
    for pair in pairs.values():
        ttft_s(pair.url, prefix)

    def one_round(m: Measurement) -> None:
        prompt = (*prefix, *fresh.one(sizes.suffix))
        for name, pair in pairs.items():
            cost = cost_of(pair, prompt)
            m.add(name, 1e3 * cost.ttft_s)
            sent.add(name, cost.nbytes)

    yield session.measure(times, one_round)
    yield _counted(sent, times)


def _chat(session: Session, pairs: dict[str, Server], fresh: Fresh) -> Iterator[Measurement]:
    """The last of a conversation's turns, answers included: they are the same, or the cache has changed one."""
    sizes = session.sizes
    times, sent = _two(f"turn {sizes.chat_turns} of a chat", tokens=_chat_tokens(session))

    def one_round(m: Measurement) -> None:
        questions = [fresh.one(sizes.chat_question) for _ in range(sizes.chat_turns)]
        conversations = dict.fromkeys(pairs, questions[0])
        for question in questions[1:]:
            for name, pair in pairs.items():
                said = _answer(pair.node, conversations[name], sizes.chat_answer)
                conversations[name] = (*conversations[name], *said, *question)
        if len(set(conversations.values())) != 1:
            raise BenchFailed(f"{', '.join(pairs)} do not answer alike")
        for name, pair in pairs.items():
            cost = cost_of(pair, conversations[name])
            m.add(name, 1e3 * cost.ttft_s)
            sent.add(name, cost.nbytes)

    yield _patient(session, sizes.rounds).measure(times, one_round)
    yield _counted(sent, times)


def _chat_tokens(session: Session) -> int:
    """Of the last turn's prompt."""
    sizes = session.sizes
    return sizes.chat_turns * (sizes.chat_question + sizes.chat_answer) - sizes.chat_answer


def _answer(node: Node, prompt: Prompt, n_tokens: int) -> Prompt:
    sampling = {"max_new_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": sampling}
    return tuple(node.http.post("/generate", json=body, timeout=ANSWER_S).raise_for_status().json()["output_ids"])


def _patient(session: Session, rounds: int) -> Session:
    """With more time for one measurement."""
    return replace(session, sizes=replace(session.sizes, rounds=rounds, seconds=PATIENCE * session.sizes.seconds))


def _counted(sent: Measurement, times: Measurement) -> Measurement:
    """``sent`` without the rounds that warmed up."""
    sent.values = {name: sent.values[name][-len(values) :] for name, values in times.values.items()}
    return sent


def _nothing_shared(session: Session, pairs: dict[str, Server], fresh: Fresh) -> Iterator[Measurement]:
    """Many rounds, and in each the variants take turns several times, in the other order every second time."""
    sizes = session.sizes
    patient = _patient(session, sizes.overhead_rounds)
    size: dict[str, object] = {"checkpoint": "bundled"}

    def in_turn() -> Iterator[list[str]]:
        for turn in range(A_ROUND):
            yield list(pairs) if turn % 2 else list(reversed(pairs))

    def prompts(m: Measurement) -> None:
        once = replace(m, values={})
        for names in in_turn():
            prompt = fresh.one(sizes.fresh_prompt)
            for name in names:
                once.add(name, 1e3 * ttft_s(pairs[name].url, prompt))
        for name in pairs:
            m.add(name, once.median(name))

    n_tokens = dict.fromkeys(pairs, sizes.fresh_answers)

    def streams(m: Measurement) -> None:
        once = replace(m, values={})
        for names in in_turn():
            batch = [fresh.one(STREAM_PROMPT) for _ in range(STREAMS)]
            decode_round({name: partial(decode, pairs[name].url) for name in names}, batch, n_tokens, once)
        for name in pairs:
            m.add(name, 1e3 * STREAMS / once.median(name))

    what = f"nothing shared, {sizes.fresh_prompt:,} tokens"
    yield patient.measure(
        Measurement("prefix", f"{what}: time to the first token", "ms", RATIOS, size=size | {"figure": what}), prompts
    )
    what = f"nothing shared, {STREAMS} requests decode: time per output token"
    size |= {"figure": what, "tokens": n_tokens}
    yield patient.measure(Measurement("prefix", what, "ms", RATIOS, size=size), streams)
