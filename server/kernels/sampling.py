"""Binds the sampler of the kernels: structures of ``src/sampler.h`` and ``src/scores.h``, packed by :mod:`struct`."""

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

_SCORE_CALL = struct.Struct("<QqQQiiii")
"""``ScoreCall`` of ``src/scores.h``."""
SCORE_NBYTES = 12
"""Of one score: a log probability (fp64) and a rank or a token (int32)."""

Pair = tuple[int, float]


class SampleFailed(RuntimeError):
    """The kernel ended with a status that is not 0: there is no memory."""


class SampleKernel:
    """``kernels_sample`` and ``kernels_score`` of a loaded library, on up to so many ``threads``. For one thread."""

    def __init__(self, functions: ctypes.CDLL, threads: int = 1) -> None:
        self._sample = functions.kernels_sample
        self._score = functions.kernels_score
        for function in (self._sample, self._score):
            function.restype, function.argtypes = ctypes.c_int32, [ctypes.c_char_p]
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

    def score(self, logits: torch.Tensor, token_ids: Sequence[int], n_top: int) -> bytearray:
        """What each row of ``logits`` [R, V] thinks of its token, and its ``n_top`` best: one row behind the other, as
        ``src/scores.h`` says. ``logits`` as above; every id is one of the vocabulary.
        """
        n_rows, vocab_size = logits.shape
        row_stride, step = logits.stride()
        if logits.dtype != torch.float32 or not logits.is_cpu or step != 1 or n_rows != len(token_ids):
            raise ValueError(f"{len(token_ids)} tokens for logits {tuple(logits.shape)} on {logits.device}")
        if not all(0 <= token_id < vocab_size for token_id in token_ids):
            raise ValueError(f"one of the tokens is not of the vocabulary of {vocab_size}")
        tokens = bytearray(struct.pack(f"<{n_rows}i", *token_ids))
        scores = bytearray(SCORE_NBYTES * (1 + n_top) * n_rows)
        call = _SCORE_CALL.pack(
            logits.data_ptr(), row_stride, _address(tokens), _address(scores), n_rows, vocab_size, n_top, self.threads
        )
        if status := self._score(call):
            raise SampleFailed(f"the scores of the kernels ended with status {status} for {n_rows} rows")
        return scores


def _address(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if buffer else 0
