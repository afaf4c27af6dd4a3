"""The structures and functions of ``src/kernels.h`` for ctypes, field by field in the same order."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from typing import Any


class Dtype(IntEnum):
    FP32 = 0
    BF16 = 1


class Encoding(IntEnum):
    STORED_FP32 = 0
    STORED_BF16 = 1
    STORED_FP8 = 2
    STORED_FP4 = 3


class RowFormat(IntEnum):
    FP8_KV = 16
    MXFP4_INDEX = 17
    FP8_INDEX = 18


class Simulation(IntEnum):
    AS_COMPUTED = 0
    AS_KV_ROW = 1
    AS_INDEX_ROW = 2


class Status(IntEnum):
    OK = 0
    OUT_OF_MEMORY = 1
    BAD_TOKEN = 2
    BAD_POSITION = 3
    BAD_SLOT = 4
    BAD_PAGE = 5
    BAD_SEGMENT = 6
    NO_DRAFT = 7
    INTERNAL = 8


class StoredTensor(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("data", "scale")),
        *((name, c_int32) for name in ("rows", "columns", "encoding", "rounds", "every_step", "pad")),
    ]


class StoredPart(Structure):
    _fields_ = [(name, c_int32) for name in ("tensor", "first_row", "first_column", "rows")]


class StoredMatrix(Structure):
    _fields_ = [
        ("weights", c_void_p),
        ("parts", POINTER(StoredPart)),
        *((name, c_int32) for name in ("n_parts", "pad")),
    ]


class Matrix(Structure):
    data: int | None
    quantized_input: int
    _fields_ = [
        ("data", c_void_p),
        ("stored", POINTER(StoredMatrix)),
        *((name, c_int32) for name in ("in", "out", "panel", "dtype", "quantized_input", "pad")),
    ]


class GroupedMatrix(Structure):
    _fields_ = [("first", Matrix), ("stride", c_int64), ("groups", c_int32), ("pad", c_int32)]


class Pool(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("item_stride", c_int64),
        ("row_stride", c_int64),
        *((name, c_int32) for name in ("rows", "items", "width", "dtype", "tail", "pad")),
    ]


class RopeTable(Structure):
    blocks: Any
    n_blocks: int
    _fields_ = [("blocks", POINTER(c_void_p)), ("n_blocks", c_int32), ("block", c_int32)]


class HyperConnection(Structure):
    _fields_ = [
        ("fn", Matrix),
        *((name, c_void_p) for name in ("base", "scale", "norm")),
        *((name, c_int32) for name in ("streams", "hidden", "iterations", "pad")),
        *((name, c_float) for name in ("hc_eps", "norm_eps")),
    ]


class Compressor(Structure):
    state_a: Pool
    state_b: Pool
    entries: Pool
    ratio: int
    simulation: int
    _fields_ = [
        *((name, Pool) for name in ("state_a", "state_b", "entries")),
        *((name, c_void_p) for name in ("ape", "norm")),
        *((name, c_int32) for name in ("ratio", "width", "columns", "simulation")),
        *((name, c_float) for name in ("norm_eps", "pad")),
    ]


class Attention(Structure):
    swa: Pool
    compressor: Compressor
    indexer: Compressor
    _fields_ = [
        *((name, Matrix) for name in ("in_proj", "index_proj", "state_proj", "q_proj")),
        *((name, GroupedMatrix) for name in ("wo_a", "wo_b")),
        *((name, c_void_p) for name in ("q_norm", "kv_norm", "sink")),
        ("swa", Pool),
        *((name, Compressor) for name in ("compressor", "indexer")),
        *((name, c_int32) for name in ("ratio", "heads", "head_dim", "rope_dim", "q_rank", "window")),
        *((name, c_int32) for name in ("index_heads", "index_dim", "index_topk", "uses_compress_rope")),
        *((name, c_int32) for name in ("kv_simulation", "query_simulation")),
        *((name, c_float) for name in ("norm_eps", "pad")),
    ]


class Experts(Structure):
    _fields_ = [
        ("gate", Matrix),
        *((name, POINTER(Matrix)) for name in ("up", "down")),
        *((name, c_void_p) for name in ("bias", "by_token")),
        *((name, c_int32) for name in ("experts", "top_k", "inner", "hidden")),
        *((name, c_float) for name in ("scale", "limit")),
    ]


class Layer(Structure):
    attention: Attention
    _fields_ = [
        *((name, HyperConnection) for name in ("hc_attn", "hc_ffn")),
        ("attention", Attention),
        ("experts", Experts),
    ]


class Draft(Structure):
    layer: Layer
    _fields_ = [
        *((name, c_void_p) for name in ("e_norm", "h_norm")),
        *((name, Matrix) for name in ("e_proj", "h_proj")),
        ("layer", Layer),
        ("head", HyperConnection),
        *((name, c_float) for name in ("norm_eps", "pad")),
    ]


class Network(Structure):
    main: RopeTable
    compress: RopeTable
    _fields_ = [
        ("layers", POINTER(Layer)),
        ("embedding", c_void_p),
        ("head", HyperConnection),
        ("lm_head", Matrix),
        ("draft", POINTER(Draft)),
        *((name, RopeTable) for name in ("main", "compress")),
        *((name, c_int32) for name in ("n_layers", "vocab", "hidden", "streams")),
        *((name, c_int32) for name in ("embedding_dtype", "streams_dtype")),
    ]


class Step(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("position", "segment", "token")),
        *((name, c_void_p) for name in ("slot", "start", "first_row", "valid_from")),
        *((name, c_void_p) for name in ("pages", "wanted")),
        *((name, c_int32) for name in ("rows", "segments", "max_pages", "n_wanted", "threads", "pad")),
    ]


STRUCTURES = (
    StoredTensor, StoredPart, StoredMatrix, Matrix, GroupedMatrix, Pool, RopeTable, HyperConnection, Compressor,
    Attention, Experts, Layer, Draft, Network, Step,
)  # fmt: skip

FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "kernels_sizeof": (c_int64, [c_char_p]),
    "kernels_packed_nbytes": (c_int64, [c_int32, c_int32, c_int32]),
    "kernels_pack": (None, [c_void_p, c_int32, c_int32, c_int32, c_void_p, POINTER(Matrix)]),
    "kernels_forward": (c_int32, [POINTER(Network), POINTER(Step), c_void_p, c_void_p, c_void_p, POINTER(c_int64)]),
    "kernels_logits": (c_int32, [POINTER(Network), c_void_p, c_int32, c_void_p, c_int32]),
    "kernels_draft": (c_int32, [POINTER(Network), POINTER(Step), c_void_p, c_void_p, c_void_p, POINTER(c_int64)]),
    "kernels_draft_window": (c_int32, [POINTER(Network), POINTER(Step), c_void_p, POINTER(c_int64)]),
}
"""What is called, by name: the type of its result, and of its arguments."""


class AbiMismatch(RuntimeError):
    """A library that was not built from this version's ``kernels.h``."""


def declare(functions: ctypes.CDLL, where: str) -> None:
    """Gives ``functions`` their types; ``where`` is the file they were loaded from. Raises :class:`AbiMismatch` where
    one is missing or a structure has another size.
    """
    for name, (result, arguments) in FUNCTIONS.items():
        try:
            function = getattr(functions, name)
        except AttributeError:
            raise AbiMismatch(f"{where} has no function {name}: build it again") from None
        function.restype, function.argtypes = result, arguments
    for structure in STRUCTURES:
        theirs, ours = functions.kernels_sizeof(structure.__name__.encode()), ctypes.sizeof(structure)
        if theirs != ours:
            raise AbiMismatch(f"{where}: {structure.__name__} has {theirs} bytes there and {ours} here: build it again")
