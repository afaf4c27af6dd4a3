"""Random checkpoints in the official format, quantized and in several shards, with the numbers that they stand for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from server.model.config import ModelConfig, load_config
from server.model.official_tensors import TensorSpec, official_tensors
from server.model.quantization import dequantize_fp4, dequantize_fp8, quantize_fp4, quantize_fp8
from tests.support.checkpoints import SMALL, save_official

FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
OFFICIAL: dict[str, Any] = {"quantization_config": FP8, "expert_dtype": "fp4"}
BASE: dict[str, Any] = {"quantization_config": FP8, "expert_dtype": "fp8"}


@dataclass(frozen=True)
class Made:
    """What was written: ``stored`` by key as in the files, ``numbers`` by key of the network's tensors in fp32 (int64
    for ``tid2eid``).
    """

    path: Path
    config: ModelConfig
    stored: dict[str, torch.Tensor]
    numbers: dict[str, torch.Tensor]


def make_quantized(path: Path, *, seed: int = 0, shards: int = 3, draft: bool = True, **changes: Any) -> Made:
    """Writes a random checkpoint by the official table. ``changes`` are fields of config.json."""
    raw = {**SMALL, **OFFICIAL, "num_nextn_predict_layers": int(draft), **changes}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    config = load_config(path)
    generator = torch.Generator().manual_seed(seed)
    stored: dict[str, torch.Tensor] = {}
    numbers: dict[str, torch.Tensor] = {}
    table = official_tensors(config, draft=draft)
    for key, spec in table.items():
        if spec.dtype == "F8_E8M0":
            continue
        stored[key], scale, numbers[key] = _random(key, spec, config, generator)
        if scale is not None:
            stored[key.removesuffix("weight") + "scale"] = scale
    write_shards(path, stored, shards)
    return Made(path, config, stored, numbers)


def write_plain_twin(made: Made, path: Path) -> None:
    """The same numbers in fp32, as a checkpoint that nothing says is quantized."""
    raw = json.loads((made.path / "config.json").read_text(encoding="utf-8"))
    raw |= {"quantization_config": None, "expert_dtype": None}
    save_official(path, made.numbers)
    (path / "config.json").write_text(json.dumps(raw), encoding="utf-8")


def _random(
    key: str, spec: TensorSpec, config: ModelConfig, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """A tensor as it is stored, its scale if it has one, and the numbers that both stand for."""
    if spec.dtype == "I64":
        n_tokens, n_chosen = spec.shape
        order = torch.rand(n_tokens, config.n_routed_experts, generator=generator).argsort(dim=1)
        chosen = order[:, :n_chosen].contiguous()
        return chosen, None, chosen
    shape = (spec.shape[0], 2 * spec.shape[1]) if spec.dtype == "I8" else spec.shape
    wide = torch.randn(shape, generator=generator)
    if "norm" in key:
        wide = 1 + 0.2 * wide
    elif len(shape) < 2 or key.endswith("ape"):
        wide = 0.5 * wide
    else:
        wide = wide * 1.5 / shape[-1] ** 0.5
    if spec.dtype == "F8_E4M3":
        codes, scale = quantize_fp8(wide)
        return codes, scale, dequantize_fp8(codes, scale)
    if spec.dtype == "I8":
        codes, scale = quantize_fp4(wide)
        return codes, scale, dequantize_fp4(codes, scale).contiguous()
    plain = wide.to(torch.bfloat16 if spec.dtype == "BF16" else torch.float32)
    return plain, None, plain.float()


def write_shards(path: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    """Files as the official ones are named, with an index; neighbours in ``tensors`` are spread over all of them."""
    index: dict[str, str] = {}
    for i in range(shards):
        part = {key: tensor for j, (key, tensor) in enumerate(tensors.items()) if j % shards == i}
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, path / name)
        index |= dict.fromkeys(part, name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    (path / "model.safetensors.index.json").write_text(text, encoding="utf-8")
