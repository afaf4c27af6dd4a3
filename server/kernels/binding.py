"""Where a network finds its state: the components of one arena, as pools of the kernels."""

from __future__ import annotations

import ctypes

from server.cache.arena import Arena
from server.cache.row_formats import FP8_INDEX, FP8_KV, MXFP4_INDEX, Fp8IndexRow, Fp8KvRow, Mxfp4IndexRow
from server.cache.specs import DRAFT, SWA, LayoutError
from server.kernels import abi
from server.kernels.packing import PackedWeights
from server.model.config import CSA, SLIDING, ModelConfig

_FORMATS = {
    "float32": abi.Dtype.FP32,
    "bfloat16": abi.Dtype.BF16,
    FP8_KV: abi.RowFormat.FP8_KV,
    MXFP4_INDEX: abi.RowFormat.MXFP4_INDEX,
    FP8_INDEX: abi.RowFormat.FP8_INDEX,
}


def bind_weights(weights: PackedWeights, config: ModelConfig, arena: Arena) -> tuple[abi.Network, list[object]]:
    """A network over the pools of ``arena``, without its rotations, and what it points to beside the weights' memory.

    Raises :class:`LayoutError` for a component that is missing or has another width than the model's.
    """
    network = abi.Network.from_buffer_copy(weights.network)
    layers = type(weights.layers).from_buffer_copy(weights.layers)
    for i, ratio in enumerate(config.compress_ratios):
        _bind_attention(layers[i].attention, config, arena, i, ratio, SWA)
    network.layers = ctypes.cast(layers, ctypes.POINTER(abi.Layer))
    if weights.draft is None or DRAFT not in arena.layout.names:
        return network, [layers]
    draft = abi.Draft.from_buffer_copy(weights.draft)
    _bind_attention(draft.layer.attention, config, arena, config.num_hidden_layers, SLIDING, DRAFT)
    network.draft = ctypes.pointer(draft)
    return network, [layers, draft]


def _bind_attention(
    attention: abi.Attention, config: ModelConfig, arena: Arena, layer_id: int, ratio: int, window: str
) -> None:
    d, di, tail = config.head_dim, config.index_head_dim, config.rope_dim
    attention.swa = _pool(arena, window, layer_id, d, tail)
    if ratio == CSA:
        _bind_states(attention.compressor, arena, layer_id, ("c4_state_a", "c4_state_b"), d)
        attention.compressor.entries = _pool(arena, "c4_kv", layer_id, d, tail)
        _bind_states(attention.indexer, arena, layer_id, ("c4_index_state_a", "c4_index_state_b"), di)
        attention.indexer.entries = _pool(arena, "c4_index", layer_id, di)
    elif ratio != SLIDING:
        _bind_states(attention.compressor, arena, layer_id, ("c128_state",), d)
        attention.compressor.entries = _pool(arena, "c128_kv", layer_id, d, tail)


def _bind_states(compressor: abi.Compressor, arena: Arena, layer_id: int, states: tuple[str, ...], width: int) -> None:
    compressor.state_a = _pool(arena, states[0], layer_id, 2 * width)
    if len(states) > 1:
        compressor.state_b = _pool(arena, states[1], layer_id, 2 * width)


def _pool(arena: Arena, name: str, layer_id: int, channels: int, tail: int = 0) -> abi.Pool:
    """One layer of a component whose rows have so many channels; the last ``tail`` of them carry a rotation."""
    c = arena.layout.component(name)
    width = _elements(c.dtype, channels, tail)
    if c.width != width or layer_id not in c.layer_ids:
        raise LayoutError(
            f"{name} has layers {c.layer_ids} of {c.width} elements; the model's layer {layer_id} needs {width}", name
        )
    layer_nbytes = c.row_nbytes // len(c.layer_ids)
    return abi.Pool(
        data=arena.ptr + c.offset + c.layer_ids.index(layer_id) * layer_nbytes,
        item_stride=c.item_stride,
        row_stride=c.row_nbytes,
        rows=c.rows,
        items=c.items,
        width=channels,
        dtype=_FORMATS[c.dtype],
        tail=tail,
    )


def _elements(row_format: str, channels: int, tail: int) -> int:
    """Elements of a row: its channels, or the bytes of a quantized one."""
    if row_format == FP8_KV:
        return Fp8KvRow(channels - tail, tail).nbytes
    if row_format == MXFP4_INDEX:
        return Mxfp4IndexRow(channels).nbytes
    if row_format == FP8_INDEX:
        return Fp8IndexRow(channels).nbytes
    return channels
