"""Bytes of weights by the config, against the parameters of the network itself and the published files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from server.cache.arena import TORCH_DTYPES
from server.model.config import Quantization, load_config
from server.model.layers import Linear
from server.model.network import DeepseekV4
from server.model.official_tensors import official_tensors
from server.model.weight_sizes import weight_sizes
from server.node.options import BUNDLED_MODEL

CONFIGS = Path(__file__).parents[3] / "shared" / "data" / "dsv4"


@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_they_are_those_of_the_network(dtype: str, draft: bool) -> None:
    config = load_config(BUNDLED_MODEL)
    with torch.device("meta"):
        network = DeepseekV4(config, TORCH_DTYPES[dtype], 16, draft=draft)
    nbytes = sum(parameter.nbytes for parameter in network.parameters())
    assert weight_sizes(config, dtype, draft=draft).loaded == nbytes
    quantized = replace(config, quantization=Quantization("fp8", "fp4"))
    assert weight_sizes(quantized, dtype, draft=draft).loaded == nbytes


def test_packed_weights_stay_in_their_files() -> None:
    config = replace(load_config(BUNDLED_MODEL), quantization=Quantization("fp8", "fp4"))
    whole, packed = (weight_sizes(config, "float32", draft=True, packed=packed) for packed in (False, True))
    assert whole.mapped == 0
    with torch.device("meta"):
        network = DeepseekV4(config, torch.float32, 16, draft=True)
    large = {
        f"{name}.weight" for name, module in network.named_modules() if isinstance(module, Linear | torch.nn.Embedding)
    }
    small = {name: parameter for name, parameter in network.named_parameters() if name not in large}
    assert packed.loaded == sum(parameter.nbytes for parameter in small.values())
    stored = official_tensors(config)
    in_files = [spec for key, spec in stored.items() if key in large or key.endswith(".scale")]
    assert packed.mapped == sum(spec.nbytes for spec in in_files)


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="the official configs are not beside this checkout")
def test_v4_flash_packed_is_nearly_all_in_its_files() -> None:
    sizes = weight_sizes(load_config(CONFIGS / "flash"), "bfloat16", draft=True, packed=True)
    assert 0.97 < sizes.mapped / 159_609_485_896 < 1
