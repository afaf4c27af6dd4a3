"""Faults that users of PD servers have reported, and what shows here that they cannot happen again.

Each entry is staged by scripts/faults.py, or has tests, or both, or a sentence that says why it cannot happen here.
The ids are those of public trackers: sgl SGLang, vl vLLM, mc Mooncake, ds DeepSeek, tks TokenSpeed, llmd llm-d, tt and
trt TensorRT-LLM, dyn Dynamo, ft FastTransformer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import faults_cases_hangs as hangs
import faults_cases_wrong as wrong
from faults_stage import Stage

Play = Callable[[Stage], Awaitable[list[str]]]


@dataclass(frozen=True)
class Entry:
    """One kind of fault. ``ids`` are its reports; ``play`` stages it; ``tests`` are files that show it otherwise."""

    ids: tuple[str, ...]
    happened: str
    here: str
    """What shows here, or why it cannot happen."""
    play: Play | None = None
    tests: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.ids[0]


ENTRIES = (
    Entry(
        ("sgl-24878",),
        "sliding-window, compressor and indexer state never sent; a prompt of 18 tokens answers another question",
        "the room fails by the component's name; n = 18 is in every parity test",
        wrong.state_never_sent,
        ("tests/e2e/test_parity.py", "tests/e2e/test_faults.py"),
    ),
    Entry(
        ("sgl-30461", "sgl-23539", "vl-54926"),
        "the draft layer's own state not registered; fewer accepted drafts at the start",
        "`draft_swa` is a component like any other; accept lengths equal one process's",
        wrong.draft_state_not_registered,
        ("tests/e2e/test_draft.py",),
    ),
    Entry(
        ("sgl-30222",),
        "decode has a draft layer, prefill has none: accepted silently",
        "refused at the handshake by the component's name",
        wrong.prefill_without_draft,
        ("tests/e2e/test_refusals.py",),
    ),
    Entry(
        ("sgl-24888", "sgl-37840"),
        "ring or item size differs; the sender's stride used for both sides",
        "rows are paired by logical position, each side with its own ring; another dtype is refused",
        wrong.rings_and_dtypes,
        ("tests/transfer/test_plan.py", "tests/transfer/test_manifest.py"),
    ),
    Entry(
        ("sgl-30890",),
        "a state write failed, its return code was dropped, the room said success",
        "the room fails by the component's name",
        wrong.failed_write,
        ("tests/nodes/test_mooncake_traps.py",),
    ),
    Entry(
        ("sgl-30233",),
        "prefill refuses a prompt that is too long, decode goes on with an incomplete cache",
        "HTTP 400 at once, both sides clean",
        wrong.prompt_too_long_for_prefill,
    ),
    Entry(
        ("sgl-24527", "sgl-35049"),
        "decode aborts and reuses pages while prefill still writes",
        "quarantine until prefill has said `Quiesced`",
        wrong.abort_while_writing,
        ("tests/e2e/test_aborts.py", "tests/nodes/test_mooncake_traps.py"),
    ),
    Entry(
        ("mc-4247",),
        "a batch call returns a failure, then goes on writing",
        "writes of unknown fate: the session is fenced before the memory is free",
        wrong.write_after_failure,
        ("tests/nodes/test_mooncake.py",),
    ),
    Entry(
        ("mc-2086",),
        "a write reported done before it was applied",
        "the digest is taken over the decode node's own memory, at the commit",
        wrong.done_before_applied,
    ),
    Entry(
        ("vl-52234",),
        "a stale slot reference delivers the previous prompt's answer, HTTP 200",
        "slots are stamped with room and epoch; the hand-off row has room, epoch and prompt hash",
        wrong.stale_slot,
    ),
    Entry(
        ("sgl-17259",),
        "the metadata row of another request read: a slot was reused early",
        "64 rooms at once on few slots: every first token right",
        wrong.metadata_of_another,
    ),
    Entry(
        ("sgl-31901",),
        "the index space of one pool used for another",
        "owner stamps; pages and slots are permuted in the tests",
        wrong.index_of_another_pool,
        ("tests/e2e/test_fault_places.py",),
    ),
    Entry(
        ("sgl-34189",),
        "more draft tokens than the state ring can undo",
        "refused at start",
        wrong.too_many_drafts,
        ("tests/engine/test_speculation.py",),
    ),
    Entry(
        ("sgl-12151",),
        "the first token was EOS, or max_tokens 1, or completed a stop string; decode went on",
        "finish conditions apply to the first token as to any other",
        wrong.finish_at_the_first_token,
        ("tests/e2e/test_parity.py",),
    ),
    Entry(
        ("sgl-33397",),
        "greedy output differs with the batch size",
        "results do not depend on the batch, to the last bit",
        wrong.batch_of_one_and_eight,
        ("tests/model/test_batch_invariance.py",),
    ),
    Entry(
        ("ds-2181",),
        "state sent before the kernel that produces it had finished",
        "on a CPU there is no such gap; on CUDA the engine synchronizes the device before it tells of a chunk and "
        "before it takes the digests (not tried: no CUDA device)",
    ),
    Entry(
        ("sgl-28651",),
        "prefill aborts, decode is not told and waits 300 s",
        "the other side is told at once, and again until it has answered",
        hangs.prefill_gives_up,
        ("tests/nodes/test_failures.py",),
    ),
    Entry(
        ("sgl-27162", "sgl-33043"),
        "one exception ends a worker or the bootstrap thread; everything after it hangs",
        "frames that cannot be handled are dropped and counted, an exception fails its room alone",
        hangs.exceptions_in_workers,
        ("tests/nodes/test_failures.py",),
    ),
    Entry(
        ("sgl-31800",),
        "no deadline while transferring; slots leak",
        "every phase has a deadline",
        hangs.deadline_while_transferring,
    ),
    Entry(
        ("sgl-13054", "sgl-35823"),
        "a restarted peer stays blacklisted for ever",
        "the next request after the restart works",
        hangs.restarted_peer,
        ("tests/e2e/test_processes.py", "tests/nodes/test_mooncake_traps.py"),
    ),
    Entry(
        ("sgl-40125",),
        "the same room twice crashes both processes",
        "the second one is refused with 409",
        hangs.same_room_twice,
        ("tests/nodes/test_routed_rooms.py",),
    ),
    Entry(
        ("sgl-26486",),
        "n > 1 shares one room",
        "a room for each sample",
        hangs.a_room_a_sample,
    ),
    Entry(
        ("tks-1427",),
        "a deadline measured the peer's queue: healthy requests failed",
        "deadlines count from the last sign of life",
        hangs.deadline_of_a_queue,
    ),
    Entry(
        ("llmd-2427", "tt-3988"),
        "no prefill ready: decode computes alone, silently; even the PD tests never used prefill",
        "503; every answer names its prefill node, and tests look",
        hangs.no_prefill,
        ("tests/e2e/test_refusals.py",),
    ),
    Entry(
        ("trt-12542", "trt-16402"),
        "wedged while /health said 200",
        "/ready makes a real transfer",
        hangs.ready_is_a_transfer,
        ("tests/e2e/test_processes.py",),
    ),
    Entry(
        ("trt-12313",),
        "cancelled requests leak blocks",
        "free counts return to the start after aborts in every phase",
        hangs.cancels,
        ("tests/e2e/test_aborts.py",),
    ),
    Entry(
        ("dyn-4917",),
        "SIGTERM on prefill drops transfers in flight",
        "drain, then exit code 0",
        hangs.drain,
    ),
    Entry(
        ("sgl-19900",),
        "an unreachable peer froze decode",
        "other requests go on",
        hangs.unreachable_peer,
    ),
    Entry(
        ("sgl-7338",),
        "'might be dead' where the cause was elsewhere",
        "the reason is the cause, with the values",
        hangs.reason_is_the_cause,
    ),
    Entry(
        ("CVE-2025-32444",),
        "pickle on a ZMQ port runs a stranger's code (and four more like it)",
        "typed, size-capped messages; nothing is unpickled; frames of strangers are dropped and counted",
        hangs.pickle_on_the_port,
        ("tests/transfer/test_protocol.py",),
    ),
    Entry(
        ("sgl-40298", "ft-7464"),
        "log probabilities of the first token lost",
        "they travel in the hand-off row",
        wrong.first_logprobs,
        ("tests/e2e/test_openai.py",),
    ),
    Entry(
        ("vl-24910",),
        "one client's big body, list, header or text stops every other request",
        "bounded before it is read or worked on; the work runs off the event loop, apart from other requests' work",
        tests=("tests/scripts/test_fuzz.py", "tests/api/test_http_limits.py", "tests/api/test_lanes.py"),
    ),
    Entry(
        ("vl-48853",),
        "the prompt's text at the start of the answer when the prompt ends inside a character",
        "the answer is never the text of the prompt; a character begun by the prompt is given out once, whole",
        tests=("tests/engine/test_detokenizer.py",),
    ),
    Entry(
        ("vl-56101",),
        "draft counters count tokens that were cut off behind the end of the answer",
        "counted is what the client gets",
        tests=("tests/engine/test_speculation.py",),
    ),
    Entry(
        ("vl-19368",),
        "text offsets computed from the length of a placeholder of an unfinished character",
        "a token begins where the character of its first byte is",
        tests=("tests/engine/test_detokenizer.py", "tests/engine/test_stopping.py", "tests/api/test_completions.py"),
    ),
    Entry(
        ("vl-53975",),
        "fields of a request ignored silently",
        "refused by name, or named in the header `x-ignored-fields`",
        tests=("tests/api/test_fields.py",),
    ),
    Entry(
        ("trt-4583",),
        "a second BOS where the template or the client has put one already",
        "a text that begins with BOS gets no second one",
        tests=("tests/engine/test_tokenizer.py",),
    ),
    Entry(
        ("sgl-7858",),
        "an IPv6 address is cut at its first colon",
        "one place takes addresses apart; a pair serves over ::1",
        tests=("tests/e2e/test_ipv6.py",),
    ),
    Entry(
        ("llmd-1564",),
        "the server's keep-alive is shorter than the proxy's: requests meet a connection that has just been closed",
        "`--keep-alive` is at least as long as what proxies and cloud balancers keep, unless told otherwise",
        tests=("tests/node/test_options.py", "tests/api/test_http_limits.py"),
    ),
)


def find(name: str) -> Entry:
    """The entry of an id. Raises :class:`KeyError`."""
    for entry in ENTRIES:
        if name in entry.ids:
            return entry
    raise KeyError(name)


def table() -> str:
    """Every id with what shows it, as markdown."""
    lines = ["| report | what happened | here | shown by |", "|---|---|---|---|"]
    for entry in ENTRIES:
        shown = [f"`faults.py run {entry.name}`"] if entry.play else []
        shown += [f"`{test}`" for test in entry.tests]
        lines.append(f"| {', '.join(entry.ids)} | {entry.happened} | {entry.here} | {', '.join(shown) or '-'} |")
    return "\n".join(lines)
