"""Binds the sampler of the kernels: the structures of ``src/sampler.h``, packed by :mod:`struct`."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

EDIT = np.dtype([("token", "<i4"), ("count", "<i4"), ("bias", "<f4")])
"""``SampleEdit``: what changes one logit of a row before anything is chosen."""
Words = npt.NDArray[np.uint32]
"""A mask: bit ``i % 32`` of word ``i // 32`` says whether token ``i`` may be chosen. Tokens behind its end may not."""
ROW = struct.Struct("<QQQQddffffiiiiii")
"""``SampleRow``: addresses of the edits, of the row's own edits and of the mask, draw, top_p, min_p, scale, repetition,
presence, frequency, n_edits, n_own, n_mask_words, top_k, n_top, and 0."""
_PAIR = struct.Struct("<qd")
"""``SampleChoice`` and ``SampleAlternative``: a token and its log probability."""
_CALL = struct.Struct("<QqQQQiiii")
"""``SampleCall``. One argument instead of nine: ctypes takes longer for those than the kernel does."""

Pair = tuple[int, float]


class SampleFailed(RuntimeError):
    """The kernel ended with a status that is not 0: there is no memory."""


class SampleKernel:
    """``kernels_sample`` of a loaded library, on up to so many ``threads``. Used by one thread."""

    def __init__(self, functions: ctypes.CDLL, threads: int = 1) -> None:
        self._sample = functions.kernels_sample
        self._sample.restype, self._sample.argtypes = ctypes.c_int32, [ctypes.c_char_p]
        self.threads = threads

    def __call__(
        self, logits: torch.Tensor, rows: Sequence[bytes], max_alternatives: int = 0
    ) -> tuple[list[Pair], list[list[Pair]]]:
        """One choice (token, log probability) for every row of ``logits`` [R, V], and for every row
        ``max_alternatives`` of them, of which its ``n_top`` are filled. The token is -1 where none can be chosen.

        ``logits``: fp32 on the CPU, the elements of a row one after the other. ``rows`` are packed by :data:`ROW`.
        """
        n_rows, vocab_size = logits.shape
        row_stride, step = logits.stride()
        if logits.dtype != torch.float32 or not logits.is_cpu or step != 1 or n_rows != len(rows):
            raise ValueError(f"{len(rows)} rows for logits {tuple(logits.shape)} of {logits.dtype} on {logits.device}")
        packed = bytearray().join(rows)
        choices = bytearray(_PAIR.size * n_rows)
        alternatives = bytearray(_PAIR.size * n_rows * max_alternatives)
        call = _CALL.pack(
            logits.data_ptr(), row_stride, _address(packed), _address(choices), _address(alternatives),
            n_rows, vocab_size, max_alternatives, self.threads,
        )  # fmt: skip
        if status := self._sample(call):
            raise SampleFailed(f"the sampler of the kernels ended with status {status} for {n_rows} rows")
        chosen: list[Pair] = list(_PAIR.iter_unpack(choices))
        if not max_alternatives:
            return chosen, []
        flat: list[Pair] = list(_PAIR.iter_unpack(alternatives))
        return chosen, [flat[i : i + max_alternatives] for i in range(0, len(flat), max_alternatives)]


def _address(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if buffer else 0
