"""Bytes of a model's weights in memory, by the config alone: before anything is read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from server.cache.row_formats import ITEMSIZE
from server.model.config import ModelConfig, Quantization
from server.model.official_tensors import TensorSpec, official_tensors

_FP32_ENDS = ("norm.weight", "gate.weight", "head.weight")
_FP32_NBYTES, _ID_NBYTES = 4, 8


@dataclass(frozen=True)
class WeightSizes:
    """``loaded`` bytes that a process keeps, and ``mapped`` ones that it reads from the files when it needs them."""

    loaded: int
    mapped: int = 0

    def within(self, budget: int) -> WeightSizes:
        """With as many of the mapped ones in memory as ``budget`` bytes for all weights allow."""
        kept = min(self.mapped, max(0, budget - self.loaded))
        return WeightSizes(self.loaded + kept, self.mapped - kept)


def weight_sizes(config: ModelConfig, dtype: str, *, draft: bool, packed: bool = False) -> WeightSizes:
    """The weights of a network in ``dtype`` (``float32`` or ``bfloat16``), with its NextN layer if ``draft``.

    The model computes norms, router, compressors, hyper-connections and the head in fp32, whatever ``dtype`` is.
    ``packed``: the embedding and the weights of linear maps stay in their files (:mod:`.packed`).
    """
    backbone = replace(config, dspark=None)
    stored = official_tensors(backbone, draft=draft)
    plain = official_tensors(replace(backbone, quantization=Quantization()), draft=draft)
    in_files = {key for key, spec in stored.items() if packed and _is_mapped(key, spec)}
    loaded = sum(
        math.prod(spec.shape) * _itemsize(key, spec.dtype, dtype) for key, spec in plain.items() if key not in in_files
    )
    return WeightSizes(loaded, sum(stored[key].nbytes for key in in_files))


def _is_mapped(key: str, spec: TensorSpec) -> bool:
    is_scale_of_weight = spec.dtype == "F8_E8M0"
    return is_scale_of_weight or (key.endswith(".weight") and len(spec.shape) == 2 and not key.endswith(".gate.weight"))


def _itemsize(key: str, stored: str, dtype: str) -> int:
    if stored == "I64":
        return _ID_NBYTES
    if stored == "F32" or key.endswith(_FP32_ENDS) or ".compressor." in key:
        return _FP32_NBYTES
    return ITEMSIZE[dtype]
