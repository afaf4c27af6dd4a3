"""Prefix reuse through real processes: no token and no probability changes, and what is sent is counted to the byte."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster import Node, Pair, until
from cluster.asking import End, Outcome, Question, ask
from evaluation.questions import BUNDLED as QUESTIONS
from evaluation.questions import load_problems
from soaking.judge import judge
from soaking.plan import Event, Kind

from server.cache.layout import ArenaLayout
from server.cache.specs import CacheGeometry
from server.model.config import load_config
from server.model.state import state_components
from server.node.options import BUNDLED_MODEL
from tests.support import waiting
from tests.support.processes import process_pair

PAGE = 256
ANSWER_S = 60.0
PREFILL = ("--chunk-tokens", "100", "--permute-ids", "5", "--poison")
DECODE = ("--spec-tokens", "3", "--permute-ids", "6", "--poison")
OFF = ("--prefix-cache", "off")
TURNS = range(10)
P_RESTARTS, D_RESTARTS = 4, 7
"""Before these turns."""
Tokens = Sequence[int]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with process_pair(tmp_path_factory.mktemp("kept"), PREFILL, DECODE) as pair:
        yield pair


@pytest.fixture
def pair(shared: Pair) -> Pair:
    """A pair that keeps prefixes, and has none yet."""
    shared.heal()
    flush(shared)
    return shared


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A pair that keeps none: what it answers is right."""
    with process_pair(tmp_path_factory.mktemp("plain"), (*PREFILL, *OFF), (*DECODE, *OFF)) as pair:
        yield pair


@pytest.fixture(scope="module")
def layout() -> ArenaLayout:
    """Of the decode nodes, as far as bytes are counted."""
    config = load_config(BUNDLED_MODEL)
    components = state_components(config, "float32", 3, draft=True)
    return ArenaLayout.from_geometry(CacheGeometry(PAGE, 2, 2, config.sliding_window, 3, components))


@dataclass(frozen=True)
class Told:
    """One answer, and what the decode node's record says of it. ``content`` is all that a client sees of tokens."""

    content: Any
    ids: list[int]
    cached_tokens: int
    sent_nbytes: int
    held_nbytes: int


def told(node: Node, content: Any, ids: list[int], cached_tokens: int, room: str) -> Told:
    """With the record of ``room``, which is whole a moment after the answer."""
    until(lambda: record_of(node, room)["phase"] is None, ANSWER_S, f"room {room} is over")
    record = record_of(node, room)
    transfer = record["transfer"]
    assert record["tokens"]["reused"] == cached_tokens
    return Told(content, ids, cached_tokens, sum(transfer["nbytes"].values()), sum(transfer["held_nbytes"].values()))


def record_of(node: Node, room: str) -> dict[str, Any]:
    record: dict[str, Any] = node.http.get(f"/rooms/{room}").raise_for_status().json()
    return record


def generate(node: Node, prompt: Tokens, n_tokens: int, **fields: Any) -> Told:
    """Sampled, of exactly so many tokens, with log probabilities."""
    sampling = {"max_new_tokens": n_tokens, "ignore_eos": True, "temperature": 0.7, "sampling_seed": len(prompt)}
    body = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 3}
    answer = node.http.post("/generate", json={**body, **fields}, timeout=ANSWER_S).raise_for_status().json()
    meta, ids = answer["meta_info"], answer["output_ids"]
    content = (answer["text"], ids, meta["output_token_logprobs"], meta["output_top_logprobs"])
    return told(node, content, ids, meta["cached_tokens"], meta["pd"]["room"])


