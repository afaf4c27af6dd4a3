"""Gives freed memory back to the system, which the C library would keep."""

from __future__ import annotations

import ctypes
import threading
import time

_SETTLE_S = 0.5
"""Until whoever was told to let go of memory has done so."""


def give_back_soon() -> None:
    """Returns at once: a search for free memory takes some milliseconds, in a thread of its own."""
    threading.Thread(target=_give_back, name="malloc-trim", daemon=True).start()


def _give_back() -> None:
    time.sleep(_SETTLE_S)
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc
        trim(0)
