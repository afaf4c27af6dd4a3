"""Makes a checkpoint in the official format of DeepSeek-V4, for everyone who has not the weights: random numbers in
every tensor of a config, or a plain checkpoint, quantized.

  make_checkpoint.py DIR --config flash --set num_hidden_layers=5 --set hidden_size=512 --set n_routed_experts=16
  make_checkpoint.py DIR --from server/assets/tiny-dsv4
  make_checkpoint.py --list --config pro

--config takes a directory, a config.json, or the name of an official release's config (flash, pro), which comes with
this script. --set changes fields of it. Formats: official (fp8, experts fp4), base (fp8, experts too), bf16, fp32; the
plain ones hold exactly what the official one with the same seed stands for. --list prints the tensors and their bytes,
and writes nothing.

Written shard by shard, with a few hundred MB of memory whatever the size. Exit codes: 0 done, 2 it could not be made.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from server.model.config import CheckpointError, ModelConfig, config_from
from server.model.official_tensors import TensorSpec, official_tensors
from server.node.options import BUNDLED_MODEL
from server.sizes import nbytes_of, size

from .config import DRAFTS, FORMATS, KNOWN, draft_of, read_config, with_changes, with_draft, with_format
from .files import FilesError, ShardedFiles
from .random_weights import RandomWeights
from .stored_weights import StoredWeights
from .table import print_table
from .tokenizer import TOKENIZER_FILES, copy_files, fitting_tokenizer
from .writing import Weights, write_tensors


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", nargs="?", type=Path, metavar="DIR", help="the directory to make")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", metavar="CONFIG", help=f"a directory, a config.json, or {', '.join(KNOWN)}")
    source.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="DIR",
        help="a checkpoint whose weights are taken instead of random ones",
    )
    parser.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="FIELD=VALUE", help="change a field (repeatable)"
    )
    parser.add_argument("--format", choices=FORMATS, default="official", help="how weights are stored (official)")
    parser.add_argument("--draft", choices=DRAFTS, help="the draft's tensors (default: what the config says)")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers (0)")
    parser.add_argument(
        "--shard-size", type=_nbytes, default="5GB", metavar="BYTES", help="most bytes of one file, such as 500MB (5GB)"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="whose tokenizer is copied, or none (default: that of --from, or the bundled one if vocab_size holds it)",
    )
    parser.add_argument("--list", action="store_true", help="print the tensors of the checkpoint and write nothing")
    args = parser.parse_args(argv)
    if args.output is None and not args.list:
        parser.error("give the directory to make, or --list")
    if args.source is not None and args.changes:
        parser.error("--set changes a config whose weights are random; it does not go with --from")
    if args.source is not None and args.draft not in (None, "none"):
        parser.error("--from takes the draft that is there; only --draft none goes with it")
    if args.seed < 0:
        parser.error(f"--seed must not be negative, not {args.seed}")
    return args


def _nbytes(text: str) -> int:
    try:
        return max(1, nbytes_of(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def target_config(args: argparse.Namespace) -> dict[str, Any]:
    """The ``config.json`` that is to be written. Raises :class:`CheckpointError`."""
    raw = read_config(str(args.source or args.config))
    changed = with_changes(raw, args.changes)
    return with_format(with_draft(changed, args.draft or draft_of(changed)), args.format)


def stored_tensors(raw: dict[str, Any], form: str) -> dict[str, TensorSpec]:
    """The tensors of a checkpoint with this config. Raises :class:`CheckpointError` for what this server cannot
    compute.
    """
    table = official_tensors(config_from(raw, "config.json"), draft=draft_of(raw) != "none")
    if form != "fp32":
        return table
    return {key: TensorSpec(spec.shape, "F32" if spec.dtype == "BF16" else spec.dtype) for key, spec in table.items()}


def random_weights(raw: dict[str, Any], form: str, seed: int) -> RandomWeights:
    """Those of the ``base`` or of the official format; a plain checkpoint holds the values of the official one."""
    form = form if form == "base" else "official"
    quantized = with_format(raw, form)
    return RandomWeights(stored_tensors(quantized, form), raw["n_routed_experts"], seed)


def stored_weights(source: Path, raw: dict[str, Any]) -> StoredWeights:
    """The weights of ``source``, which are not quantized twice. Raises :class:`CheckpointError`."""
    own = read_config(str(source))
    config: ModelConfig = config_from(own, str(source / "config.json"))
    if config.quantization.linears and "quantization_config" in raw:
        raise CheckpointError(f"{source} is quantized already: only --format bf16 and fp32 can be made from it")
    return StoredWeights(source, official_tensors(config, draft=draft_of(own) != "none"))


def make(args: argparse.Namespace, console: Console) -> None:
    """Makes ``args.output``, which appears when it is complete.

    Raises :class:`CheckpointError`, :class:`FilesError` or :class:`OSError`.
    """
    output: Path = args.output
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FilesError(f"{output} is there already: name a directory that is not")
    raw = target_config(args)
    table = stored_tensors(raw, args.format)
    total = sum(spec.nbytes for spec in table.values())
    weights: Weights = (
        random_weights(raw, args.format, args.seed) if args.source is None else stored_weights(args.source, raw)
    )
    tokenizer = fitting_tokenizer(args.tokenizer, args.source or BUNDLED_MODEL, raw["vocab_size"])
    output.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(output.parent).free) < total:
        raise FilesError(f"{output} needs {size(total)}, the disk has {size(free)} free")
    staging = output.with_name(f".{output.name}.partial")
    staging.mkdir()
    try:
        files = ShardedFiles(staging, table, args.shard_size)
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("", total=total)
            write_tensors(files, table, weights, lambda n: progress.advance(bar, n))
        (staging / "config.json").write_text(json.dumps(raw, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        copied = copy_files(tokenizer, staging, TOKENIZER_FILES) if tokenizer else []
        if args.source is not None:
            copied += copy_files(args.source, staging, ("generation_config.json",))
        if output.exists():
            output.rmdir()
        staging.rename(output)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    words = f"{output}: {len(table):,} tensors, {total:,} bytes in {files.n_files} files, {args.format} format"
    console.print(f"{words}, {', '.join(copied) if copied else 'no tokenizer'}", highlight=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = parse_args(argv)
    console = Console(width=max(120, Console().width), soft_wrap=True)
    try:
        if args.list:
            print_table(console, stored_tensors(target_config(args), args.format))
        else:
            make(args, console)
    except (CheckpointError, FilesError, OSError) as error:
        print(f"make_checkpoint: {error}", file=sys.stderr)
        return 2
    return 0