def chat(node: Node, messages: Sequence[dict[str, str]]) -> Told:
    """Greedy, to its own end."""
    body = {"messages": messages, "max_tokens": 200, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    answer = node.http.post("/v1/chat/completions", json=body, timeout=ANSWER_S).raise_for_status().json()
    (choice,) = answer["choices"]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    content = (choice["message"]["content"], choice["finish_reason"], choice["logprobs"])
    return told(node, content, [], cached, answer["pd"]["room"])


def random_ids(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(10, 500), k=n)


def n_common(a: Tokens, b: Tokens) -> int:
    """How many tokens both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def whole_pages(n_tokens: int) -> int:
    """Tokens on complete pages."""
    return n_tokens // PAGE * PAGE


def flush(pair: Pair) -> None:
    for node in pair.nodes:
        node.http.post("/flush_cache").raise_for_status()


def restart(pair: Pair, node: Node) -> None:
    node.kill()
    pair.heal()


@dataclass
class Known:
    """What each node has of a conversation: P the last prompt, D also what it has answered."""

    p: Tokens = ()
    d: Tokens = ()

    def check(self, ours: Told, theirs: Told, prompt: Tokens, layout: ArenaLayout) -> None:
        """The same answer; the tokens that P had a snapshot of not computed; the pages that D had not sent."""
        n_held = whole_pages(n_common(self.d, prompt))
        everything = sum(layout.live_nbytes(len(prompt)).values())
        assert ours.content == theirs.content
        assert (theirs.cached_tokens, theirs.sent_nbytes, theirs.held_nbytes) == (0, everything, 0)
        assert ours.cached_tokens == min(whole_pages(n_common(self.p, prompt)), whole_pages(len(prompt) - 1))
        assert ours.held_nbytes == n_held // PAGE * layout.page_nbytes
        assert ours.sent_nbytes == everything - ours.held_nbytes


def restart_before(turn: int, pair: Pair, known: Known) -> None:
    """A node forgets what it had, the other one does not."""
    if turn == P_RESTARTS:
        restart(pair, pair.p)
        known.p = ()
    if turn == D_RESTARTS:
        restart(pair, pair.d)
        known.d = ()


@pytest.mark.timeout(240)
def test_ten_turns_send_their_slot_and_new_pages_alone(pair: Pair, plain: Pair, layout: ArenaLayout) -> None:
    """Answers included. Every complete page of an answer is held in the next turn: what decoding has computed is, bit
    for bit, what the prefill node computes, whatever of its drafts was rejected.
    """
    prompt, known = random_ids(0, 300), Known()
    for turn in TURNS:
        restart_before(turn, pair, known)
        ours, theirs = generate(pair.d, prompt, 170), generate(plain.d, prompt, 170)
        known.check(ours, theirs, prompt, layout)
        known = Known(prompt, [*prompt, *ours.ids[:-1]])  # the last token was chosen, and not computed
        prompt = [*prompt, *ours.ids, *random_ids(turn + 1, 130)]
    pair.wait_all_free()


@pytest.mark.timeout(240)
def test_a_chat_of_ten_turns_equals_one_without_a_cache(pair: Pair, plain: Pair, layout: ArenaLayout) -> None:
    """As clients do it: an answer comes back as text. Where its tokens are others then than those that were chosen, the
    pages from there on are others too, and are sent.
    """
    problems = iter(load_problems(QUESTIONS / "train.jsonl"))
    messages: list[dict[str, str]] = []
    known, n_held = Known(), 0
    for turn in TURNS:
        restart_before(turn, pair, known)
        messages.append({"role": "user", "content": " ".join(next(problems).question for _ in range(4))})
        prompt = tokenized(pair.d, messages)
        ours, theirs = chat(pair.d, messages), chat(plain.d, messages)
        known.check(ours, theirs, prompt, layout)
        n_held += ours.held_nbytes
        known = Known(prompt, [*prompt, *computed_ids(plain.d, prompt)])
        messages.append({"role": "assistant", "content": ours.content[0]})
    assert n_held > 0
    pair.wait_all_free()


def tokenized(node: Node, messages: Sequence[dict[str, str]]) -> list[int]:
    ids: list[int] = node.http.post("/tokenize", json={"messages": messages}).raise_for_status().json()["tokens"]
    return ids


def computed_ids(node: Node, prompt: Tokens) -> list[int]:
    """The tokens of the answer of :func:`chat` that were computed too: all but the one at its end."""
    sampling = {"max_new_tokens": 200, "temperature": 0}
    body = {"input_ids": list(prompt), "sampling_params": sampling}
    answer = node.http.post("/generate", json=body, timeout=ANSWER_S).raise_for_status().json()
    ids: list[int] = answer["output_ids"]
    return ids[:-1]


def test_a_prompt_that_was_asked_before_computes_its_last_page_alone(pair: Pair, plain: Pair) -> None:
    """Also where it ends with a page, of which one token is computed at least."""
    for n in (255, 256, 257, 512, 700, 1024):
        prompt = random_ids(n, n)
        first, again, right = (generate(node, prompt, 8) for node in (pair.d, pair.d, plain.d))
        assert first.content == again.content == right.content, f"{n} tokens"
        assert (first.cached_tokens, again.cached_tokens) == (0, whole_pages(n - 1)), f"{n} tokens"


def test_tenants_share_nothing(pair: Pair) -> None:
    prompt = random_ids(1, 600)
    salts: list[dict[str, str]] = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}]
    first = [generate(pair.d, prompt, 4, **salt) for salt in salts]
    again = [generate(pair.d, prompt, 4, **salt) for salt in salts]
    assert [(told.cached_tokens, told.held_nbytes) for told in first] == [(0, 0)] * 3
    assert all(told.cached_tokens == 512 and told.held_nbytes > 0 for told in again)
    assert len({str(told.content) for told in (*first, *again)}) == 1


def test_what_is_flushed_is_computed_and_sent_again(pair: Pair, plain: Pair) -> None:
    prompt = random_ids(2, 600)
    right = generate(plain.d, prompt, 4)
    assert generate(pair.d, prompt, 4).sent_nbytes == right.sent_nbytes
    pair.wait_all_free()
    assert all(node.counts("pages")["cached"] == 2 for node in pair.nodes)
    flush(pair)
    assert all(node.counts("pages")["free"] == sum(node.counts("pages").values()) for node in pair.nodes)
    told = generate(pair.d, prompt, 4)
    assert (told.content, told.cached_tokens, told.sent_nbytes) == (right.content, 0, right.sent_nbytes)


# --- more than fits ---------------------------------------------------------------------------------------------------

N_REQUESTS, N_PREFIXES = 64, 8


def questions() -> list[Question]:
    rng = random.Random(12)
    prefixes = [random_ids(100 + i, rng.randint(600, 1500)) for i in range(N_PREFIXES)]
    found = []
    for i in range(N_REQUESTS):
        prompt = [*prefixes[i % N_PREFIXES], *random_ids(200 + i, rng.randint(1, 300))]
        sampling = {"temperature": rng.choice((0, 0.8)), "seed": i, "max_tokens": rng.randint(4, 40)}
        found.append(Question("/v1/completions", {"prompt": prompt, **sampling, "ignore_eos": True, "logprobs": 2}))
    rng.shuffle(found)
    return found


def n_pages(asked: Sequence[Question]) -> int:
    """Complete pages of all prompts, equal ones counted once."""
    prompts = [question.body["prompt"] for question in asked]
    return len({tuple(prompt[:stop]) for prompt in prompts for stop in range(PAGE, len(prompt) + 1, PAGE)})


@pytest.mark.timeout(400)
async def test_many_requests_with_few_prefixes_on_pools_of_a_third(tmp_path: Path, plain: Pair) -> None:
    """With clients that go away, a prefill and a decode node that are killed: whatever is answered is right, nothing is
    leaked, and at last everybody is answered.
    """
    asked = questions()
    right = [await ask(plain.d.url, question, timeout_s=ANSWER_S) for question in asked]
    assert {outcome.end for outcome in right} == {End.ANSWERED}
    sizes = ("--slots", "4", "--pages", str(n_pages(asked) // 3))
    with process_pair(tmp_path, (*PREFILL, *sizes), (*DECODE, *sizes)) as pair:
        for event in (
            Event(Kind.QUIET, "", 0, 0, 1),
            Event(Kind.KILL, "prefill0", 0, 0, 2),
            Event(Kind.KILL, "decode", 0, 0, 3),
        ):
            outcomes = await disturbed(pair, asked, event)
            wrong = [judge(*each, event) for each in zip(asked, outcomes, right, strict=True)]
            assert not any(wrong), next(filter(None, wrong))
            await asyncio.to_thread(pair.heal)
        outcomes = await disturbed(pair, asked, Event(Kind.QUIET, "", 0, 0, 4), leaving=0.0)
        assert [outcome.choices for outcome in outcomes] == [outcome.choices for outcome in right]
        await asyncio.to_thread(check_caches, pair)


async def disturbed(pair: Pair, asked: Sequence[Question], event: Event, leaving: float = 0.3) -> list[Outcome]:
    """All at once, of whom some go away. When a third have ended a node is killed, if ``event`` says so, and started
    again.
    """
    rng = random.Random(event.seed)

    async def client(question: Question) -> Outcome:
        leave_s = rng.uniform(0, 3.0) if rng.random() < leaving else None
        return await ask(pair.d.url, question, stream=rng.random() < 0.5, leave_s=leave_s, timeout_s=ANSWER_S)

    clients = [asyncio.create_task(client(question)) for question in asked]
    if event.kind is Kind.KILL:
        await waiting.until(lambda: 3 * sum(client.done() for client in clients) > len(clients), ANSWER_S)
        node = pair.d if event.target == "decode" else pair.p
        node.kill()
        node.start()
    return list(await asyncio.gather(*clients))


def check_caches(pair: Pair) -> None:
    """Prefixes were found and held, others evicted for want of room; and nothing is anybody's when all is over."""
    pair.wait_all_free()
    for node in pair.nodes:
        counts = node.counts("pages")
        assert counts["free"] + counts["cached"] == sum(counts.values()), counts
        assert node.metrics()["pd_prefix_evicted_total{what=page}"] > 0, node.name
        assert node.metrics()["pd_prefix_damaged_total"] == 0, node.name
    assert pair.p.metrics()["pd_prefix_reused_tokens_total"] > 0
    assert sum(pair.d.samples("pd_prefix_held_bytes_total").values()) > 0
    flush(pair)
    for node in pair.nodes:
        assert node.counts("pages")["free"] == sum(node.counts("pages").values()), node.name
