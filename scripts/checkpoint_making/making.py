"""A whole checkpoint: its config, its tensors out of some weights, and the files that are copied beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from server.model.config import CheckpointError, config_from
from server.model.official_tensors import TensorSpec, official_tensors
from server.sizes import size

from .config import draft_of, read_config, with_format
from .files import FilesError, ShardedFiles
from .random_weights import RandomWeights
from .stored_weights import StoredWeights
from .writing import Weights, write_tensors

SHARD_NBYTES = 5_000_000_000


def stored_tensors(raw: dict[str, Any], form: str) -> dict[str, TensorSpec]:
    """The tensors of a checkpoint with this ``config.json``. Raises :class:`CheckpointError` for what this server
    cannot compute.
    """
    table = official_tensors(config_from(raw, "config.json"), draft=draft_of(raw) != "none")
    if form != "fp32":
        return table
    return {key: TensorSpec(spec.shape, "F32" if spec.dtype == "BF16" else spec.dtype) for key, spec in table.items()}


def random_weights(raw: dict[str, Any], form: str, seed: int) -> RandomWeights:
    """Those of the ``base`` or of the official format; a plain checkpoint holds the values of the official one."""
    form = form if form == "base" else "official"
    return RandomWeights(stored_tensors(with_format(raw, form), form), raw["n_routed_experts"], seed)


def stored_weights(source: Path, raw: dict[str, Any]) -> StoredWeights:
    """The weights of ``source``, which are not quantized twice. Raises :class:`CheckpointError`."""
    own = read_config(str(source))
    config = config_from(own, str(source / "config.json"))
    if config.quantization.linears and "quantization_config" in raw:
        raise CheckpointError(f"{source} is quantized already: only --format bf16 and fp32 can be made from it")
    return StoredWeights(source, official_tensors(config, draft=draft_of(own) != "none"))


def write_checkpoint(
    output: Path,
    raw: dict[str, Any],
    form: str,
    weights: Weights,
    *,
    copied: Iterable[Path] = (),
    shard_nbytes: int = SHARD_NBYTES,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> ShardedFiles:
    """Makes the directory ``output`` with ``raw`` as its config; it appears when it is complete.

    ``on_bytes`` is told what was written. Raises :class:`CheckpointError`, :class:`FilesError` or :class:`OSError`.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FilesError(f"{output} is there already: name a directory that is not")
    table = stored_tensors(raw, form)
    output.parent.mkdir(parents=True, exist_ok=True)
    total, free = sum(spec.nbytes for spec in table.values()), shutil.disk_usage(output.parent).free
    if free < total:
        raise FilesError(f"{output} needs {size(total)}, the disk has {size(free)} free")
    staging = output.with_name(f".{output.name}.partial")
    staging.mkdir()
    try:
        files = ShardedFiles(staging, table, shard_nbytes)
        write_tensors(files, table, weights, on_bytes)
        (staging / "config.json").write_text(json.dumps(raw, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        for file in copied:
            shutil.copyfile(file, staging / file.name)
        if output.exists():
            output.rmdir()
        staging.rename(output)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return files
