"""Which rows the next step reads.

The one truth that sender, receiver, byte accounting, poison check and tests all call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from server.cache.specs import HANDOFF, LayoutError

LiveRule = Callable[[int, int], range]

LIVE_RULES: dict[str, LiveRule] = {
    # compressed entries: everything closed so far
    "c4_kv": lambda n, window: range(n // 4),
    "c4_index": lambda n, window: range(n // 4),
    "c128_kv": lambda n, window: range(n // 128),
    # a query at n sees n - W + 1 .. n, and its own row is not written yet
    "swa": lambda n, window: range(max(0, n - window + 1), n),
    # the A half of the last closed group is still needed: CSA windows overlap
    "c4_state_a": lambda n, window: range(max(0, 4 * (n // 4) - 4), n),
    "c4_index_state_a": lambda n, window: range(max(0, 4 * (n // 4) - 4), n),
    # the B half only of the open group; empty when none is open, and then declared empty, never skipped
    "c4_state_b": lambda n, window: range(4 * (n // 4), n),
    "c4_index_state_b": lambda n, window: range(4 * (n // 4), n),
    "c128_state": lambda n, window: range(128 * (n // 128), n),
    # the draft's next query is at n - 1
    "draft_swa": lambda n, window: range(max(0, n - window), max(0, n - 1)),
    HANDOFF: lambda n, window: range(1),
}
"""Live rows after a prompt of n tokens with window W: entries for page components, positions for slot components."""


def live_positions(n: int, window: int, names: Iterable[str]) -> dict[str, range]:
    """Live rows of each named component after a prompt of ``n`` tokens (``dsv4`` state minimality: necessary and
    sufficient).

    Returns entry ranges for page components and token-position ranges for slot components, in the order of ``names``.
    Raises :class:`LayoutError` for a name without a rule: an unknown component must never count as empty.
    """
    if n < 1:
        raise LayoutError(f"a prompt has at least one token, got n = {n}")
    live = {}
    for name in names:
        rule = LIVE_RULES.get(name)
        if rule is None:
            raise LayoutError(
                f"component {name!r} has no live rule; add one to LIVE_RULES before it can be transferred"
            )
        live[name] = rule(n, window)
    return live
