"""One layer's attention computed twice, by its Python module and by its kernel, each over an arena of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from server.cache.arena import Arena
from server.cache.layout import ArenaLayout
from server.cache.specs import CacheGeometry
from server.kernels import abi
from server.kernels.binding import bind_weights
from server.kernels.library import load
from server.kernels.packing import pack_weights
from server.kernels.plan import StepPlan
from server.kernels.rope import RopeBlocks
from server.model.attention import RopeSet
from server.model.batch import Segment, build_batch
from server.model.layers import pad_rows
from server.model.loader import load_model
from server.model.pools import Pools
from server.model.rope import rope_frequencies
from server.model.state import state_components

PAGE = 256
_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64


def kernel_functions() -> ctypes.CDLL:
    """The library of this machine, with the types of what only tests call."""
    library = load().functions
    abi.declare(library, "the library under test")
    library.kernels_attention.argtypes = [_POINTER] * 6
    library.kernels_compress.argtypes = [_POINTER, _POINTER, ctypes.c_int32, _POINTER, _POINTER, _INT64]
    library.kernels_score_entries.argtypes = [_POINTER, _POINTER, _POINTER, _POINTER, _INT64, _POINTER]
    library.kernels_pick_best.argtypes = [_POINTER, _INT64, _INT64, _POINTER]
    return library


class Layers:
    """The attention layers of the checkpoint in ``path``: :meth:`python` and :meth:`kernel` compute the same."""

    def __init__(self, path: Path, *, spec_tokens: int = 0, pages: int = 16, poison: bool = True) -> None:
        self.model = load_model(path)
        self.config = self.model.config
        self.library = kernel_functions()
        self.weights = pack_weights(load_model(path), self.library)
        dtype = str(self.model.dtype).removeprefix("torch.")
        components = state_components(self.config, dtype, spec_tokens)
        self.geometry = CacheGeometry(PAGE, pages, 8, self.config.sliding_window, spec_tokens, components)
        self.poison = poison
        self.reset()

    def reset(self) -> None:
        """Empty arenas."""
        layout = ArenaLayout.from_geometry(self.geometry)
        self.arena, self.kernel_arena = (Arena(layout, poison=self.poison) for _ in range(2))
        self.pools = Pools(self.arena)
        self.network, self._memory = bind_weights(self.weights, self.config, self.kernel_arena)
        self.main, self.compress = (RopeBlocks(frequencies) for frequencies in rope_frequencies(self.config))

    def random_rows(self, n: int, seed: int = 0) -> torch.Tensor:
        """Inputs ``[n, D]`` of a layer, in the model's dtype."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(n, self.config.hidden_size, generator=generator).to(self.model.dtype)

    def python(self, layer: int, x: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
        tile = self.model.row_tile
        batch = build_batch(segments, self.arena.layout, tile, torch.device("cpu"))
        rope = RopeSet(batch, *rope_frequencies(self.config))
        out: torch.Tensor = self.model.layers[layer].attn(pad_rows(x, tile), batch, self.pools, rope)
        return out[: len(x)].float()

    def kernel(self, layer: int, x: torch.Tensor, segments: Sequence[Segment], threads: int = 1) -> torch.Tensor:
        plan = StepPlan(segments, PAGE, every_row=False, threads=threads)
        self.main.reach(self.network.main, 0, max(plan.positions))
        self.compress.reach(self.network.compress, 0, max(plan.positions))
        wide = x.float().contiguous()
        out = torch.empty(len(x), self.config.hidden_size)
        attention, network = self.network.layers[layer].attention, self.network
        self.call(
            "kernels_attention", attention, network.main, network.compress, plan.step, wide.data_ptr(), out.data_ptr()
        )
        return out

    def call(self, name: str, *arguments: Any) -> None:
        pointers = [ctypes.byref(a) if isinstance(a, ctypes.Structure) else a for a in arguments]
        status = getattr(self.library, name)(*pointers)
        if status != abi.Status.OK:
            raise RuntimeError(f"{name} ended with {abi.Status(status).name}")

    def state(self, arena: Arena, name: str, layer: int) -> torch.Tensor:
        """What ``arena`` holds of one layer in component ``name``: ``[items, rows, width]`` in fp32."""
        layers = arena.layout.component(name).layer_ids
        return arena.view(name)[:, :, layers.index(layer)].float()
