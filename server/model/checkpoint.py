"""A model directory against the official format: every tensor there, in its shape and dtype, by the files' headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from server.model.config import SLIDING, CheckpointError, ModelConfig, load_config
from server.model.draft import Draft, draft_of
from server.model.fields import saved_by_transformers
from server.model.official_tensors import TensorSpec, official_tensors
from server.model.tensor_files import TensorHeader, tensor_files, tensor_headers

Quantized = Literal["", "fp8", "fp4"]

_FLOATS, _INTEGERS = ("F32", "BF16", "F16"), ("I64", "I32")
"""Plain numbers are converted from any of these; quantized ones are taken as they should be or not at all."""
_QUANTIZED: Mapping[str, Quantized] = {"F8_E4M3": "fp8", "I8": "fp4"}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the network as it is stored: of a quantized weight the codes, with their scales."""

    data: TensorHeader
    scale: TensorHeader | None = None

    @property
    def quantized(self) -> Quantized:
        return _QUANTIZED.get(self.data.dtype, "")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers that are stored: fp4 has two in a byte."""
        n_out, *others = self.data.shape
        return (n_out, 2 * others[0]) if self.quantized == "fp4" else self.data.shape


@dataclass(frozen=True)
class Checkpoint:
    """A directory that is whole. ``tensors`` are those of the network by official key, scales with their weights, and
    of its NextN layer if ``draft`` says that there is one; ``files`` has every weight file.
    """

    path: Path
    config: ModelConfig
    draft: Draft
    tensors: dict[str, StoredTensor]
    files: list[Path]

    @property
    def n_draft_tensors(self) -> int:
        return sum(key.startswith("mtp.") for key in self.tensors)


def open_checkpoint(model_dir: Path) -> Checkpoint:
    """Reads the headers of ``model_dir``. Raises :class:`CheckpointError` that names what is missing, extra, or of the
    wrong shape or dtype, with its file.

    A draft that is not run (DSpark) must be whole all the same. Only ``mtp.*`` tensors that nothing describes are left
    alone.
    """
    config, headers = load_config(model_dir), {header.key: header for header in tensor_headers(model_dir)}
    if renamed := sorted(key for key in headers if key.startswith(("model.", "lm_head."))):
        raise saved_by_transformers(str(model_dir), f"it has a tensor {renamed[0]}")
    config = _with_experts(config, headers)
    draft = draft_of(headers)
    table = _table(config, draft)
    described = any(key.startswith("mtp.") for key in table)
    _check_names(model_dir, table, {key: h for key, h in headers.items() if described or not key.startswith("mtp.")})
    for key, spec in table.items():
        _check_tensor(headers[key], spec)
    tensors = {
        key: StoredTensor(headers[key], headers[_scale_of(key)] if spec.dtype in _QUANTIZED else None)
        for key, spec in table.items()
        if spec.dtype != "F8_E8M0" and (draft is Draft.NEXTN or not key.startswith("mtp."))
    }
    return Checkpoint(model_dir, config, draft, tensors, tensor_files(model_dir))


def has_draft(model_dir: Path) -> bool:
    """Whether the checkpoint carries a draft that this server runs."""
    return draft_of([header.key for header in tensor_headers(model_dir)]) is Draft.NEXTN


def check_draft(checkpoint: Checkpoint) -> None:
    """Refuses what is no NextN layer, or one that would need more state than a sliding window. Raises
    :class:`CheckpointError`.
    """
    model_dir, config = checkpoint.path, checkpoint.config
    if checkpoint.draft is Draft.DSPARK:
        raise CheckpointError(
            f"{model_dir}: mtp.0.main_proj.weight shows a DSpark draft, this server runs NextN drafts; go without: "
            "--draft off on the prefill node, --spec-tokens 0 on the decode node"
        )
    if checkpoint.draft is not Draft.NEXTN:
        other = "its mtp.* tensors are no single NextN layer" if checkpoint.draft is Draft.OTHER else "no mtp.* tensor"
        raise CheckpointError(f"{model_dir} has no NextN draft layer ({other}); use --spec-tokens 0")
    if config.draft_ratio not in (None, SLIDING):
        raise CheckpointError(
            f"{model_dir}: compress_ratios gives the draft layer ratio {config.draft_ratio}, it must be {SLIDING} "
            "(sliding window only): its compressed state could not be handed over"
        )


def _with_experts(config: ModelConfig, headers: Mapping[str, TensorHeader]) -> ModelConfig:
    """``config`` with the way in which experts are stored, where only the tensors tell it."""
    if config.quantization.experts_stated:
        return config
    first = headers.get("layers.0.ffn.experts.0.w1.weight")
    experts: Quantized = _QUANTIZED.get(first.dtype, "") if first is not None else config.quantization.experts
    return replace(config, quantization=replace(config.quantization, experts=experts, experts_stated=True))


def _table(config: ModelConfig, draft: Draft) -> dict[str, TensorSpec]:
    """What must be there, with a draft that is of the kind which its tensors show."""
    if draft is Draft.DSPARK:
        return official_tensors(config, draft=config.dspark is not None)
    return official_tensors(replace(config, dspark=None), draft=draft is Draft.NEXTN)


def _scale_of(key: str) -> str:
    return f"{key.removesuffix('.weight')}.scale"


def _check_names(model_dir: Path, table: Mapping[str, TensorSpec], headers: Mapping[str, TensorHeader]) -> None:
    problems = []
    if missing := [key for key in table if key not in headers]:
        problems.append(f"missing {_some(missing)}")
    if extra := [header for key, header in headers.items() if key not in table]:
        problems.append(f"unknown {_some([header.key for header in extra])} (in {extra[0].file.name})")
        if extra[0].key.endswith(".scale") and extra[0].dtype == "F8_E8M0":
            problems.append("config.json does not say that these weights are quantized")
    if problems:
        raise CheckpointError(f"{model_dir}: the tensors do not fit config.json: {'; '.join(problems)}")


def _check_tensor(header: TensorHeader, spec: TensorSpec) -> None:
    """Raises :class:`CheckpointError` for another shape or dtype than the table's; the dtype first, which explains the
    shape of packed numbers.
    """
    kinds = {"BF16": _FLOATS, "F32": _FLOATS, "I64": _INTEGERS}.get(spec.dtype, (spec.dtype,))
    if header.dtype not in kinds:
        raise CheckpointError(
            f"{header.file}: {header.key} is stored as {header.dtype}, config.json asks for {' or '.join(kinds)}"
        )
    if header.shape != spec.shape:
        raise CheckpointError(
            f"{header.file}: {header.key} has shape {list(header.shape)}, config.json asks for {list(spec.shape)}"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
