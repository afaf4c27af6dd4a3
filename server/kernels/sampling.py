"""Binds the sampler of the kernels: ``src/sampler.h``, packed by :mod:`struct`. The rule is in ``server.engine.sampler``."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable
from ctypes import c_int32, c_int64, c_void_p

import numpy as np
import torch

EDIT = np.dtype([("token", "<i4"), ("count", "<i4"), ("bias", "<f4")])
"""``SampleEdit``: what changes one logit of a row before anything is chosen."""
pack_row = struct.Struct("<QQddffffiiii").pack
"""``SampleRow``: address of the edits, draw, top_p, min_p, scale, repetition, presence, frequency, n_edits, top_k, n_top,
and 0."""
_PAIR = struct.Struct("<qd")
"""``SampleChoice`` and ``SampleAlternative``: a token and its log probability."""


class SampleFailed(RuntimeError):
    """The kernel ended with a status that is not 0: there is no memory."""


class SampleKernel:
    """``kernels_sample`` of a loaded library, with so many ``threads``. Used by one thread."""

    def __init__(self, functions: ctypes.CDLL, threads: int = 1) -> None:
        self._sample = functions.kernels_sample
        self._sample.restype = c_int32
        self._sample.argtypes = [
            *(c_void_p, c_int64, c_int32, c_int32),  # logits, row stride, rows, vocab
            *(c_void_p, c_void_p, c_void_p, c_int32, c_int32),  # rows, choices, alternatives, how many of them, threads
        ]
        self.threads = threads

    def __call__(
        self, logits: torch.Tensor, rows: list[bytes], max_alternatives: int = 0
    ) -> tuple[list[tuple[int, float]], list[list[tuple[int, float]]]]:
        """One choice (token, log probability) for each row of ``logits`` [R, V] and ``max_alternatives`` of them for
        each row, of which as many are filled as its ``n_top`` says. The token is -1 where there is nothing to choose.

        ``logits``: fp32 on the CPU, elements of a row one after the other. ``rows`` are made by :func:`pack_row`.
        """
        n_rows, vocab_size = logits.shape
        if logits.dtype != torch.float32 or logits.device.type != "cpu" or logits.stride(1) != 1 or n_rows != len(rows):
            raise ValueError(f"{len(rows)} rows for logits {tuple(logits.shape)} of {logits.dtype} on {logits.device}")
        packed = b"".join(rows)
        choices = bytearray(_PAIR.size * n_rows)
        alternatives = bytearray(_PAIR.size * n_rows * max_alternatives)
        status = self._sample(
            logits.data_ptr(), logits.stride(0), n_rows, vocab_size,
            packed, _address(choices), _address(alternatives) if alternatives else None,
            max_alternatives, self.threads,
        )  # fmt: skip
        if status:
            raise SampleFailed(f"the sampler of the kernels ended with status {status} for {n_rows} rows")
        tops: Iterable[tuple[int, float]] = _PAIR.iter_unpack(alternatives)
        flat = list(tops)
        return list(_PAIR.iter_unpack(choices)), [
            flat[i : i + max_alternatives] for i in range(0, len(flat), max_alternatives or 1)
        ]


def _address(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
