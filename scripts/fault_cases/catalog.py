"""Faults that users of PD servers have reported, and what shows here that they cannot happen again.

Each is staged (:mod:`wrong`, :mod:`hangs`, :mod:`prefixes`), or has tests, or both, or a sentence that says why it
cannot happen here.
"""

from __future__ import annotations

from fault_cases import hangs, prefixes, wrong  # noqa: F401 - their plays fill STAGED
from fault_cases.reports import STAGED, Entry

ENTRIES = (
    *STAGED,
    Entry(
        ("ds-2181",),
        "state sent before the kernel that produces it had finished",
        "on a CPU there is no such gap; on a GPU an event is recorded behind a chunk's last kernel and waited "
        "for before the chunk is told of, and again before the last digests are taken (the order is tested, not a real "
        "GPU)",
        tests=("tests/engine/test_waiting_for_the_device.py",),
    ),
    Entry(
        ("vl-24910",),
        "one client's big body, list, header or text stops every other request",
        "bounded before it is read or worked on; the work runs off the event loop, apart from other requests' work",
        tests=("tests/scripts/fuzzing/test_fuzzing.py", "tests/api/test_http_limits.py", "tests/api/test_lanes.py"),
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
        "`--keep-alive` is at least as long as what proxies and cloud balancers keep, unless an option says otherwise",
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
