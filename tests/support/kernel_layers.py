"""One layer's attention computed twice, by its Python module and by its kernel, each over an arena of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from server.cache.arena import Arena
from server.cache.layout import ArenaLayout, Placement
from server.cache.specs import CacheGeometry
from server.kernels.binding import bind_weights
from server.kernels.build import Isa
from server.kernels.packing import pack_weights
from server.kernels.plan import StepPlan
from server.kernels.rope import RopeBlocks
from server.model.attention import Attention, RopeSet
from server.model.batch import Segment, build_batch
from server.model.config import CSA
from server.model.layers import pad_rows
from server.model.loader import load_model
from server.model.numerics import PLAIN, Numerics
from server.model.pools import Pools
from server.model.rope import rope_frequencies
from server.model.state import state_components
from tests.support.kernel_functions import Kernels
from tests.support.quantized import take_for_quantized

PAGE = 256


class Layers:
    """The attention layers of the checkpoint in ``path``: :meth:`python` and :meth:`kernel` compute the same.

    ``isa`` is the instruction set of the kernels (default: this machine's best), ``dtype`` that of weights and state,
    ``kv_dtype`` and ``index_dtype`` how rows are stored. With official ``numerics`` the linear maps are taken for ones
    that the checkpoint stores quantized.
    """

    def __init__(
        self,
        path: Path,
        *,
        isa: Isa | None = None,
        dtype: torch.dtype = torch.float32,
        spec_tokens: int = 0,
        poison: bool = True,
        numerics: Numerics = PLAIN,
        kv_dtype: str = "model",
        index_dtype: str = "auto",
    ) -> None:
        self.model, packed = (take_for_quantized(load_model(path, dtype=dtype, numerics=numerics)) for _ in range(2))
        self.config = self.model.config
        self.kernels = Kernels(isa)
        self.weights = pack_weights(packed, self.kernels.functions)
        components = state_components(
            self.config, str(dtype).removeprefix("torch."), spec_tokens, kv_dtype=kv_dtype, index_dtype=index_dtype
        )
        self.geometry = CacheGeometry(PAGE, 40, 20, self.config.sliding_window, spec_tokens, components)
        self.poison = poison
        self.reset()

    def reset(self) -> None:
        """Empty arenas."""
        layout = ArenaLayout.from_geometry(self.geometry)
        self.arena, self.kernel_arena = (Arena(layout, poison=self.poison) for _ in range(2))
        self.pools = Pools(self.arena, self.config, self.model.dtype)
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
        out: torch.Tensor = self._module(layer)(pad_rows(x, tile), batch, self.pools, rope)
        return out[: len(x)].float()

    def kernel(self, layer: int, x: torch.Tensor, segments: Sequence[Segment], threads: int = 1) -> torch.Tensor:
        plan = self._plan(segments, threads)
        wide = x.float().contiguous()
        out = torch.empty(len(x), self.config.hidden_size)
        network = self.network
        self.kernels.call(
            "kernels_attention", network.layers[layer].attention, network.main, network.compress, plan.step, wide, out
        )
        return out

    def python_compress(self, layer: int, x: torch.Tensor, segments: Sequence[Segment], *, index: bool) -> None:
        """What a layer's compressor, or its indexer's, does with rows ``x``."""
        tile = self.model.row_tile
        batch = build_batch(segments, self.arena.layout, tile, torch.device("cpu"))
        rope = RopeSet(batch, *rope_frequencies(self.config))
        attention = self._module(layer)
        view = batch.csa if attention.ratio == CSA else batch.hca
        compressor = attention.indexer.compressor if index and attention.indexer else attention.compressor
        if view is None or compressor is None:
            raise ValueError(f"layer {layer} compresses nothing")
        compressor(pad_rows(x, tile), view, self.pools, rope.closing(view))

    def kernel_compress(
        self, layer: int, x: torch.Tensor, segments: Sequence[Segment], *, index: bool, threads: int = 1
    ) -> None:
        plan = self._plan(segments, threads)
        attention = self.network.layers[layer].attention
        columns = attention.state_proj.out
        projected = torch.empty(len(x), columns)
        self.kernels.call("kernels_linear", attention.state_proj, x.float().contiguous(), len(x), projected, threads)
        compressor = attention.indexer if index else attention.compressor
        rope_dim = self.config.rope_dim
        self.kernels.call(
            "kernels_compress", compressor, self.network.compress, rope_dim, plan.step, projected, columns
        )

    def _module(self, layer: int) -> Attention:
        attention = self.model.layers[layer].attn
        if not isinstance(attention, Attention):
            raise TypeError(f"layer {layer} has no attention")
        return attention

    def _plan(self, segments: Sequence[Segment], threads: int) -> StepPlan:
        plan = StepPlan(segments, PAGE, every_row=False, threads=threads)
        self.main.reach(self.network.main, 0, max(plan.positions))
        self.compress.reach(self.network.compress, 0, max(plan.positions))
        return plan

    def rows(self, arena: Arena, name: str, layer: int) -> torch.Tensor:
        """Memory of ``arena``: one layer's part of component ``name``, ``[items, rows, width]`` in its elements."""
        layers = arena.layout.component(name).layer_ids
        return arena.view(name)[:, :, layers.index(layer)]

    def components(self, layer: int) -> list[str]:
        """The components that ``layer`` has a part in."""
        return [c.name for c in self.arena.layout.components if layer in c.layer_ids]

    def kernel_state(self, layer: int, n: int, place: Placement) -> dict[str, bytes]:
        """What the kernel's arena keeps of one layer after ``n`` tokens."""
        live = self.kernel_arena.layout.live_runs(n, place)
        return {name: self.kernel_arena.read(live[name]) for name in self.components(layer)}
