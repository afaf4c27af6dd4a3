"""The draft layer inside the target's checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path

import xxhash
from safetensors import safe_open
from safetensors.torch import save_file

from .nextn import PREFIX, NextN


def backbone_digest(folder: Path) -> str:
    """Of every target tensor in `folder`: the same with and without a draft beside it."""
    digest = xxhash.xxh3_128()
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        for key in sorted(tensors.keys()):
            if not key.startswith(PREFIX):
                digest.update(key.encode())
                digest.update(tensors.get_tensor(key).contiguous().numpy().tobytes())
    return digest.hexdigest()


def write_draft(folder: Path, layer: NextN, target_digest: str) -> None:
    """Puts the layer into the checkpoint in place of any draft there; each file appears whole.

    Raises `ValueError` if the checkpoint's target is no longer the one that the layer was trained on.
    """
    if backbone_digest(folder) != target_digest:
        raise ValueError(f"{folder}: the target changed while its draft was trained; train the draft again")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys() if not key.startswith(PREFIX)}  # noqa: SIM118
    config = json.loads((folder / "config.json").read_text())
    staged = folder / ".model.safetensors.staged"
    save_file(tensors | layer.official(), staged, metadata={"format": "pt"})
    staged.chmod(0o644)
    os.replace(staged, folder / "model.safetensors")
    staged = folder / ".config.json.staged"
    staged.write_text(json.dumps(config | {"num_nextn_predict_layers": 1}, indent=2, ensure_ascii=False) + "\n")
    os.replace(staged, folder / "config.json")
