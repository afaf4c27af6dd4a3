"""One simulated world: virtual time, weather, nodes and their clients, and what has gone wrong."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from server.decode import room_manager
from server.engine.prompt_logprobs import PromptLogprobs
from server.engine.request import FinishReason, GenerationRequest, RoutedRoom, SamplingParams
from server.failure import RequestFailed
from server.transfer import parts
from server.transfer.protocol import Registration, Reserve, RoutedRequest
from server.transfer.rooms import Deadlines, RoomKey
from tests.simulation.engine import first_token_of
from tests.simulation.loop import VirtualLoop
from tests.simulation.memory import LONGEST_PROMPT, MAX_TOKENS, Sessions
from tests.simulation.network import Network
from tests.simulation.nodes import Client, SimulatedDecode, SimulatedNode, SimulatedPrefill
from tests.support.fake_scores import rows_of

DEADLINES = Deadlines(
    admission_s=60.0,
    reserve_s=5.0,
    pair_s=4.0,
    queued_s=12.0,
    prefill_s=15.0,
    transfer_s=15.0,
    commit_s=15.0,
    quiesce_s=10.0,
    probe_s=10.0,
    resend_cap_s=2.0,
)
LONGEST_CALL_S = 1.0
AT_ONCE_S = 0.3
PART_NBYTES, MAX_PARTS_UNDER_WAY = 40, 2
"""In some worlds, so that even the few tokens of a prompt have more parts than may be under way."""
TROUBLE_S = 0.5
"""How often something may go wrong that is not about one message, batch or chunk."""


@dataclass(frozen=True)
class Weather:
    """Probabilities of what goes wrong, each per occasion (a message, a batch, a chunk, half a second, a room)."""

    loss: float = 0.0
    duplicate: float = 0.0
    slow: float = 0.0
    late: float = 0.0
    """A message comes whenever it likes, also in a later registration, or to a later process."""
    refused: float = 0.0
    unknown: float = 0.0
    hangs: float = 0.0
    """A batch stays under way until the sender is closed."""
    bad_bytes: float = 0.0
    """A piece arrives damaged."""
    bad_cache: float = 0.0
    """A bit of a cached page, or of a snapshot, is inverted while nobody reads it."""
    slow_threads: float = 0.0
    """A call in a thread takes longer than any deadline: the check of what arrived, or the transport's."""
    engine_fails: float = 0.0
    engine_hangs: float = 0.0
    abort: float = 0.0
    prefill_crash: float = 0.0
    decode_crash: float = 0.0
    stop: float = 0.0
    """Either node is told to end, and started again."""
    connection_lost: float = 0.0
    half_lost: float = 0.0
    """The request of a routed room comes to one node only."""
    http_abort: float = 0.0
    again: float = 0.0
    """A router uses the id of a room once more."""

    @property
    def is_prompt(self) -> bool:
        """Whether every message comes, at once."""
        lost = self.loss + self.connection_lost + self.prefill_crash + self.decode_crash + self.stop
        return not (lost or self.slow or self.late)


