"""Which weights a released checkpoint stores quantized, and models of unquantized ones that are taken for such."""

from __future__ import annotations

from dataclasses import replace

from server.model.config import ModelConfig, Quantization
from server.model.layers import Linear
from server.model.network import DeepseekV4
from server.model.official_tensors import official_tensors

_STORED_AS = {"F8_E4M3": "fp8", "I8": "fp4"}


def quantized_weights(config: ModelConfig, *, draft: bool) -> dict[str, str]:
    """The keys of quantized weights in a release of this shape, and how each is stored."""
    released = replace(config, quantization=Quantization("fp8", "fp4"))
    specs = official_tensors(released, draft=draft)
    return {key: _STORED_AS[spec.dtype] for key, spec in specs.items() if spec.dtype in _STORED_AS}


def take_for_quantized(model: DeepseekV4) -> DeepseekV4:
    """``model``, as if its weights were the values of quantized ones: then ``official`` quantizes their inputs."""
    for key, stored_as in quantized_weights(model.config, draft=model.drafts).items():
        layer = model.get_submodule(key.removesuffix(".weight"))
        if not isinstance(layer, Linear):
            raise TypeError(f"{key} belongs to no linear map")
        layer.quantized = stored_as
    return model
