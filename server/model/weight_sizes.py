"""Bytes of a model's weights in memory, by the config alone: before anything is read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from server.cache.row_formats import ITEMSIZE
from server.model.config import ModelConfig, Quantization
from server.model.official_tensors import TensorSpec, official_tensors

_FP32_ENDS = ("norm.weight", ".gate.weight", "head.weight")
_FP32_NBYTES, _ID_NBYTES = 4, 8


@dataclass(frozen=True)
class WeightSizes:
    """``loaded`` bytes that a process keeps in memory, and ``mapped`` ones that stay in the files of the checkpoint."""

    loaded: int
    mapped: int = 0


def weight_sizes(config: ModelConfig, dtype: str, *, draft: bool, packed: bool = False) -> WeightSizes:
    """The weights of a network in ``dtype`` (``float32`` or ``bfloat16``), with its NextN layer if ``draft``.

    The model computes norms, router, compressors, hyper-connections and the head in fp32, whatever ``dtype`` is.
    ``packed``: linear maps and the embedding stay in their files, as they are stored; only the small rest is loaded.
    """
    backbone = replace(config, dspark=None)
    stored = official_tensors(backbone, draft=draft)
    plain = official_tensors(replace(backbone, quantization=Quantization()), draft=draft)
    in_files = {key for key, spec in plain.items() if packed and _is_large(key, spec)}
    loaded = sum(
        math.prod(spec.shape) * _itemsize(key, spec.dtype, dtype) for key, spec in plain.items() if key not in in_files
    )
    mapped = sum(spec.nbytes for key, spec in stored.items() if key in in_files or (packed and key not in plain))
    return WeightSizes(loaded, mapped)


def _is_large(key: str, spec: TensorSpec) -> bool:
    return key.endswith(".weight") and len(spec.shape) > 1 and not key.endswith(".gate.weight")


def _itemsize(key: str, stored: str, dtype: str) -> int:
    if stored == "I64":
        return _ID_NBYTES
    if stored == "F32" or key.endswith(_FP32_ENDS) or ".compressor." in key:
        return _FP32_NBYTES
    return ITEMSIZE[dtype]
