"""Wrong answers without an error, as they happened elsewhere, staged here. Each play returns what fired."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from cluster import Node
from cluster.asking import VOCABULARY, End, Outcome, Question
from hostile.rogue_peer import RogueFailed, rogue_peer
from msgspec.structs import replace

from fault_cases.reports import Seen, staged
from fault_cases.stage import Silent, Stage, expect, question
from server.transfer.manifest import Manifest

LONG = 700
"""Tokens of a prompt that takes more than one chunk and page."""


@staged(
    ("sgl-24878",),
    happened="sliding-window, compressor and indexer state never sent; a prompt of 18 tokens answers another question",
    here="the room fails by the component's name; n = 18 is in every parity test",
    tests=("tests/e2e/test_parity.py", "tests/e2e/test_faults.py"),
)
async def state_never_sent(stage: Stage) -> Seen:
    """18 tokens, and the sliding window, a compressor's and the indexer's state do not go over."""
    names = ("swa", "c4_state_b", "c4_index_state_b")
    seen = [await stage.refused(f"drop:{name}", "digest", name, 18) for name in names]
    seen.append(await stage.refused("forget:c4_index_state_a", "coverage", "c4_index_state_a", 18))
    await stage.right(question(18, 1))
    return [*seen, "without a fault, 18 tokens are answered as by one process"]


@staged(
    ("sgl-30461", "sgl-23539", "vl-54926"),
    happened="the draft layer's own state not registered; fewer accepted drafts at the start",
    here="`draft_swa` is a component like any other; accept lengths equal one process's",
    tests=("tests/e2e/test_draft.py",),
)
async def draft_state_not_registered(stage: Stage) -> Seen:
    seen = [
        await stage.refused("forget:draft_swa", "coverage", "draft_swa"),
        await stage.refused("drop:draft_swa", "digest", "draft_swa"),
    ]
    return seen


@staged(
    ("sgl-30222",),
    happened="decode has a draft layer, prefill has none: accepted silently",
    here="refused at the handshake by the component's name",
    tests=("tests/e2e/test_refusals.py",),
)
async def prefill_without_draft(stage: Stage) -> Seen:
    """A prefill node with ``--draft off`` and a decode node that reads the draft's window."""
    async with stage.another_prefill("--draft", "off") as another:
        return [await _refused(another, "components.draft_swa")]


@staged(
    ("sgl-24888", "sgl-37840"),
    happened="ring or item size differs; the sender's stride used for both sides",
    here="rows are paired by logical position, each side with its own ring; another dtype is refused",
    tests=("tests/transfer/test_plan.py", "tests/transfer/test_manifest.py"),
)
async def rings_and_dtypes(stage: Stage) -> Seen:
    """P's rings have no room for drafts, D's have: paired by position. Another dtype is refused."""
    seen = [await _refused(stage.prefill, "dtype", lambda manifest: replace(manifest, dtype="bfloat16"))]
    for n in (1, 64, 257):
        await stage.right(question(n, 2))
    return [*seen, "rings of different sizes (P drafts nothing, D 3 tokens a step): answers as by one process"]


@staged(
    ("sgl-30890",),
    happened="a state write failed, its return code was dropped, the room said success",
    here="the room fails by the component's name",
    tests=("tests/nodes/test_mooncake_traps.py",),
)
async def failed_write(stage: Stage) -> Seen:
    """One component's writes fail: the room must. (The pieces of a full page carry several components.)"""
    seen = []
    for name in ("swa", "c4_kv", "c128_state", "handoff"):
        stage.arm(prefill=[f"fail-writes:{name}:1"])
        outcome = await stage.ask(question(100, 3))
        expect(outcome.status == 502 and outcome.error.get("code") == "transfer_failed", f"{name}: {outcome}")
        expect(outcome.error.get("component") == name, f"the error does not name {name}: {outcome}")
        seen.append(f"a write of {name} fails: HTTP 502 transfer_failed names it")
    return seen


@staged(
    ("sgl-30233",),
    happened="prefill refuses a prompt that is too long, decode goes on with an incomplete cache",
    here="HTTP 400 at once, both sides clean",
)
async def prompt_too_long_for_prefill(stage: Stage) -> Seen:
    """16 pages on P, 64 on D: P cannot compute 5000 tokens."""
    outcome = await stage.ask(question(5000, max_tokens=1))
    expect(outcome.status == 400, f"expected HTTP 400: {outcome}")
    await stage.free_again()
    return [f"HTTP 400 {outcome.error['code']} in {outcome.seconds:.2f} s, both nodes hold nothing"]


