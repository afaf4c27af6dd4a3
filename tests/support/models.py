"""Checkpoints loaded for either implementation of the network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from server.kernels.choice import choose_kernels
from server.model.interface import LoadedModel
from server.model.loader import load_model

BOTH = ("python", "cpu")


def load(path: Path, kernels: str = "auto", *, dtype: torch.dtype = torch.float32, draft: bool = False) -> LoadedModel:
    """A checkpoint for ``--kernels`` of this value. ``cpu`` skips the test where there are none (no compiler)."""
    chosen = choose_kernels("auto" if kernels == "cpu" else kernels, "cpu")
    if kernels == "cpu" and chosen.library is None:
        pytest.skip(chosen.reason)
    return chosen.take(load_model(path, dtype=dtype, draft=draft))
