"""``--memory``: what it gives, what it refuses, and what is said of it at start-up."""

from __future__ import annotations

import argparse
import re
from typing import Any

import pytest

from server.cache.specs import LayoutError
from server.model.config import load_config
from server.model.weight_sizes import weight_sizes
from server.node.build import build_resources
from server.node.cli import parse
from server.node.free_memory import FreeMemory, memory_limit
from server.node.memory_plan import LIBRARIES_NBYTES, MemoryPlan, plan_memory
from server.node.options import BUNDLED_MODEL, PAGES, SLOTS, NodeOptions
from server.sizes import size

FREE = FreeMemory(4 << 30, "of this machine")


def plan_of(
    memory: str | None = None,
    free: FreeMemory | None = FREE,
    *,
    takes_snapshots: bool = False,
    **options: Any,
) -> MemoryPlan:
    limit = None if memory is None else memory_limit(memory)
    return plan_memory(
        load_config(BUNDLED_MODEL),
        NodeOptions(memory=limit, **options),
        free,
        draft=True,
        spec_tokens=3,
        takes_snapshots=takes_snapshots,
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


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "1.5 apples", "nan", "inf"])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"neither a part of what is free, such as 0\.8, nor bytes"):
        memory_limit(text)


def test_packed_weights_count_as_what_they_may_take() -> None:
    config, options = load_config(BUNDLED_MODEL), NodeOptions()
    whole = plan_memory(config, options, None, draft=True, spec_tokens=0)
    small = weight_sizes(config, "float32", draft=True, packed=True)
    every = small.loaded + small.mapped
    for budget, loaded in ((1, small.loaded), (1 << 20, 1 << 20), (1 << 30, every)):
        plan = plan_memory(config, options, None, draft=True, spec_tokens=0, packed_memory=budget)
        assert (plan.weights.loaded, plan.weights.mapped) == (loaded, every - loaded)
        assert (f"{size(every - loaded)} more stay in their files" in plan.parts()) is (loaded < every)
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


def test_a_node_is_built_as_planned() -> None:
    plan = plan_of("560MiB", slots=3)
    options = NodeOptions(memory=memory_limit("560MiB"), slots=3)
    resources = build_resources("decode", options, draft=True, spec_tokens=3)
    layout = resources.context.arena.layout
    assert resources.context.arena.nbytes == plan.pools
    assert (layout.component("c4_kv").items - 1, layout.component("swa").items - 1) == (plan.pages, 3)
    assert resources.settings.max_context == plan.context


def test_snapshots_get_an_eighth_of_the_pages_or_one_for_each_slot() -> None:
    many_pages, many_slots = plan_of(takes_snapshots=True, slots=1), plan_of(takes_snapshots=True, pages=1)
    one = many_slots.snapshots.one_nbytes
    assert 0 < one < many_slots.slot_nbytes
    assert many_pages.snapshots.nbytes == PAGES * many_pages.page_nbytes // 8
    assert many_slots.snapshots.nbytes == SLOTS * one
    assert plan_of(takes_snapshots=True, prefix_cache=5000).snapshots.nbytes == 5000
    for without in (plan_of(), plan_of(takes_snapshots=True, prefix_cache="off")):
        assert without.snapshots.nbytes == 0


def test_snapshots_are_in_the_plan() -> None:
    plan, without = plan_of(takes_snapshots=True), plan_of()
    assert plan.total == without.total + plan.snapshots.nbytes
    assert f", {size(plan.snapshots.nbytes)} snapshots, about " in plan.parts()
    assert f"snapshots of prefixes {plan.snapshots.one_nbytes:,} B, at most {SLOTS} at once" in plan.lines()
    assert not any("snapshots" in line for line in without.lines())
    with pytest.raises(LayoutError, match=r"8\.0 GiB snapshots.* 4\.0 GiB free"):
        plan_of(takes_snapshots=True, prefix_cache=8 << 30)


@pytest.mark.parametrize("memory", ["600MiB", "700MB", "0.2", "1"])
@pytest.mark.parametrize("budget", ["auto", 20 << 20])
def test_pools_and_snapshots_share_what_memory_allows(memory: str, budget: str | int) -> None:
    allowed = memory_limit(memory).of(FREE)
    plan = plan_of(memory, takes_snapshots=True, prefix_cache=budget)
    assert plan.total <= allowed
    assert plan.total > 0.98 * allowed or plan.pages == plan.slots * 33
    assert plan.snapshots.nbytes == budget or plan.snapshots.nbytes >= plan.pages * plan.page_nbytes // 8
    assert plan.snapshots.nbytes >= plan.slots * plan.snapshots.one_nbytes or budget != "auto"


def test_memory_that_snapshots_leave_nothing_of_is_refused_with_the_numbers() -> None:
    with pytest.raises(LayoutError, match="of which 7 MiB weights and about 500 MiB libraries and 90 MiB snapshots"):
        plan_of("596MiB", takes_snapshots=True, prefix_cache=90 << 20)


@pytest.mark.parametrize(
    ("words", "pages", "snapshots"),
    [
        ([], None, True),
        (["--prefix-cache", "10MiB"], 10 * 1024 * 1024 // 24832, True),
        (["--prefix-cache", "off"], 0, False),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_has_the_cache_that_was_planned(role: str, words: list[str], pages: int | None, snapshots: bool) -> None:
    resources = build_resources(role, parse(NodeOptions, "node", "", words), draft=True)
    cache, facts = resources.context.prefix_cache, resources.settings.facts["prefix_cache"]
    if not snapshots:
        assert cache is None
        assert facts is None
        return
    assert cache is not None
    assert cache.max_pages == pages
    assert (cache.snapshot_nbytes > 0) is (role == "prefill")
    assert facts == {
        "max_cached_pages": pages,
        "max_snapshot_bytes": cache.snapshot_nbytes,
        "hits": "exact, bit for bit",
    }


def test_what_decides_about_bytes_decides_about_keys() -> None:
    """A cache is one process's, but its keys are compared where two prompts are: they must tell nodes apart."""
    roots = set()
    for words in ([], ["--dtype", "bfloat16"], ["--kv-dtype", "fp8"], ["--no-deterministic"], ["--page-size", "512"]):
        for draft in (False, True):
            cache = build_resources("prefill", parse(NodeOptions, "node", "", words), draft=draft).context.prefix_cache
            assert cache is not None
            roots |= {cache.keys_of([]).root, cache.keys_of([], "salt").root}
    assert len(roots) == 20


def test_a_node_without_prefixes_keeps_none() -> None:
    assert build_resources("decode", NodeOptions(), reuses_prefixes=False).context.prefix_cache is None