@staged(
    ("sgl-24527", "sgl-35049"),
    happened="decode aborts and reuses pages while prefill still writes",
    here="quarantine until prefill has said `Quiesced`",
    tests=("tests/e2e/test_aborts.py", "tests/nodes/test_mooncake_traps.py"),
)
async def abort_while_writing(stage: Stage) -> Seen:
    """The client goes away while P's writes are held back; D must not give the memory away before they ended."""
    for patience_s in (1.0, 2.0, 4.0, 8.0):  # the prompt has to be computed by then
        stage.arm(prefill=["delay-writes:5:1"])
        asked = asyncio.create_task(stage.ask(question(LONG, 4), abort_s=patience_s))
        if await stage.seen(lambda: stage.decode.counts("slots")["quarantined"] == 1, asked):
            break
    else:
        raise Silent("the room's slot never was in quarantine")
    expect((await asked).end is End.ABORTED, "the client did not go away")
    seconds = await stage.free_again()
    await stage.right(question(LONG, 5))
    return [f"quarantine until P said Quiesced, {seconds:.1f} s; the next answer in that memory is right"]


@staged(
    ("mc-4247",),
    happened="a batch call returns a failure, then goes on writing",
    here="writes of unknown fate: the session is fenced before the memory is free",
    tests=("tests/nodes/test_mooncake.py",),
)
async def write_after_failure(stage: Stage) -> Seen:
    """Writes are reported as failed and land a second later."""
    before = (await stage.totals("pd_fences_total")).total()
    stage.arm(prefill=["late-writes:1:1"])
    outcome = await stage.ask(question(LONG, 6))
    expect(outcome.error.get("code") == "transfer_failed", f"expected transfer_failed: {outcome}")
    await stage.free_again()
    fences = (await stage.totals("pd_fences_total")).total() - before
    expect(fences == 1, f"{fences} fences")
    await asyncio.sleep(1.2)  # the late writes
    await stage.calm()
    await stage.right(question(LONG, 7))
    return ["the room fails, the transport session is fenced before its memory is free, the next answer is right"]


@staged(
    ("mc-2086",),
    happened="a write reported done before it was applied",
    here="the digest is taken over the decode node's own memory, at the commit",
)
async def done_before_applied(stage: Stage) -> Seen:
    """The transport says done, and nothing was written."""
    return [await stage.refused(f"drop:{name}@wire", "digest", name) for name in ("swa", "c4_kv")]


@staged(
    ("vl-52234",),
    happened="a stale slot reference delivers the previous prompt's answer, HTTP 200",
    here="slots are stamped with room and epoch; the hand-off row has room, epoch and prompt hash",
)
async def stale_slot(stage: Stage) -> Seen:
    """P sends the state of the room before: the stamp of its slot tells, and behind it the hand-off row."""
    await stage.right(question(200, 8))
    seen = [await stage.refused("stale:handoff@pool", "stamp", "handoff")]
    seen.append(await stage.refused("stale:handoff@pool", "handoff", "handoff", 263, "unchecked:stamp"))
    return seen


@staged(
    ("sgl-17259",),
    happened="the metadata row of another request read: a slot was reused early",
    here="64 rooms at once on few slots: every first token right",
)
async def metadata_of_another(stage: Stage) -> Seen:
    """Many rooms on few slots; then two rooms whose hand-off rows are exchanged."""
    asked = [question(20 + i, 9, max_tokens=1) for i in range(64)]
    outcomes = await asyncio.gather(*(stage.ask(one) for one in asked))
    for one, outcome in zip(asked, outcomes, strict=True):
        await stage.compare(one, outcome)
    stage.arm(prefill=["swap:handoff:2"])
    pair = await asyncio.gather(*(stage.ask(question(263, seed)) for seed in (10, 11)))
    named = [(outcome.status, outcome.error.get("component")) for outcome in pair]
    expect(named == [(502, "handoff")] * 2, f"exchanged rows: {[str(outcome) for outcome in pair]}")
    return [
        "64 rooms at once on 2 and 8 slots: every first token right",
        "exchanged rows: HTTP 502 names handoff, twice",
    ]


