"""The checkpoint folder under official keys: the exported target, and the draft layer beside it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from .model import official_tensors, raw_config
from .nextn import PREFIX, NextN
from .tokenizer import save_tokenizer

WEIGHTS = "model.safetensors"


def export_checkpoint(model: DeepseekV4ForCausalLM, folder: Path) -> None:
    """Writes the checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    staging = folder.with_name(f".{folder.name}.staging")
    staging.mkdir(exist_ok=True)
    save_tokenizer(staging)
    _write_json(staging / "config.json", raw_config(model.config.vocab_size))
    generation = {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1, "do_sample": False}
    _write_json(staging / "generation_config.json", generation)
    save_file(official_tensors(model, model.state_dict()), staging / WEIGHTS, metadata={"format": "pt"})
    _move(staging, folder)


def load_exported(folder: Path) -> DeepseekV4ForCausalLM:
    """The exported checkpoint as transformers reads it."""
    return DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def target_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor but those of a draft."""
    return {key: tensor for key, tensor in load_file(folder / WEIGHTS).items() if not key.startswith(PREFIX)}


def target_digest(folder: Path) -> str:
    """Of every target tensor in `folder`: the same with and without a draft beside it."""
    digest = xxhash.xxh3_128()
    for key, tensor in sorted(target_tensors(folder).items()):
        digest.update(key.encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def write_draft(folder: Path, layer: NextN, digest: str) -> None:
    """Puts the layer into the checkpoint in place of any draft there.

    Raises `ValueError` if the checkpoint's target is no longer the one that the layer was trained on.
    """
    if target_digest(folder) != digest:
        raise ValueError(f"{folder}: the target changed while its draft was trained; train the draft again")
    staging = folder / ".staging"
    staging.mkdir(exist_ok=True)
    save_file(target_tensors(folder) | layer.official(), staging / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    _write_json(staging / "config.json", config | {"num_nextn_predict_layers": 1})
    _move(staging, folder)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _move(staging: Path, folder: Path) -> None:
    """Moves every file into `folder`, the config last; each appears whole, so a reader never sees half of one."""
    for path in sorted(staging.iterdir(), reverse=True):
        path.chmod(0o644)
        os.replace(path, folder / path.name)
    staging.rmdir()
