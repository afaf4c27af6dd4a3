"""``--numerics``: what the network computes beyond its formulas. Each method is one point where the two kinds differ.

``plain`` computes what the formulas say, in the dtype of the activations. ``official`` also rounds where the reference
implementation does, because the weights were trained with that. ``docs/numerics.md`` has the table of all points.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from server.cache.row_formats import index_block, kv_block
from server.model.batch_invariant import bmm, unit_rms
from server.model.blocks import ACTIVATION_BLOCK
from server.model.config import CSA, CheckpointError, ModelConfig
from server.model.quantization import fp4_simulated, fp8_simulated, hadamard


class Numerics(Protocol):
    """One kind of arithmetic. Every result of a row depends on that row alone, bit for bit."""

    name: str
    wide_experts: bool
    """Whether all experts may be computed as one wide one, whose sum is rounded once."""

    def linear_input(self, x: torch.Tensor, stored_as: str) -> torch.Tensor:
        """``x`` ``[rows, in]`` as it enters a linear map whose weight the checkpoint stores as ``stored_as``."""
        ...

    def kv_rows(self, rows: torch.Tensor, rope_dim: int) -> torch.Tensor:
        """K=V rows ``[rows, head_dim]``, of the window or compressed, as they are stored and read. Normed and rotated;
        the last ``rope_dim`` channels carry the rotation.
        """
        ...

    def index_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Queries or keys of the indexer ``[..., index_head_dim]``, rotated, as they are multiplied and stored."""
        ...

    def unit_heads(self, q: torch.Tensor, eps: float) -> torch.Tensor:
        """Queries ``[rows, heads, head_dim]``, each head divided by its root mean square."""
        ...

    def attention_factor(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` as a factor of attention's products, whose results have the dtype of their factors."""
        ...

    def index_weights(self, projected: torch.Tensor, scale: float) -> torch.Tensor:
        """``projected * scale``: the weight of every index head ``[rows, heads]``."""
        ...

    def index_scores(self, dots: torch.Tensor, weights: torch.Tensor, row_tile: int) -> torch.Tensor:
        """``sum_h weights[h] relu(dots[h])``: ``dots`` ``[rows, heads, entries]``, ``weights`` ``[rows, 1, heads]`` ->
        ``[rows, 1, entries]`` in fp32.
        """
        ...


class Plain:
    """The formulas in the dtype of the activations, nothing else rounded: in fp32 what transformers computes."""

    name = "plain"
    wide_experts = True

    def linear_input(self, x: torch.Tensor, stored_as: str) -> torch.Tensor:
        return x

    def kv_rows(self, rows: torch.Tensor, rope_dim: int) -> torch.Tensor:
        return rows

    def index_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def unit_heads(self, q: torch.Tensor, eps: float) -> torch.Tensor:
        return unit_rms(q, eps)

    def attention_factor(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def index_weights(self, projected: torch.Tensor, scale: float) -> torch.Tensor:
        return projected.float() * scale

    def index_scores(self, dots: torch.Tensor, weights: torch.Tensor, row_tile: int) -> torch.Tensor:
        return bmm(weights, dots.float().relu_(), row_tile)


class Official:
    """The reference's arithmetic: what it quantizes is rounded to the values that the quantized form has.

    In fp32 these are the same simulations on fp32 activations.
    """

    name = "official"
    wide_experts = False

    def linear_input(self, x: torch.Tensor, stored_as: str) -> torch.Tensor:
        """Quantized to e4m3, per row and 128 channels, before a weight that is stored quantized."""
        return fp8_simulated(x, ACTIVATION_BLOCK) if stored_as else x

    def kv_rows(self, rows: torch.Tensor, rope_dim: int) -> torch.Tensor:
        """The channels without rotation are quantized to e4m3, 64 at a time; the others stay."""
        nope = rows.shape[-1] - rope_dim
        if not nope:
            return rows
        return torch.cat([fp8_simulated(rows[..., :nope], kv_block(nope)), rows[..., nope:]], dim=-1)

    def index_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Hadamard transform, then quantized to e2m1, 32 channels at a time."""
        return fp4_simulated(hadamard(rows), index_block(rows.shape[-1]))

    def unit_heads(self, q: torch.Tensor, eps: float) -> torch.Tensor:
        """Every step is rounded to the dtype of ``q``: the squares, their mean, with ``eps``, its inverse root."""
        mean = (q * q).float().mean(-1, keepdim=True).to(q.dtype)
        return q * (mean.float() + eps).to(q.dtype).float().rsqrt().to(q.dtype)

    def attention_factor(self, x: torch.Tensor) -> torch.Tensor:
        """Products are summed in fp32 and not rounded."""
        return x.float()

    def index_weights(self, projected: torch.Tensor, scale: float) -> torch.Tensor:
        """In the dtype of the activations."""
        return projected * scale

    def index_scores(self, dots: torch.Tensor, weights: torch.Tensor, row_tile: int) -> torch.Tensor:
        """Products and their sum are rounded to the dtype of the activations."""
        products = dots.relu() * weights.transpose(1, 2)
        ones = torch.ones(weights.shape, dtype=torch.float32, device=weights.device)
        return bmm(ones, products.float(), row_tile).to(dots.dtype).float()


PLAIN: Numerics = Plain()
OFFICIAL: Numerics = Official()
NUMERICS = {numerics.name: numerics for numerics in (PLAIN, OFFICIAL)}


class NumericsLayer(nn.Module):
    """A layer whose arithmetic ``--numerics`` decides; :func:`use_numerics` sets it for a whole network."""

    numerics: Numerics = PLAIN


def use_numerics(network: nn.Module, numerics: Numerics) -> None:
    """Makes every layer of ``network`` compute as ``numerics``."""
    for module in network.modules():
        if isinstance(module, NumericsLayer):
            module.numerics = numerics


def check_numerics(numerics: Numerics, config: ModelConfig, where: str) -> None:
    """Raises :class:`CheckpointError` that names the field of ``config`` with which ``numerics`` cannot compute."""
    width = config.index_head_dim
    if numerics is OFFICIAL and config.layers_of(CSA) and width & (width - 1):
        raise CheckpointError(
            f"{where}: index_head_dim is {width}; --numerics official needs a power of two (Hadamard transform): use "
            "--numerics plain"
        )
