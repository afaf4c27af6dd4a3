"""Where a network finds its state: the components of one arena, as pools of the kernels."""

from __future__ import annotations

import ctypes

from server.cache.arena import Arena
from server.cache.specs import DRAFT, SWA, LayoutError
from server.kernels import abi
from server.kernels.packing import PackedWeights
from server.model.config import CSA, SLIDING, ModelConfig

_DTYPES = {"float32": abi.Dtype.FP32, "bfloat16": abi.Dtype.BF16}


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
    d, di = config.head_dim, config.index_head_dim
    attention.swa = _pool(arena, window, layer_id, d)
    if ratio == CSA:
        _bind_compressor(attention.compressor, arena, layer_id, ("c4_state_a", "c4_state_b"), "c4_kv", d)
        _bind_compressor(attention.indexer, arena, layer_id, ("c4_index_state_a", "c4_index_state_b"), "c4_index", di)
    elif ratio != SLIDING:
        _bind_compressor(attention.compressor, arena, layer_id, ("c128_state",), "c128_kv", d)


def _bind_compressor(
    compressor: abi.Compressor, arena: Arena, layer_id: int, states: tuple[str, ...], entries: str, width: int
) -> None:
    compressor.state_a = _pool(arena, states[0], layer_id, 2 * width)
    if len(states) > 1:
        compressor.state_b = _pool(arena, states[1], layer_id, 2 * width)
    compressor.entries = _pool(arena, entries, layer_id, width)


def _pool(arena: Arena, name: str, layer_id: int, width: int) -> abi.Pool:
    c = arena.layout.component(name)
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
        width=c.width,
        dtype=_DTYPES[c.dtype],
    )
