"""What a hand-over of the released models moves: by a formula for each kind of layer, and as published totals."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.cache.layout import ArenaLayout
from server.cache.specs import STREAMS_OFFSET, CacheGeometry
from server.model.config import CSA, HCA, ModelConfig, load_config
from server.model.state import state_components

CONFIGS = Path(__file__).parents[3] / "shared" / "data" / "dsv4"
LENGTHS = (1000, 4096, 8191, 65536, 1048575)
MIB = {
    ("flash", "model"): (20.6, 32.8, 70.1, 435.9, 6896),
    ("flash", "fp8"): (15.3, 18.6, 44.2, 244.2, 3864),
    ("pro", "model"): (30.3, 46.8, 101.5, 623.8, 9873),
    ("pro", "fp8"): (22.9, 26.6, 64.3, 349.5, 5533),
}
"""Of :data:`LENGTHS` tokens with a draft, without the head of the hand-off row; index keys are fp8 where rows are."""

pytestmark = pytest.mark.skipif(not CONFIGS.is_dir(), reason="the official configs are not beside this checkout")


def moved_nbytes(config: ModelConfig, n: int, kv_dtype: str, index_dtype: str) -> int:
    specs = state_components(config, "bfloat16", draft=True, kv_dtype=kv_dtype, index_dtype=index_dtype)
    layout = ArenaLayout.from_geometry(CacheGeometry(256, 2, 2, config.sliding_window, 0, specs))
    return sum(layout.live_nbytes(n).values()) - STREAMS_OFFSET


def formula(config: ModelConfig, n: int, k: int, x: int) -> int:
    """``k`` bytes of an entry or window row, ``x`` of an index key; states in fp32, streams in bf16."""
    window = k * min(n, 127)
    hca = window + k * (n // 128) + 4096 * (n % 128)
    csa = window + (k + x) * (n // 4) + 20480 * (n >= 4) + 10240 * (n % 4)
    n_csa, n_hca = len(config.layers_of(CSA)), len(config.layers_of(HCA))
    n_sliding = config.num_hidden_layers - n_csa - n_hca
    draft = k * min(n - 1, 127) + config.hc_mult * config.hidden_size * 2
    return n_sliding * window + n_hca * hca + n_csa * csa + draft


@pytest.mark.parametrize("name", ["flash", "pro"])
@pytest.mark.parametrize(
    ("kv_dtype", "index_dtype", "k", "x"),
    [("model", "auto", 1024, 256), ("fp8", "fp8", 584, 132), ("fp8", "auto", 584, 68), ("fp8", "model", 584, 256)],
)
def test_bytes_follow_the_formula(name: str, kv_dtype: str, index_dtype: str, k: int, x: int) -> None:
    config = load_config(CONFIGS / name)
    for n in (1, 3, 4, 127, 128, 129, *LENGTHS):
        assert moved_nbytes(config, n, kv_dtype, index_dtype) == formula(config, n, k, x), f"{n} tokens"


@pytest.mark.parametrize(("name", "kv_dtype"), MIB)
def test_bytes_are_the_published_totals(name: str, kv_dtype: str) -> None:
    config = load_config(CONFIGS / name)
    for n, mib in zip(LENGTHS, MIB[name, kv_dtype], strict=True):
        found = moved_nbytes(config, n, kv_dtype, kv_dtype) / 2**20
        assert found == pytest.approx(mib, abs=0.5 if mib > 1000 else 0.06), f"{n} tokens"
