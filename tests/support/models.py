"""Checkpoints loaded for either implementation of the network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from server.kernels.choice import choose_kernels
from server.model.interface import LoadedModel
from server.model.loader import load_model
from server.model.numerics import PLAIN, Numerics
from tests.support.quantized import take_for_quantized

BOTH = ("python", "cpu")


def load(
    path: Path,
    kernels: str = "auto",
    *,
    dtype: torch.dtype = torch.float32,
    draft: bool = False,
    numerics: Numerics = PLAIN,
) -> LoadedModel:
    """A checkpoint for ``--kernels`` of this value. ``cpu`` skips the test where there are none (no compiler).

    Its weights are taken for those of a quantized one, which makes no difference to ``plain``.
    """
    chosen = choose_kernels("auto" if kernels == "cpu" else kernels, "cpu")
    if kernels == "cpu" and chosen.library is None:
        pytest.skip(chosen.reason)
    return chosen.take(take_for_quantized(load_model(path, dtype=dtype, draft=draft, numerics=numerics)))
