"""The live rows, against an oracle that watches which rows the reference state machine really reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.cache.live import LIVE_RULES, live_positions
from server.cache.specs import LayoutError


def rows_read_later(n: int, window: int, horizon: int) -> dict[str, set[int]]:
    """Which rows written by a prompt of n tokens any of the next ``horizon`` steps reads, from the model's
    definition.
    """
    read: dict[str, set[int]] = {name: set() for name in LIVE_RULES}
    for t in range(n, n + horizon):
        read["swa"] |= set(range(max(0, t - window + 1), t))
        read["c4_kv"] |= set(range((t + 1) // 4))
        read["c4_index"] |= set(range((t + 1) // 4))
        read["c128_kv"] |= set(range((t + 1) // 128))
        if t % 4 == 3:  # closes a CSA window: the A halves of the window before, the B halves of this one
            read["c4_state_a"] |= set(range(max(0, t - 7), t - 3))
            read["c4_state_b"] |= set(range(t - 3, t + 1))
        if t % 128 == 127:
            read["c128_state"] |= set(range(t - 127, t + 1))
        read["draft_swa"] |= set(range(max(0, t - window), t))
    entries = {"c4_kv": n // 4, "c4_index": n // 4, "c128_kv": n // 128}
    known = {name: entries.get(name, n) for name in read}
    known["draft_swa"] = n - 1  # row n - 1 needs the token that the decode node draws
    result = {name: {row for row in rows if row < known[name]} for name, rows in read.items()}
    result["c4_index_state_a"], result["c4_index_state_b"] = result["c4_state_a"], result["c4_state_b"]
    result["handoff"] = {0}
    return result


@given(n=st.integers(1, 700), window=st.sampled_from([8, 32, 64, 128]))
def test_live_rows_are_exactly_those_read_later(n: int, window: int) -> None:
    live = live_positions(n, window, LIVE_RULES)
    for name, rows in rows_read_later(n, window, horizon=400).items():
        assert set(live[name]) == rows, name


@pytest.mark.parametrize("n", [0, -1])
def test_a_prompt_has_at_least_one_token(n: int) -> None:
    with pytest.raises(LayoutError, match="at least one token"):
        live_positions(n, 64, ["swa"])


def test_an_unknown_component_is_never_empty() -> None:
    with pytest.raises(LayoutError, match="'c2_kv' has no live rule"):
        live_positions(10, 64, ["swa", "c2_kv"])
