"""Rotary embeddings: interleaved pairs over the last channels, plain for window-only layers, YaRN for compressed
ones.
"""

from __future__ import annotations

import math

import torch

from server.model.config import ModelConfig, YarnScaling


def inverse_frequencies(dim: int, theta: float, yarn: YarnScaling | None) -> torch.Tensor:
    """Rotation speeds ``[dim / 2]`` in fp32. With ``yarn`` the slow ones are divided by its factor, with a linear ramp
    between.

    cos and sin are not scaled: DeepSeek-V4 uses no attention factor.
    """
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if yarn is None:
        return freqs

    def turns_at(rotations: float) -> float:
        return dim * math.log(yarn.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(turns_at(yarn.beta_fast)), 0)
    high = min(math.ceil(turns_at(yarn.beta_slow)), dim - 1)
    span = max(high - low, 1e-3)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return freqs / yarn.factor * ramp + freqs * (1 - ramp)


class Rotation:
    """cos and sin of a set of positions, ``[rows, rope_dim / 2]`` in fp32."""

    def __init__(self, positions: torch.Tensor, inv_freq: torch.Tensor) -> None:
        angles = positions.float()[:, None] * inv_freq
        self.cos, self.sin = angles.cos(), angles.sin()

    def apply_(self, x: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
        """Rotates the last ``rope_dim`` channels of ``x`` ``[rows, ..., channels]`` in place; ``inverse`` undoes it."""
        dim = 2 * self.cos.shape[-1]
        shape = (self.cos.shape[0], *([1] * (x.dim() - 2)), dim // 2)
        cos, sin = self.cos.view(shape), self.sin.view(shape)
        if inverse:
            sin = -sin
        tail = x[..., -dim:]
        even, odd = tail[..., 0::2].float(), tail[..., 1::2].float()
        rotated_even, rotated_odd = even * cos - odd * sin, even * sin + odd * cos
        tail[..., 0::2] = rotated_even
        tail[..., 1::2] = rotated_odd
        return x


def rope_frequencies(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """``(main, compress)``: the frequencies of window-only layers and those of CSA and HCA layers (all of q, kv and
    entries).
    """
    main = inverse_frequencies(config.rope_dim, config.rope_theta, None)
    compress = inverse_frequencies(config.rope_dim, config.compress_rope_theta, config.yarn)
    return main, compress
