"""Opens a checkpoint whose large weights stay in their files (see :mod:`.stored`); the small ones are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from server.model.checkpoint import StoredTensor
from server.model.file_reader import OnProgress
from server.model.fingerprint import model_fingerprint
from server.model.layers import Linear
from server.model.loader import LoadedCheckpoint, check_numbers, described_network, parameter_name, read_tensor
from server.model.moe import MoE
from server.model.network import DeepseekV4
from server.model.numerics import PLAIN, Numerics
from server.model.stored import TYPES, StoredCheckpoint, StoredEmbedding, StoredWeight, Use


def map_checkpoint(
    model_dir: Path,
    budget: int,
    *,
    dtype: torch.dtype = torch.float32,
    deterministic: bool = True,
    draft: bool = False,
    numerics: Numerics = PLAIN,
    cache_dir: Path | None = None,
    on_progress: OnProgress | None = None,
) -> LoadedCheckpoint:
    """The network of ``model_dir``, which computes the same bits as :func:`.loader.load_checkpoint`'s, with at most
    ``budget`` bytes of its weights in memory.

    Its files are read once for their fingerprint, if ``cache_dir`` has none of them (see :mod:`.fingerprint`). What is
    in them is checked by their headers; numbers of large weights are not looked at. Raises :class:`CheckpointError`.
    """
    checkpoint, network = described_network(
        model_dir, dtype=dtype, deterministic=deterministic, draft=draft, numerics=numerics
    )
    tensors = {parameter_name(key): tensor for key, tensor in checkpoint.tensors.items()}
    network.stored = _map(network, tensors, budget)
    fingerprint = model_fingerprint(model_dir, cache_dir=cache_dir, on_progress=on_progress)
    return LoadedCheckpoint(network.eval().requires_grad_(False), fingerprint, checkpoint.draft)


def _map(network: DeepseekV4, tensors: dict[str, StoredTensor], budget: int) -> StoredCheckpoint:
    """Gives every module of ``network`` its weights, mapped or loaded."""
    stored = StoredCheckpoint(budget)
    loaded: dict[str, torch.Tensor] = {}
    for name, parameter in list(network.named_parameters()):
        owner, _, last = name.rpartition(".")
        module, tensor = network.get_submodule(owner), tensors[name]
        if last == "weight" and isinstance(module, Linear | nn.Embedding) and tensor.data.dtype in TYPES:
            weight = StoredWeight(stored, tensor, parameter.dtype, _use(name))
            for header in weight.headers:
                stored.file(header)
            stored.weights[name] = weight
            loaded[name] = torch.empty(0, dtype=parameter.dtype)
        else:
            loaded[name] = _load(tensor).to(parameter.dtype)
            stored.loaded_nbytes += loaded[name].nbytes
        if isinstance(module, Linear):
            module.quantized = tensor.quantized
    for name, value in loaded.items():
        owner, _, last = name.rpartition(".")
        setattr(network.get_submodule(owner), last, nn.Parameter(value, requires_grad=False))
    for name, weight in stored.weights.items():
        module = network.get_submodule(name.rpartition(".")[0])
        if isinstance(module, Linear):
            module.stored = weight
        else:
            network.embed = StoredEmbedding(weight)
    return stored


def _use(name: str) -> Use:
    if name == "embed.weight":
        return Use.BY_ROW
    return Use.BY_CHOICE if ".experts." in name else Use.EVERY_STEP


def _load(tensor: StoredTensor) -> torch.Tensor:
    numbers = read_tensor(tensor.data)
    check_numbers(numbers, tensor.data)
    return numbers


def used_together(network: DeepseekV4) -> Iterator[list[StoredWeight]]:
    """The weights that the model in Python makes numbers at the same time."""
    for module in network.modules():
        if isinstance(module, MoE) and module.all_compute:
            yield [each.stored for each in module.modules() if isinstance(each, Linear) and each.stored is not None]
        elif isinstance(module, Linear) and module.stored is not None:
            yield [module.stored]
