"""The bytes of quantized rows: sizes, offsets, and what they make of a request's state."""

from __future__ import annotations

import pytest

from server.cache.row_formats import Fp8IndexRow, Fp8KvRow, Mxfp4IndexRow, chosen_index_dtype
from server.cache.specs import CacheGeometry, ComponentSpec, LayoutError, Scope


def test_rows_of_the_released_models_have_the_bytes_that_engines_store() -> None:
    kv, mxfp4, fp8 = Fp8KvRow(448, 64), Mxfp4IndexRow(128), Fp8IndexRow(128)
    assert (kv.rope_offset, kv.scale_offset, kv.n_scales, kv.nbytes) == (448, 576, 7, 584)
    assert (mxfp4.scale_offset, mxfp4.n_scales, mxfp4.nbytes) == (64, 4, 68)
    assert (fp8.scale_offset, fp8.nbytes) == (128, 132)


def test_small_widths_have_smaller_blocks() -> None:
    kv, mxfp4, fp8 = Fp8KvRow(24, 8), Mxfp4IndexRow(16), Fp8IndexRow(16)
    assert (kv.block, kv.rope_offset, kv.scale_offset, kv.n_scales, kv.nbytes) == (8, 24, 40, 3, 48)
    assert (mxfp4.block, mxfp4.scale_offset, mxfp4.n_scales, mxfp4.nbytes) == (16, 8, 1, 9)
    assert (fp8.scale_offset, fp8.nbytes) == (16, 20)


def test_a_head_may_be_all_rope() -> None:
    assert (Fp8KvRow(0, 8).n_scales, Fp8KvRow(0, 8).nbytes) == (0, 16)


@pytest.mark.parametrize(
    ("kv_dtype", "index_dtype", "chosen"),
    [
        ("model", "auto", "model"),
        ("fp8", "auto", "mxfp4"),
        ("fp8", "model", "model"),
        ("model", "fp8", "fp8"),
        ("model", "mxfp4", "mxfp4"),
    ],
)
def test_the_index_follows_the_rows_unless_it_is_named(kv_dtype: str, index_dtype: str, chosen: str) -> None:
    assert chosen_index_dtype(kv_dtype, index_dtype) == chosen


def test_a_page_too_small_to_keep_rows_aligned_is_refused() -> None:
    index = ComponentSpec("c4_index", Scope.PAGE, 4, (1,), Mxfp4IndexRow(16).nbytes, "mxfp4_index")
    with pytest.raises(LayoutError, match="c4_index rows of a page of 8 tokens take 18 bytes"):
        CacheGeometry(8, 4, 4, 16, 0, (index,))
    CacheGeometry(16, 4, 4, 16, 0, (index,))
