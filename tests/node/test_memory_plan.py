"""``--memory``: what it gives, what it refuses, and what is said of it at start-up."""

from __future__ import annotations

import argparse
import re
from typing import Any

import pytest

from server.cache.specs import LayoutError
from server.model.config import load_config
from server.model.weight_sizes import weight_sizes
from server.node.free_memory import FreeMemory, memory_limit
from server.node.memory_plan import LIBRARIES_NBYTES, MemoryPlan, plan_memory
from server.node.options import BUNDLED_MODEL, PAGES, SLOTS, NodeOptions
from server.sizes import size

FREE = FreeMemory(4 << 30, "of this machine")


def plan_of(memory: str | None = None, free: FreeMemory | None = FREE, **options: Any) -> MemoryPlan:
    limit = None if memory is None else memory_limit(memory)
    return plan_memory(
        load_config(BUNDLED_MODEL), NodeOptions(memory=limit, **options), free, draft=True, spec_tokens=3
    )


def test_without_it_pages_and_slots_are_as_given_or_as_ever() -> None:
    plan = plan_of()
    assert (plan.pages, plan.slots) == (PAGES, SLOTS)
    plan = plan_of(pages=7, slots=5)
    assert (plan.pages, plan.slots, plan.context) == (7, 5, 7 * 256 - 3)


@pytest.mark.parametrize("memory", ["600MiB", "700MB", "0.14", "0.2", "1"])
def test_what_it_gives_fits(memory: str) -> None:
    allowed = memory_limit(memory).of(FREE)
    plan = plan_of(memory)
    assert plan.total <= allowed
    assert plan.total > 0.99 * allowed or plan.pages == plan.slots * 33


def test_explicit_pages_and_slots_win() -> None:
    assert plan_of("700MiB", slots=3).slots == 3
    assert plan_of("700MiB", pages=40).pages == 40
    both = plan_of("700MiB", pages=40, slots=3)
    assert (both.pages, both.slots) == (40, 3)


@pytest.mark.parametrize(
    ("memory", "options", "words"),
    [
        ("500MiB", {}, "--memory 500MiB allows 500 MiB, of which 7 MiB weights and about 500 MiB libraries are needed"),
        ("500MiB", {}, "one more page of 24 KiB and one more slot of 93 KiB do not fit; give a larger --memory"),
        ("600MiB", {"pages": 1_000_000}, "93 MiB are left for pools, and one more page of 24 KiB"),
        ("600MiB", {"pages": 100_000, "slots": 2}, "--memory 600MiB allows 600 MiB, 2.8 GiB are needed (7 MiB weights"),
        ("8GiB", {"pages": 250_000}, " 4.0 GiB free (of this machine): give fewer --pages or --slots, a larger"),
        (None, {"pages": 250_000}, " 4.0 GiB free (of this machine): give fewer --pages or --slots, --dtype bfloat16"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_numbers(memory: str | None, options: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(words)):
        plan_of(memory, **options)


def test_a_part_of_what_is_not_known_is_refused_and_bytes_are_not() -> None:
    with pytest.raises(LayoutError, match=r"--memory 0\.5: this system does not say how much is free; give bytes"):
        plan_of("0.5", free=None)
    assert plan_of("600MiB", free=None).pages > 100


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5 apples", "nan", "inf"])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"neither a part of what is free, such as 0\.8, nor bytes"):
        memory_limit(text)


def test_packed_weights_count_as_what_they_may_take() -> None:
    config, options = load_config(BUNDLED_MODEL), NodeOptions()
    whole = plan_memory(config, options, None, draft=True, spec_tokens=0)
    for most, loaded in ((1 << 20, 1 << 20), (1, None), (1 << 30, None)):
        plan = plan_memory(config, options, None, draft=True, spec_tokens=0, packed_memory=most)
        small = weight_sizes(config, "float32", draft=True, packed=True)
        assert plan.weights.mapped == small.mapped
        assert plan.weights.loaded == (loaded or (small.loaded if most == 1 else small.loaded + small.mapped))
        assert f"{size(small.mapped)} in their files" in plan.parts()
        assert plan.total < whole.total


def test_every_byte_is_in_the_table() -> None:
    plan = plan_of(pages=10, slots=4)
    lines = list(plan.lines())
    rows = [line for line in lines if " rows of " in line]
    assert [row.split()[0] for row in rows] == [spec.name for spec in plan.geometry.components]
    nbytes = 0
    for row in rows:
        found = re.search(r"([\d,]+) rows of +([\d,]+) B a (page|slot) = +([\d,]+) B", row)
        assert found is not None, row
        n_rows, row_nbytes, item = (int(found[i].replace(",", "")) for i in (1, 2, 4))
        assert n_rows * row_nbytes == item
        nbytes += item * (11 if found[3] == "page" else 5)
    assert 0 <= plan.pools - nbytes < 4096 + 64 * len(rows)
    assert plan.total == plan.weights.loaded + plan.pools + LIBRARIES_NBYTES
    assert lines[-1] == "longest prompt 2,556 tokens; requests at once: 1 of 2,048 tokens, 1 of 2,557 tokens"
