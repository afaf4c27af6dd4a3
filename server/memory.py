"""Gives freed memory back to the system, which the C library would keep."""

from __future__ import annotations

import ctypes
import threading
import time

_SETTLE_S = 0.5
"""Time for others to release the memory that they were asked to."""
_M_ARENA_MAX = -8
"""From glibc's ``malloc.h``."""
_is_coming = threading.Event()


def keep_one_heap() -> None:
    """Lets all threads take their memory from one heap. For a process that has no other threads yet.

    glibc gives threads heaps of their own, and ``malloc_trim`` leaves the end of those as it is: after large requests
    each keeps up to twice the largest block that it ever freed. Elsewhere than on glibc nothing is done.
    """
    if (set_option := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        set_option(_M_ARENA_MAX, 1)


def give_back_soon() -> None:
    """Returns at once: a search for free memory takes some milliseconds, in a thread of its own."""
    if not _is_coming.is_set():
        _is_coming.set()
        threading.Thread(target=_give_back, name="malloc-trim", daemon=True).start()


def _give_back() -> None:
    time.sleep(_SETTLE_S)
    _is_coming.clear()
    give_back()


def give_back() -> None:
    """Returns when it is done."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc
        trim(0)
