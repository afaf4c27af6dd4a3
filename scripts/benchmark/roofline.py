"""The memory's own speed: how fast one core reads, and how many bytes a decode step cannot avoid to read."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from server.cache.layout import ArenaLayout
from server.cache.live import live_positions
from server.cache.specs import Scope
from server.model.config import CSA, ModelConfig
from server.model.network import DeepseekV4

COMPILE_TIMEOUT_S = 60.0
READ_S = 0.02
"""How long one measurement of the bandwidth reads, at least."""

_READ = """
#include <stdint.h>
typedef uint64_t lanes __attribute__((vector_size(64)));
uint64_t read_all(const lanes* data, int64_t n, int64_t times) {
    lanes sum = {0};
    for (int64_t k = 0; k < times; k++) {
        lanes a = sum, b = sum, c = sum, d = sum;
        for (int64_t i = 0; i + 8 <= n; i += 8) {
            a ^= data[i] ^ data[i + 4];
            b ^= data[i + 1] ^ data[i + 5];
            c ^= data[i + 2] ^ data[i + 6];
            d ^= data[i + 3] ^ data[i + 7];
        }
        sum = (a + b) ^ (c + d);
    }
    return sum[0] ^ sum[1] ^ sum[2] ^ sum[3] ^ sum[4] ^ sum[5] ^ sum[6] ^ sum[7];
}
"""


class MemoryReader:
    """Reads a block of ``nbytes`` again and again on one core. A block that fits a cache is read from there: so are the
    weights of so small a model.
    """

    def __init__(self, nbytes: int) -> None:
        block = np.ones(nbytes // 8 + 8, dtype=np.uint64)
        start = -block.ctypes.data % 64 // 8
        self._block = block[start : start + max(64, nbytes // 512 * 64)]

    def bytes_per_s(self) -> float:
        read, nbytes, times = _reader(), self._block.nbytes, 1
        while True:
            started = time.perf_counter()
            read(self._block, times)
            elapsed_s = time.perf_counter() - started
            if elapsed_s >= READ_S:
                return nbytes * times / elapsed_s
            times *= 2


@cache
def _reader() -> Callable[[npt.NDArray[np.uint64], int], object]:
    """A few lines of C, or numpy where there is no compiler."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "read.so"
        command = ["cc", "-O3", "-march=native", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(library)]
        try:
            subprocess.run(command, input=_READ, text=True, check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S)
        except (OSError, subprocess.SubprocessError):
            return lambda block, times: [np.bitwise_or.reduce(block) for _ in range(times)]
        function = ctypes.CDLL(str(library)).read_all
    function.restype = ctypes.c_uint64
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    return lambda block, times: function(block.ctypes.data, block.nbytes // 64, times)


def weight_nbytes(config: ModelConfig, dtype: str, n_rows: int) -> int:
    """Bytes of weights that one step of ``n_rows`` rows must read, in the dtypes in which the model keeps them.

    Of the routed experts only those that even routing would choose; of the embedding one row for each.
    """
    with torch.device("meta"):
        model = DeepseekV4(config, getattr(torch, dtype), 0)
    touched = 1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** n_rows
    total = 0.0
    for name, tensor in model.named_parameters():
        nbytes = tensor.numel() * tensor.element_size()
        if name == "embed.weight" or name.endswith("tid2eid"):
            total += nbytes * n_rows / tensor.shape[0]
        elif ".experts." in name:
            total += nbytes * touched
        else:
            total += nbytes
    return round(total)


def state_nbytes(config: ModelConfig, layout: ArenaLayout, n: int) -> int:
    """Bytes of state that one row behind ``n`` tokens must read: its window, the chosen entries, all index keys."""
    total = 0
    for name, rows in live_positions(n, layout.window, layout.names).items():
        component = layout.component(name)
        n_rows = len(rows)
        if name == "c4_kv":
            n_rows = min(n_rows, config.index_topk)
        elif component.scope is Scope.SLOT and "state" in name:
            n_rows = round(n_rows / (CSA if name.startswith("c4") else 128))  # read once, when a group closes
        total += n_rows * component.row_nbytes
    return total