class World:
    """``n_prefill`` prefill and ``n_decode`` decode nodes, everything between them, and everybody who asks them.

    Prefill and decode nodes have memory for so many requests each: ``n_slots``.
    """

    def __init__(
        self,
        seed: int,
        weather: Weather,
        *,
        n_rooms: int = 6,
        n_slots: tuple[int, int] = (2, 2),
        n_prefill: int = 1,
        n_decode: int = 1,
    ) -> None:
        self.rng = random.Random(seed)
        self._checked_at_once_nbytes = 1 << 20 if seed % 3 == 0 else 0
        """What arrived is checked in the event loop in some worlds, in threads in the others."""
        self._small_parts = (
            patch.multiple(parts, PART_NBYTES=PART_NBYTES, MAX_UNDER_WAY=MAX_PARTS_UNDER_WAY)
            if seed % 2
            else contextlib.nullcontext()
        )
        self.is_cached = seed % 7 != 6
        """Whether the nodes of this world keep prefixes, which they do in most."""
        self.keys_collide = seed % 7 == 5
        self.weather = weather
        self.deadlines = DEADLINES
        self.calm = False
        self.latest_s = 30.0
        self.loop = VirtualLoop(self._call_s)
        self.loop.set_exception_handler(self._on_exception)
        self.sessions = Sessions(self.check)
        self.network = Network(self)
        self.clients: list[Client] = []
        self.refused: list[RequestFailed] = []
        """Requests that no node took."""
        self.failures: list[RequestFailed] = []
        """What clients were told at the end."""
        self.readiness: list[tuple[bool, str]] = []
        """What decode nodes answered who were asked whether they are ready."""
        self.seen: Counter[str] = Counter()
        """How often something was met that has to be met now and then."""
        self.asked: set[str] = set()
        self.committed: set[str] = set()
        """The ids of all requests, and of those whose state a decode node has proved."""
        self._beginnings = [tuple(self.rng.randrange(1, 900) for _ in range(LONGEST_PROMPT))]
        self._epochs: defaultdict[str, set[int]] = defaultdict(set)
        self._names: dict[RoomKey, str] = {}
        self._n_rooms = n_rooms
        self._n_under_way = 0
        self._wrong: list[str] = []
        addresses = tuple(f"10.0.0.{i + 1}:8998" for i in range(n_prefill))
        self.prefills = [SimulatedPrefill(self, address, n_slots[0], seed + i) for i, address in enumerate(addresses)]
        self.decodes = [
            SimulatedDecode(self, f"decode{i}", n_slots[1], seed + 10 + i, addresses) for i in range(n_decode)
        ]
        self.nodes: list[SimulatedNode] = [*self.decodes, *self.prefills]

    # --- what goes on, and what is wrong ---

    def check(self, holds: bool, otherwise: str) -> None:
        """Notes what is wrong. Nodes survive exceptions, so that one raised where they see it might be lost."""
        if not holds:
            self._wrong.append(f"at {self.loop.time():.2f} s: {otherwise}")

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.check(False, f"{context['message']}: {context.get('exception')!r}")

    def hits(self, probability: float) -> bool:
        return probability > 0 and not self.calm and self.rng.random() < probability

    def _call_s(self) -> float:
        """How long a call in a thread takes."""
        return self.rng.uniform(
            0, LONGEST_CALL_S if not self.hits(self.weather.slow_threads) else 2 * DEADLINES.commit_s
        )

    def later(self, delay_s: float, what: Callable[..., object], *args: object) -> None:
        """Something is under way that belongs to no process. The world does not end before it has arrived."""
        self._n_under_way += 1

        def arrive() -> None:
            self._n_under_way -= 1
            what(*args)

        self.loop.call_later(delay_s, arrive)

    def run(self, troubled_s: float = 25.0, longest_s: float = 300.0) -> None:
        """Bad weather, then calm until nothing is left to happen. Raises :class:`AssertionError` for what is wrong."""
        errors = _Errors(self)
        log = logging.getLogger("server")
        log.addHandler(errors)
        try:
            with (
                patch.object(room_manager, "CHECKED_AT_ONCE_NBYTES", self._checked_at_once_nbytes),
                self._small_parts,
            ):
                self.loop.run_until_complete(self._live(troubled_s, longest_s))
        finally:
            log.removeHandler(errors)
            for node in self.nodes:
                node.end()
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()

    async def _live(self, troubled_s: float, longest_s: float) -> None:
        for node in self.nodes:
            node.start()
        self._plan_requests()
        while not self._is_over():
            await asyncio.sleep(TROUBLE_S)
            self.calm = self.loop.time() >= troubled_s
            self._make_trouble()
            self._raise()
            assert self.loop.time() < longest_s, (
                f"what never ends: {[(n.address, n.left) for n in self.nodes if n.left]}"
            )
        for node in self.nodes:
            node.check_over()
        for client in self.clients:
            self._check_answer(client)
        self._raise()

    def _is_over(self) -> bool:
        return not self._n_under_way and not any(node.left for node in self.nodes)

    def _raise(self) -> None:
        if self._wrong:
            raise AssertionError(self._wrong[0])

    def _make_trouble(self) -> None:
        weather = self.weather
        for client in self.clients:
            is_asking = not client.generation.ended
            if is_asking and self.hits(weather.abort if client.is_decode else weather.http_abort):
                phase = client.node.phases().get(client.room, "waiting")
                self.seen[f"abort on {client.node.role} in {phase}"] += 1
                client.aborted_in = phase
                met = [
                    (decode, registration) for decode in self.decodes if (registration := decode.met_in(client.room))
                ]
                client.node.process.run(client.generation.abort)
                if weather.is_prompt and met:
                    self.later(AT_ONCE_S, self._check_both_ended, client.request, *met[0])
        for node in self.prefills:
            if self.hits(weather.prefill_crash):
                node.crash()
        for decode in self.decodes:
            if self.hits(weather.decode_crash):
                decode.crash()
        for either in self.nodes:
            if self.hits(weather.bad_cache):
                either.rot()
        if self.hits(weather.stop):
            self.rng.choice(self.nodes).stop()
        if self.hits(weather.connection_lost):
            self.network.break_one()

    # --- clients ---

    def reserved(self, reserve: Reserve) -> None:
        """A room is opened, or once more: a request is retried once at most, and never after its end or its commit."""
        name, epochs = reserve.request.request_id, self._epochs[reserve.request.request_id]
        if reserve.epoch in epochs:
            return
        epochs.add(reserve.epoch)
        self._names[RoomKey.of(reserve)] = name
        most = 1 if isinstance(reserve.request, RoutedRequest) else 2
        self.check(len(epochs) <= most, f"{name} is tried in {len(epochs)} rooms")
        self.check(name not in self.committed, f"{name} is retried after its commit")
        for client in self.clients:
            is_over = client.request.request_id == name and client.is_decode and client.generation.ended
            self.check(not is_over, f"{name} is retried after its end")

    def proved(self, key: RoomKey) -> None:
        """A decode node says that the room is committed. Where nothing is decoded no engine says so."""
        self.committed.add(self._names[key])

    def clients_of(self, node: SimulatedNode) -> list[Client]:
        return [client for client in self.clients if client.node is node]

    def forget_clients_of(self, node: SimulatedNode) -> None:
        self.clients = [client for client in self.clients if client.node is not node]

    def _plan_requests(self) -> None:
        rng = self.rng
        for room in range(1000, 1000 + self._n_rooms, 2):
            decode = rng.choice(self.decodes)
            self.later(rng.uniform(2, 8), decode.ask, self._request(room + 1))
            self.later(rng.uniform(2, 8), self._route, room)
            self.later(rng.uniform(2, 20), decode.probe)
            if self.hits(self.weather.again):
                self.later(rng.uniform(8, 20), self._route, room)

    def _route(self, room: int) -> None:
        """A router sends one request to both nodes, which get it at about the same time."""
        prefill, decode = self.rng.choice(self.prefills), self.rng.choice(self.decodes)
        host, _, port = prefill.address.partition(":")
        request = self._request(room, RoutedRoom(room, host, int(port)))
        if not self.hits(self.weather.half_lost):
            self.later(self.rng.uniform(0, 3), decode.ask, request)
        if not self.hits(self.weather.half_lost):
            self.later(self.rng.uniform(0, 3), prefill.ask, request)

    def _request(self, room: int, routed: RoutedRoom | None = None) -> GenerationRequest:
        number = len(self.asked) + 1
        name = f"request {number} of room {room}"
        self.asked.add(name)
        prompt = self._prompt(number)
        n_top = self.rng.choice((None, None, 0, 2))
        sampling = SamplingParams(max_tokens=self.rng.randrange(MAX_TOKENS + 1), seed=1, prompt_logprobs=n_top)
        return GenerationRequest(name, prompt, sampling, routed)

    def _prompt(self, number: int) -> tuple[int, ...]:
        """One that begins as others do, or goes on where an answer has ended."""
        rng = self.rng
        beginning = rng.choice((self._beginnings[0], rng.choice(self._beginnings)))
        common = beginning[: rng.randrange(LONGEST_PROMPT)]
        n = rng.randrange(len(common) + 1, LONGEST_PROMPT + 1)
        prompt = (*common, number, *(rng.randrange(1, 900) for _ in range(LONGEST_PROMPT)))[:n]
        answer = range(first_token_of(prompt), first_token_of(prompt) + MAX_TOKENS)
        self._beginnings.append((*prompt, *answer))
        return prompt

    def _check_both_ended(
        self, request: GenerationRequest, decode: SimulatedDecode, registration: Registration
    ) -> None:
        """The client of one half, which had met the other, has gone. That of the other hears it, unless its state was
        there already, or the registration ended before it could be said.
        """
        if registration not in decode.registrations:
            return
        for client in self.clients:
            if client.request is request and not client.generation.ended:
                phase = client.node.phases().get(client.room, "waiting")
                self.check(phase in ("verify", "committed"), f"{client.name} was not told at once, in phase {phase}")

    def _check_answer(self, client: Client) -> None:
        """A client gets all of its tokens and one end, or some of them and one failure; never another's tokens."""
        name, request = client.name, client.request
        self.check(client.generation.ended, f"{name} was told nothing")
        if not client.generation.ended:
            return
        tokens: list[int] = []
        ends: list[object] = []
        scores: list[PromptLogprobs | None] = []
        for item in client.heard:
            if isinstance(item, RequestFailed):
                ends.append(item)
                self.failures.append(item)
                self._check_cause(name, item)
                continue
            tokens += item.token_ids
            scores.append(item.prompt_logprobs)
            ends += [item.finish_reason] if item.finish_reason is not None else []
        self.check(len(ends) == 1, f"{name} was told more than one end: {ends}")
        if client.is_decode and client.aborted_in not in ("", "committed"):
            self.check(ends == [FinishReason.ABORT], f"{name} has aborted in {client.aborted_in} and was told {ends}")
        n_wanted = request.sampling.max_tokens if client.is_decode else min(1, request.sampling.max_tokens)
        first = first_token_of(request.prompt_ids)
        self.check(tokens == list(range(first, first + len(tokens))), f"{name} got wrong tokens {tokens}")
        n_top = request.sampling.prompt_logprobs
        wanted = None if n_top is None else PromptLogprobs(n_top, rows_of(request.prompt_ids, n_top))
        is_computed = bool(tokens) or ends[0] is FinishReason.LENGTH
        self.check(not is_computed or scores[0] == wanted, f"{name} got wrong log probabilities of its prompt")
        self.check(not any(scores[1:]), f"{name} got log probabilities of its prompt twice")
        if ends[0] in (FinishReason.LENGTH, FinishReason.STOP):
            self.check(len(tokens) == n_wanted, f"{name} got {len(tokens)} tokens of {n_wanted}")
        if tokens and not client.is_decode:
            self.check(request.request_id in self.committed, f"{name} was answered, and its room never committed")

    def _check_cause(self, name: str, failure: RequestFailed) -> None:
        if failure.code == "deadline":
            found = re.search(r"phase (\w+).* for ([\d.]+) s \(deadline ([\d.]+) s\)", str(failure))
            limit_s = getattr(self.deadlines, f"{found[1]}_s") if found is not None else -1.0
            says_so = found is not None and float(found[2]) >= float(found[3]) == limit_s
            self.check(says_so, f"{name} was not told which deadline it was: {failure}")
            self.seen[f"deadline of {found[1]}" if found is not None else ""] += 1
        never = 0.0
        weather = self.weather
        causes = {
            "internal_error": never,
            "wrong_owner": never,
            "no_digest": never,
            "component_mismatch": weather.bad_bytes,
            "prefix_damaged": weather.bad_cache,
            "shared_page": never,
            "rejected": weather.bad_bytes + weather.bad_cache,
            "engine_error": weather.engine_fails,
            "prompt_mismatch": weather.again,
            "shutting_down": weather.stop,
            "aborted": weather.abort + weather.http_abort + weather.half_lost,
        }
        self.check(causes.get(failure.code, 1.0) > never, f"{name} failed without a cause: {failure.code}: {failure}")


class _Errors(logging.Handler):
    """What nodes log as errors: they have survived what must not happen."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._world.check(False, f"{record.getMessage()}: {error!r}")