@staged(
    ("sgl-31901",),
    happened="the index space of one pool used for another",
    here="owner stamps; pages and slots are permuted in the tests",
    tests=("tests/e2e/test_faults.py",),
)
async def index_of_another_pool(stage: Stage) -> Seen:
    """The copy plan takes the next slot or page. (Ids are permuted on both nodes in every entry here.)"""
    names = ("c4_kv", "c128_kv", "swa")
    return [await stage.refused(f"shift:{name}@pool", "stamp", name) for name in names]


@staged(
    ("sgl-34189",),
    happened="more draft tokens than the state ring can undo",
    here="refused at start",
    tests=("tests/engine/test_speculation.py",),
)
async def too_many_drafts(stage: Stage) -> Seen:
    """More draft tokens than the rings can undo."""
    process = await asyncio.create_subprocess_exec(
        *stage.decode.command,
        "--spec-tokens",
        "99",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await process.communicate()
    said = stderr.decode().strip().splitlines()[-1]
    expect(process.returncode == 2 and "99" in said, f"exit code {process.returncode}: {said}")
    return [f"refused at start, exit code 2: {said}"]


@staged(
    ("sgl-12151",),
    happened="the first token was EOS, or max_tokens 1, or completed a stop string; decode went on",
    here="finish conditions apply to the first token as to any other",
    tests=("tests/e2e/test_parity.py",),
)
async def finish_at_the_first_token(stage: Stage) -> Seen:
    """The first token ends the answer: by its number, as a stop token, as a stop string."""
    asked = question(50, 12, max_tokens=1)
    first = await stage.right(asked)
    expect(first.choices[0].finish_reason == "length", f"finish reason {first.choices[0].finish_reason}")
    text = first.choices[0].text
    stop: dict[str, Any] = {**asked.body, "max_tokens": 20, "stop": [text]}
    stopped = await stage.right(Question(asked.path, stop))
    expect(stopped.choices[0].finish_reason == "stop", f"finish reason {stopped.choices[0].finish_reason}")
    some = list(VOCABULARY)
    every: dict[str, Any] = {**asked.body, "max_tokens": 20, "allowed_token_ids": some, "stop_token_ids": some}
    ended = await stage.right(Question(asked.path, every))
    expect(ended.choices[0].finish_reason == "stop", f"finish reason {ended.choices[0].finish_reason}")
    return [f"max_tokens 1 (length), stop string {text!r} (stop), stop token ids (stop): as by one process"]


@staged(
    ("sgl-33397",),
    happened="greedy output differs with the batch size",
    here="results do not depend on the batch, to the last bit",
    tests=("tests/model/test_batch_invariance.py",),
)
async def batch_of_one_and_eight(stage: Stage) -> Seen:
    asked = question(100, 13, max_tokens=24)
    alone = await stage.right(asked)
    crowd = [question(60 + 20 * i, 14, max_tokens=24) for i in range(7)]
    together, *_ = await asyncio.gather(stage.ask(asked), *(stage.ask(one) for one in crowd))
    await stage.compare(asked, together)
    expect(alone.choices == together.choices, "the answer depends on the batch")
    return ["alone and among seven others: the same tokens and log probabilities, to the last bit"]


@staged(
    ("sgl-40298", "ft-7464"),
    happened="log probabilities of the first token lost",
    here="they travel in the hand-off row",
    tests=("tests/e2e/test_openai.py",),
)
async def first_logprobs(stage: Stage) -> Seen:
    """The log probabilities of the token that P chose."""
    for stream in (False, True):
        asked = question(77, 15, logprobs=3)
        outcome: Outcome = await stage.compare(asked, await stage.ask(asked, stream=stream))
        _, logprob, top = outcome.choices[0].tokens[0]
        expect(logprob is not None and len(top) >= 3, f"the first token has {logprob}, {top}")
    return ["the first token's log probability and the best three, whole and streamed, as by one process"]


async def _refused(prefill: Node, field: str, change: Callable[[Manifest], Manifest] | None = None) -> str:
    """A decode node whose manifest differs from P's in ``field`` is refused by that name."""
    try:
        async with rogue_peer(prefill, change=change or (lambda manifest: manifest)):
            raise Silent(f"a decode node that differs in {field} was accepted")
    except RogueFailed as refusal:
        expect(f"field='{field}'" in str(refusal), f"refused for another reason: {refusal}")
        return f"refused at the handshake: {refusal}"
