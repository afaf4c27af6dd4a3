"""Loads a checkpoint directory: official key names, one or many safetensors, quantized or not, strictly."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from server.model.blocks import WEIGHT_BLOCK
from server.model.checkpoint import Checkpoint, StoredTensor, check_draft, open_checkpoint
from server.model.config import CheckpointError
from server.model.draft import Draft
from server.model.file_reader import ByteCount, FileReader, OnProgress
from server.model.fingerprint import model_fingerprint
from server.model.layers import ROW_TILE, Linear
from server.model.network import DeepseekV4
from server.model.numerics import PLAIN, Numerics, check_numerics
from server.model.quantization import dequantize_fp4, dequantize_fp8
from server.model.tensor_files import TensorHeader

log = logging.getLogger(__name__)

_HC = re.compile(r"^(.*\.)?(hc_attn|hc_ffn|hc_head)_(fn|base|scale)$")
_BLOCK_NUMBERS = 1 << 17
_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True)
class LoadedCheckpoint:
    """``fingerprint`` is :func:`.fingerprint.model_fingerprint` of the directory, ``draft`` what it carries (and what
    ``network`` has only if that was asked for).
    """

    network: DeepseekV4
    fingerprint: str
    draft: Draft


def load_model(
    model_dir: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    deterministic: bool = True,
    draft: bool = False,
    numerics: Numerics = PLAIN,
) -> DeepseekV4:
    """The network alone: see :func:`load_checkpoint`."""
    loaded = load_checkpoint(
        model_dir, dtype=dtype, device=device, deterministic=deterministic, draft=draft, numerics=numerics
    )
    return loaded.network


def load_checkpoint(
    model_dir: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    deterministic: bool = True,
    draft: bool = False,
    numerics: Numerics = PLAIN,
    on_progress: OnProgress | None = None,
) -> LoadedCheckpoint:
    """Builds the network of ``model_dir`` and fills it, in ``dtype`` except where the model computes in fp32.

    Quantized weights become the numbers that they stand for, exactly; :attr:`.Linear.quantized` keeps how each was
    stored. Every byte of the files is read once, in order, block by block; beside the network there is never more than
    some blocks. Raises :class:`CheckpointError` that names what is missing, extra, of the wrong shape or dtype, or
    damaged, with its file. With ``draft`` the NextN layer is loaded too, and its absence or another kind of draft is an
    error.
    """
    checkpoint, model = described_network(
        model_dir, dtype=dtype, deterministic=deterministic, draft=draft, numerics=numerics
    )
    loader = _Loader(checkpoint, model, device, on_progress)
    state = loader.load()
    model.load_state_dict(state, assign=True)
    fingerprint = model_fingerprint(model_dir, loader.digests)
    return LoadedCheckpoint(model.eval().requires_grad_(False), fingerprint, checkpoint.draft)


def check_tensors(model_dir: Path, *, draft: bool = False, numerics: Numerics = PLAIN) -> int:
    """Whether :func:`load_checkpoint` would find every tensor as it needs it, by the headers of the files; their number
    (scales are none of their own). Raises what it raises.
    """
    checkpoint = _checked(model_dir, draft=draft, numerics=numerics)
    return len(checkpoint.tensors) - (0 if draft else checkpoint.n_draft_tensors)


def described_network(
    model_dir: Path, *, dtype: torch.dtype, deterministic: bool, draft: bool, numerics: Numerics
) -> tuple[Checkpoint, DeepseekV4]:
    """A checkpoint whose headers were found right, and its network without memory for the weights.

    Raises :class:`CheckpointError`; a draft that is not loaded because it cannot be run is logged.
    """
    checkpoint = _checked(model_dir, draft=draft, numerics=numerics)
    if not draft and checkpoint.draft in (Draft.DSPARK, Draft.OTHER):
        log.warning("%s: its draft (%s) is not loaded: this server runs NextN drafts", model_dir, checkpoint.draft)
    with torch.device("meta"):
        network = DeepseekV4(checkpoint.config, dtype, ROW_TILE if deterministic else 0, draft=draft, numerics=numerics)
    return checkpoint, network


def _checked(model_dir: Path, *, draft: bool, numerics: Numerics) -> Checkpoint:
    checkpoint = open_checkpoint(model_dir)
    check_numerics(numerics, checkpoint.config, str(model_dir))
    if draft:
        check_draft(checkpoint)
    return checkpoint


class _Loader:
    """Fills the parameters of ``model``, file by file."""

    def __init__(self, checkpoint: Checkpoint, model: DeepseekV4, device: str, on_progress: OnProgress | None) -> None:
        self.digests: dict[Path, str] = {}
        self._checkpoint, self._model, self._device = checkpoint, model, device
        self._count = ByteCount(sum(file.stat().st_size for file in checkpoint.files), on_progress)
        self._parameters = dict(model.named_parameters())
        self._staging = torch.empty(0, dtype=torch.uint8)

    def load(self) -> dict[str, torch.Tensor]:
        """Every parameter by name."""
        loaded: dict[str, torch.Tensor] = {}
        by_file: dict[Path, list[tuple[str, StoredTensor]]] = {file: [] for file in self._checkpoint.files}
        for key, tensor in self._checkpoint.tensors.items():
            if (name := parameter_name(key)) in self._parameters:
                by_file[tensor.data.file].append((name, tensor))
                dtype = self._parameters[name].dtype
                # all before the first is read: else what the conversion takes and frees would leave gaps between them
                loaded[name] = torch.empty(tensor.shape, dtype=dtype, device=self._device)
        for file, tensors in by_file.items():
            with FileReader(file, self._count) as reader:
                for name, tensor in sorted(tensors, key=lambda item: item[1].data.offset):
                    reader.skip_to(tensor.data.offset, f"what is before {tensor.data.key}")
                    self._read_into(loaded[name], reader, tensor)
                    self._mark(name, tensor)
                reader.skip_to(file.stat().st_size, "its end")
                self.digests[file] = reader.end()
        return loaded

    def _mark(self, name: str, tensor: StoredTensor) -> None:
        owner, _, last = name.rpartition(".")
        module = self._model.get_submodule(owner)
        if last == "weight" and isinstance(module, Linear):
            module.quantized = tensor.quantized

    def _read_into(self, whole: torch.Tensor, reader: FileReader, tensor: StoredTensor) -> None:
        """Fills ``whole`` with the numbers of the file's next tensor, in blocks of rows."""
        header = tensor.data
        rows = whole.view(1, -1) if len(tensor.shape) == 1 else whole.view(tensor.shape[0], -1)
        scale = None if tensor.scale is None else read_tensor(tensor.scale)
        for block in _row_blocks(rows, tensor.quantized):
            out = rows[block]
            if out.device.type == "cpu" and _DTYPES[header.dtype] == out.dtype:
                reader.read_into(_bytes_of(out), header.key)
                check_numbers(out, header)
                continue
            stored = self._stage(header.nbytes // rows.shape[0] * out.shape[0])
            reader.read_into(_bytes_of(stored), header.key)
            numbers = _dequantized(stored.view(_DTYPES[header.dtype]).view(out.shape[0], -1), scale, tensor, block)
            check_numbers(numbers, header)
            out.copy_(numbers)

    def _stage(self, nbytes: int) -> torch.Tensor:
        """Memory for bytes as they are stored; the same for every block."""
        if len(self._staging) < nbytes:
            self._staging = torch.empty(nbytes, dtype=torch.uint8)
        return self._staging[:nbytes]


def read_tensor(header: TensorHeader) -> torch.Tensor:
    """One tensor as it is stored. Raises :class:`CheckpointError` if its file ends before it does."""
    tensor = torch.empty(header.nbytes, dtype=torch.uint8)
    with header.file.open("rb") as stream:
        stream.seek(header.offset)
        if stream.readinto(_bytes_of(tensor)) != header.nbytes:
            raise CheckpointError(f"{header.file} has become shorter while it was read: it ends within {header.key}")
    return tensor.view(_DTYPES[header.dtype]).view(header.shape)


def _row_blocks(rows: torch.Tensor, quantized: str) -> Iterator[slice]:
    """Rows that are read at a time: whole blocks of scales, and no more numbers than the processor's cache holds."""
    n_rows, width = rows.shape
    unit = WEIGHT_BLOCK if quantized == "fp8" else 1
    step = max(1, _BLOCK_NUMBERS // width // unit) * unit
    for start in range(0, n_rows, step):
        yield slice(start, min(start + step, n_rows))


def _dequantized(stored: torch.Tensor, scale: torch.Tensor | None, tensor: StoredTensor, rows: slice) -> torch.Tensor:
    """The numbers of the rows ``rows`` of a tensor, ``[rows, width]``."""
    if scale is None:
        return stored
    if tensor.quantized == "fp4":
        return dequantize_fp4(stored, scale[rows])
    return dequantize_fp8(stored, scale[rows.start // WEIGHT_BLOCK : -(-rows.stop // WEIGHT_BLOCK)])


def check_numbers(numbers: torch.Tensor, header: TensorHeader) -> None:
    """Raises :class:`CheckpointError` for a NaN or an infinity: bytes of the file, or of its scales, are damaged."""
    if numbers.dtype.is_floating_point and not all(edge.isfinite() for edge in numbers.aminmax()):
        raise CheckpointError(f"{header.file}: {header.key} holds a number that is not finite: the file is damaged")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data.cast("B")


def parameter_name(key: str) -> str:
    """Official key -> parameter name: the hyper-connection tensors live in a module of their own (``hc_attn_fn`` ->
    ``hc_attn.fn``).
    """
    match = _HC.match(key)
    return f"{match[1] or ''}{match[2]}.{match[3]}" if match else key


def official_key(name: str) -> str:
    """Parameter name -> official key, the inverse of what the loader does."""
    return re.sub(r"\b(hc_attn|hc_ffn|hc_head)\.(fn|base|scale)$", r"\1_\2", name)
