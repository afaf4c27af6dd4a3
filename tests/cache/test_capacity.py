"""Pages and slots that fit into a number of bytes, and requests that fit into them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from server.cache.capacity import MAX_SLOTS, fitted, most_at_once, page_nbytes, pages_for, slot_nbytes
from server.cache.layout import ArenaLayout
from server.cache.specs import CacheGeometry, ComponentSpec, LayoutError, Scope
from server.model.config import load_config
from server.model.state import state_components
from server.node.options import BUNDLED_MODEL

LONGEST = 8192


@pytest.fixture(scope="module")
def geometry() -> CacheGeometry:
    config = load_config(BUNDLED_MODEL)
    return CacheGeometry(256, 2, 2, config.sliding_window, 3, state_components(config, "float32", 3, draft=True))


def nbytes_of(geometry: CacheGeometry) -> int:
    return ArenaLayout.from_geometry(geometry).nbytes


@pytest.mark.parametrize("nbytes", [500_000, 2_000_000, 10_000_000, 77_777_777, 250_000_000])
@pytest.mark.parametrize("given", [{}, {"slots": 2}, {"pages": 3}])
def test_what_is_fitted_fits_and_one_more_of_each_would_not(
    geometry: CacheGeometry, nbytes: int, given: dict[str, int]
) -> None:
    fit = fitted(geometry, nbytes, LONGEST, **given)
    assert nbytes_of(fit) <= nbytes
    n_slots, n_pages = fit.slots - 1, fit.pages - 1
    for name, n in given.items():
        assert {"slots": n_slots, "pages": n_pages}[name] == n
    is_full = nbytes_of(replace(fit, pages=fit.pages + 1, slots=fit.slots + 1)) > nbytes
    assert is_full or n_slots == MAX_SLOTS or n_pages == n_slots * pages_for(LONGEST, 256)


def test_pages_that_no_request_could_use_are_not_made(geometry: CacheGeometry) -> None:
    fit = fitted(geometry, 1 << 40, LONGEST)
    assert (fit.slots - 1, fit.pages - 1) == (MAX_SLOTS, MAX_SLOTS * 32)


def test_more_slots_than_are_chosen_can_be_asked_for(geometry: CacheGeometry) -> None:
    assert fitted(geometry, 1 << 40, LONGEST, slots=1000).slots == 1001


def test_what_does_not_fit_is_refused_with_the_numbers(geometry: CacheGeometry) -> None:
    least = nbytes_of(geometry)
    assert fitted(geometry, least + 4096, LONGEST).pages == 2
    with pytest.raises(LayoutError, match=r"\d+ KiB are left for pools, and one more page of 24 KiB and one more slot"):
        fitted(geometry, least - 1, LONGEST)
    with pytest.raises(LayoutError, match="do not fit"):
        fitted(geometry, 10_000_000, LONGEST, pages=1000)
    with pytest.raises(LayoutError, match="0 B are left"):
        fitted(geometry, -5, LONGEST)


def test_requests_at_once_are_bounded_by_slots_and_by_pages(geometry: CacheGeometry) -> None:
    some = replace(geometry, slots=5, pages=9)
    assert [most_at_once(some, n) for n in (1, 253, 254, 509, 2045, 2046)] == [4, 4, 4, 4, 1, 0]
    assert most_at_once(replace(some, slots=20), 253) == 8


def test_sizes_are_those_of_the_layout(geometry: CacheGeometry) -> None:
    layout = ArenaLayout.from_geometry(geometry)
    assert page_nbytes(geometry) == layout.page_nbytes
    more = ArenaLayout.from_geometry(replace(geometry, slots=66))
    assert more.nbytes - layout.nbytes == 64 * slot_nbytes(geometry)


def test_sizes_that_are_not_aligned_fit_too() -> None:
    slots = [ComponentSpec(f"part_{i}", Scope.SLOT, 1, (0,), 7, "uint8", ring=1) for i in range(6)]
    page = ComponentSpec("c4_kv", Scope.PAGE, 4, (0,), 5, "uint8")
    odd = CacheGeometry(128, 2, 2, 64, 0, (page, *slots))
    for nbytes in range(9000, 12000, 7):
        assert nbytes_of(fitted(odd, nbytes, LONGEST, pages=1)) <= nbytes
        assert nbytes_of(fitted(odd, nbytes, 1 << 20, slots=3)) <= nbytes
