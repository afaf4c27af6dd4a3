"""Arrays cut from blocks of large pages: aligned, apart from each other, and alive as long as one of them is."""

from __future__ import annotations

import gc

import torch

from server.kernels.large_pages import ALIGNMENT, BLOCK_NBYTES, LargePages


def test_arrays_are_aligned_and_apart() -> None:
    pages = LargePages()
    sizes = [1, 64, 65, 1000, BLOCK_NBYTES - 4096, 4096, BLOCK_NBYTES + 1, 7]
    arrays = [pages.take(size) for size in sizes]
    assert [len(array) for array in arrays] == sizes
    assert all(array.data_ptr() % ALIGNMENT == 0 for array in arrays)
    for i, array in enumerate(arrays):
        array[0] = array[-1] = i
    assert all(int(array[0]) == int(array[-1]) == i for i, array in enumerate(arrays))


def test_arrays_outlive_what_they_were_taken_from() -> None:
    pages = LargePages()
    array = pages.take(1 << 20).fill_(3)
    del pages
    gc.collect()
    assert torch.equal(array, torch.full((1 << 20,), 3, dtype=torch.uint8))
