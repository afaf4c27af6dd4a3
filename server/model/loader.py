"""Loads a checkpoint directory: official key names, one or many safetensors, strictly."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open

from server.model.config import SLIDING, CheckpointError, ModelConfig, load_config
from server.model.fields import saved_by_transformers
from server.model.layers import ROW_TILE
from server.model.network import DeepseekV4
from server.model.numerics import PLAIN, Numerics, check_numerics
from server.model.tensor_files import TensorHeader, tensor_files, tensor_headers

_HC = re.compile(r"^(.*\.)?(hc_attn|hc_ffn|hc_head)_(fn|base|scale)$")
_QUANTIZED = {"F8_E4M3", "F8_E8M0", "I8", "U8"}


def load_model(
    model_dir: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    deterministic: bool = True,
    draft: bool = False,
    numerics: Numerics = PLAIN,
) -> DeepseekV4:
    """Builds the network of ``model_dir`` and fills it, in ``dtype`` except where the model computes in fp32.

    Raises :class:`CheckpointError` that names what is missing, extra, of the wrong shape or quantized. With ``draft``
    the NextN layer is loaded too, and its absence or another kind of draft is an error; without, ``mtp.*`` is left
    alone.
    """
    model, wanted = _matched(model_dir, dtype=dtype, deterministic=deterministic, draft=draft, numerics=numerics)
    expected = dict(model.named_parameters())
    state: dict[str, torch.Tensor] = {}
    for file in dict.fromkeys(header.file for header in wanted.values()):
        with safe_open(file, framework="pt") as tensors:
            for name, header in wanted.items():
                if header.file == file:
                    tensor = tensors.get_tensor(header.key)
                    state[name] = tensor.to(device=device, dtype=expected[name].dtype)
    model.load_state_dict(state, assign=True)
    return model.eval().requires_grad_(False)


def check_tensors(model_dir: Path, *, draft: bool = False, numerics: Numerics = PLAIN) -> int:
    """Whether :func:`load_model` would find every tensor in the shape that it needs, by the headers of the files; their
    number. Raises what it raises.
    """
    _, wanted = _matched(model_dir, dtype=torch.float32, deterministic=True, draft=draft, numerics=numerics)
    return len(wanted)


def _matched(
    model_dir: Path, *, dtype: torch.dtype, deterministic: bool, draft: bool, numerics: Numerics
) -> tuple[DeepseekV4, dict[str, TensorHeader]]:
    """The network, without memory, and the tensor of each of its parameters (by name)."""
    config = load_config(model_dir)
    if config.quantization.linears:
        raise CheckpointError(
            f"{model_dir}: the checkpoint is quantized ({config.quantization.linears}), which is not supported yet; "
            "convert it to bfloat16 or float32"
        )
    check_numerics(numerics, config, str(model_dir))
    headers = tensor_headers(model_dir)
    keys = [header.key for header in headers]
    if renamed := sorted(key for key in keys if key.startswith(("model.", "lm_head."))):
        raise saved_by_transformers(str(model_dir), f"it has a tensor {renamed[0]}")
    if draft:
        _check_draft(model_dir, config, keys)
    with torch.device("meta"):
        model = DeepseekV4(config, dtype, ROW_TILE if deterministic else 0, draft=draft, numerics=numerics)
    expected = dict(model.named_parameters())
    wanted = {_parameter_name(header.key): header for header in headers if draft or not header.key.startswith("mtp.")}
    _check_names(model_dir, expected.keys(), {header.key: name for name, header in wanted.items()})
    for name, header in wanted.items():
        _check_tensor(header, tuple(expected[name].shape))
    return model, wanted


def has_draft(model_dir: Path) -> bool:
    """Whether the checkpoint carries draft tensors, of whatever kind."""
    return any(header.key.startswith("mtp.") for header in tensor_headers(model_dir))


def _check_draft(model_dir: Path, config: ModelConfig, keys: list[str]) -> None:
    """Refuses what is no NextN layer, or one that would need more state than a sliding window."""
    if other := sorted(key for key in keys if re.match(r"mtp\.\d+\.main_proj\.", key)):
        raise CheckpointError(
            f"{model_dir}: {other[0]} shows a DSpark draft, this server runs NextN drafts; go without: "
            "--draft off on the prefill node, --spec-tokens 0 on the decode node"
        )
    if "mtp.0.e_proj.weight" not in keys:
        raise CheckpointError(f"{model_dir} has no NextN draft layer (no mtp.0.e_proj.weight); use --spec-tokens 0")
    if more := sorted(key for key in keys if key.startswith("mtp.") and not key.startswith("mtp.0.")):
        raise CheckpointError(f"{model_dir}: {more[0]} belongs to a second draft layer; this server runs one")
    if config.draft_ratio not in (None, SLIDING):
        raise CheckpointError(
            f"{model_dir}: compress_ratios gives the draft layer ratio {config.draft_ratio}, it must be {SLIDING} "
            "(sliding window only): its compressed state could not be handed over"
        )


def model_fingerprint(model_dir: Path) -> str:
    """xxh3_128, in hex, over ``config.json`` and every weight file's bytes: two nodes that agree compute the same
    function.
    """
    digest = xxhash.xxh3_128()
    for file in [model_dir / "config.json", *tensor_files(model_dir)]:
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def _parameter_name(key: str) -> str:
    """Official key -> parameter name: the hyper-connection tensors live in a module of their own (``hc_attn_fn`` ->
    ``hc_attn.fn``).
    """
    match = _HC.match(key)
    return f"{match[1] or ''}{match[2]}.{match[3]}" if match else key


def official_key(name: str) -> str:
    """Parameter name -> official key, the inverse of what the loader does."""
    return re.sub(r"\b(hc_attn|hc_ffn|hc_head)\.(fn|base|scale)$", r"\1_\2", name)


def _check_names(model_dir: Path, expected: Iterable[str], names: dict[str, str]) -> None:
    wanted, have = set(expected), set(names.values())
    if quantized := sorted(key for key in names if key.endswith(".scale") and "hc_" not in key):
        raise CheckpointError(
            f"{model_dir}: {quantized[0]} belongs to a quantized checkpoint; convert it to bfloat16 or float32"
        )
    problems = []
    if missing := sorted(official_key(name) for name in wanted - have):
        problems.append(f"missing {_some(missing)}")
    if extra := sorted(key for key, name in names.items() if name not in wanted):
        problems.append(f"unknown {_some(extra)}")
    if problems:
        raise CheckpointError(f"{model_dir}: the tensors do not fit config.json: {'; '.join(problems)}")


def _check_tensor(header: TensorHeader, expected: tuple[int, ...]) -> None:
    if header.dtype in _QUANTIZED:
        raise CheckpointError(
            f"{header.file}: {header.key} is stored as {header.dtype}: quantized checkpoints are not supported yet; "
            "convert to bfloat16 or float32"
        )
    if header.shape != expected:
        raise CheckpointError(
            f"{header.file}: {header.key} has shape {list(header.shape)}, config.json asks for {list(expected)}"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
