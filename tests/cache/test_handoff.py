from __future__ import annotations

import pytest
import torch

from server.cache.arena import Arena
from server.cache.handoff import Handoff, prompt_hash, read_handoff, write_handoff
from server.cache.layout import ArenaLayout, Placement
from server.cache.specs import LayoutError
from tests.transfer.support import make_geometry


def handoff(**changes: object) -> Handoff:
    fields: dict[str, object] = {
        "room": 2**63 - 1,
        "epoch": 7,
        "n": 1025,
        "prompt_hash": prompt_hash([3, 4, 5]),
        "first_token": 42,
        "first_logprob": -0.12345678901234567,
        "top": tuple((i, -float(i) / 3) for i in range(20)),
        "streams": torch.randn(2, 8).bfloat16(),
    }
    return Handoff(**{**fields, **changes})  # type: ignore[arg-type]


def test_what_is_written_is_read_back_exactly() -> None:
    arena, where = Arena(ArenaLayout.from_geometry(make_geometry(dtype="bfloat16")), poison=True), Placement(3, ())
    written = handoff()
    write_handoff(arena, where, written)
    read = read_handoff(arena, where, 2)
    assert torch.equal(read.streams, written.streams)
    for field in ("room", "epoch", "n", "prompt_hash", "first_token", "first_logprob", "top"):
        assert getattr(read, field) == getattr(written, field), field


def test_a_row_that_was_never_written_is_refused() -> None:
    for poison in (True, False):
        arena = Arena(ArenaLayout.from_geometry(make_geometry(dtype="bfloat16")), poison=poison)
        with pytest.raises(LayoutError, match="hand-off row of slot 1 has version"):
            read_handoff(arena, Placement(1, ()), 2)


def test_more_alternatives_than_the_row_holds_are_refused() -> None:
    arena = Arena(ArenaLayout.from_geometry(make_geometry(dtype="bfloat16")))
    with pytest.raises(LayoutError, match="holds 20 alternatives, got 21"):
        write_handoff(arena, Placement(1, ()), handoff(top=tuple((i, 0.0) for i in range(21))))


def test_prompt_hash_sees_order_and_every_id() -> None:
    assert len({prompt_hash(ids) for ids in ([1, 2, 3], [3, 2, 1], [1, 2], [1, 2, 3, 0], [])}) == 5
    assert len(prompt_hash([1])) == 16
