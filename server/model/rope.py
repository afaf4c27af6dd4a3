"""Rotary embeddings: interleaved pairs over the last channels, plain or with YaRN."""

from __future__ import annotations

import math

import torch

from server.model.batch_invariant import serial_parts
from server.model.config import ModelConfig, YarnScaling


def inverse_frequencies(dim: int, theta: float, yarn: YarnScaling | None) -> torch.Tensor:
    """Rotation speeds ``[dim / 2]`` in fp32. With ``yarn`` the slow ones are divided by its factor, with a ramp
    between.

    cos and sin are not scaled: DeepSeek-V4 uses no attention factor.
    """
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if yarn is None:
        return freqs

    def pair_turning(rotations: float) -> float:
        """The (fractional) pair that makes this many rotations over the original context."""
        return dim * math.log(yarn.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_turning(yarn.beta_slow)), dim - 1)
    span = max(high - low, 1e-3)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return freqs / yarn.factor * ramp + freqs * (1 - ramp)


class Rotation:
    """The rotations of a set of positions as unit complex numbers ``[rows, rope_dim / 2]`` (fp32)."""

    def __init__(self, positions: torch.Tensor, inv_freq: torch.Tensor) -> None:
        angles = positions.float()[:, None] * inv_freq
        self._forward = torch.complex(angles.cos(), angles.sin())
        self._inverse = self._forward.conj().resolve_conj()

    def apply_(self, x: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
        """Rotates the last ``rope_dim`` channels of ``x`` ``[rows, ..., channels]`` in place; ``inverse`` undoes it.

        Channels ``(2i, 2i + 1)`` form one complex number.
        """
        turn = self._inverse if inverse else self._forward
        turn = turn.view(turn.shape[0], *([1] * (x.dim() - 2)), turn.shape[1])
        tail = x[..., -2 * turn.shape[-1] :].unflatten(-1, (-1, 2))
        for rows in serial_parts(x.shape[0], tail[0].numel()):
            if x.dtype == torch.float32:
                torch.view_as_complex(tail[rows]).mul_(turn[rows])
            else:
                tail[rows] = torch.view_as_real(torch.view_as_complex(tail[rows].float()) * turn[rows])
        return x


def rope_frequencies(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """``(main, compress)``: frequencies of window-only layers, and of all that CSA and HCA layers rotate."""
    main = inverse_frequencies(config.rope_dim, config.rope_theta, None)
    compress = inverse_frequencies(config.rope_dim, config.compress_rope_theta, config.yarn)
    return main, compress
