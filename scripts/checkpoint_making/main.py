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
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from server.model.config import CheckpointError
from server.node.options import BUNDLED_MODEL
from server.sizes import nbytes_of

from .config import DRAFTS, FORMATS, KNOWN, draft_of, read_config, with_changes, with_draft, with_format
from .files import FilesError
from .making import SHARD_NBYTES, random_weights, stored_tensors, stored_weights, write_checkpoint
from .table import print_table
from .tokenizer import fitting_tokenizer
from .writing import Weights


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
        "--shard-size",
        type=_nbytes,
        default=SHARD_NBYTES,
        metavar="BYTES",
        help="most bytes of one file, such as 500MB (5GB)",
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


def make(args: argparse.Namespace) -> str:
    """Makes ``args.output``; what it has in words.

    Raises :class:`CheckpointError`, :class:`FilesError` or :class:`OSError`.
    """
    raw, form, source = target_config(args), args.format, args.source
    weights: Weights = random_weights(raw, form, args.seed) if source is None else stored_weights(source, raw)
    copied = fitting_tokenizer(args.tokenizer, source or BUNDLED_MODEL, raw["vocab_size"])
    if source is not None and (generation := source / "generation_config.json").is_file():
        copied.append(generation)
    table = stored_tensors(raw, form)
    total = sum(spec.nbytes for spec in table.values())
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=total)
        files = write_checkpoint(
            args.output,
            raw,
            form,
            weights,
            copied=copied,
            shard_nbytes=args.shard_size,
            on_bytes=lambda n: progress.advance(bar, n),
        )
    words = f"{args.output}: {len(table):,} tensors, {total:,} bytes in {files.n_files} files, {form} format"
    return f"{words}, {', '.join(file.name for file in copied) if copied else 'no tokenizer'}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = parse_args(argv)
    console = Console(width=max(120, Console().width), soft_wrap=True)
    try:
        if args.list:
            print_table(console, stored_tensors(target_config(args), args.format))
        else:
            console.print(make(args), highlight=False)
    except (CheckpointError, FilesError, OSError) as error:
        print(f"make_checkpoint: {error}", file=sys.stderr)
        return 2
    return 0
