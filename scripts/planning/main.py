"""Memory of a node, and what is handed over for a prompt, on paper: from a config, without a checkpoint.

  plan.py --config flash --context 65536 --slots 8
  plan.py --config pro --context 1048576 --slots 1 --wire 25GB/s

--config takes a directory, a config.json, or the name of an official release's config (flash, pro). The numbers are
those that a node plans with (--memory, --doctor) and sends: every row format beside each other, and the components of
the one that --kv-dtype and --index-dtype name. Exit codes: 0 done, 2 the config cannot be served, or not for so many
tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from checkpoint_making.config import draft_of, read_config
from checkpoint_making.releases import NAMES
from rich.console import Console
from rich.table import Table

from server.cache.row_formats import AUTO, INDEX_DTYPES, KV_DTYPES, MODEL
from server.cache.specs import LayoutError
from server.model.config import CheckpointError, ModelConfig, config_from
from server.node.options import positive
from server.sizes import nbytes_of, size

from .paper import ROW_FORMATS, Paper, RowFormat

CONTEXT = 65536
LENGTHS = (1000, 4096, 8191, 65536, 1048575)
_MIB = 1 << 20


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", required=True, metavar="CONFIG", help=f"a directory, a config.json, or {', '.join(NAMES)}"
    )
    parser.add_argument(
        "--context", type=positive, metavar="N", help=f"tokens of a request ({CONTEXT}, or what the config allows)"
    )
    parser.add_argument("--slots", type=positive, default=8, metavar="N", help="requests of that length at once (8)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="the model's (bfloat16)")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default=MODEL, help="rows of the component table (model)")
    parser.add_argument("--index-dtype", choices=INDEX_DTYPES, default=AUTO, help="index keys of that table (auto)")
    parser.add_argument("--draft", choices=("on", "off"), help="a NextN draft's state (default: as the config says)")
    parser.add_argument("--spec-tokens", type=int, choices=range(9), default=0, metavar="K", help="draft tokens (0)")
    parser.add_argument("--page-size", type=positive, default=256, metavar="N", help="tokens of a page (256)")
    parser.add_argument("--wire", type=_wire, metavar="BYTES/s", help="seconds of a hand-off at this rate, as 25GB/s")
    parser.add_argument(
        "--tokens", type=positive, nargs="+", metavar="N", help=f"prompt lengths {LENGTHS}, as far as they can be"
    )
    return parser.parse_args(argv)


def _wire(text: str) -> int:
    try:
        rate = nbytes_of(text.removesuffix("/s"))
    except ValueError:
        rate = 0
    if not rate:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate, such as 25GB/s")
    return rate


def paper_of(args: argparse.Namespace) -> Paper:
    """What is planned. Raises :class:`CheckpointError`, and :class:`LayoutError` for too many tokens."""
    raw = read_config(args.config)
    config = config_from(raw, args.config)
    longest = config.max_position_embeddings
    context = min(CONTEXT, longest) if args.context is None else args.context
    if context > longest:
        raise LayoutError(
            f"--context {context:,}: max_position_embeddings allows {longest:,} tokens, prompt and answer"
        )
    draft = draft_of(raw) == "nextn" if args.draft is None else args.draft == "on"
    return Paper(config, args.dtype, context, args.slots, args.page_size, draft, args.spec_tokens)


def prompt_lengths(args: argparse.Namespace, longest: int) -> Sequence[int]:
    """Tokens of the prompts whose hand-off is told; each leaves one of ``longest`` to the answer. Raises
    :class:`LayoutError` for a longer one.
    """
    if args.tokens is None:
        return [n for n in LENGTHS if n < longest] or [longest - 1]
    if (most := max(args.tokens)) >= longest:
        raise LayoutError(
            f"--tokens {most:,}: max_position_embeddings allows {longest:,} tokens, one of them for the answer"
        )
    return list(args.tokens)


def report(args: argparse.Namespace, console: Console) -> None:
    """Prints everything. Raises :class:`CheckpointError` and :class:`LayoutError`."""
    paper = paper_of(args)
    lengths = prompt_lengths(args, paper.config.max_position_embeddings)
    chosen = RowFormat(args.kv_dtype, args.index_dtype)
    console.print(_head(paper.config, paper), "")
    for line in paper.node(chosen).lines():
        console.print(line)
    console.print("", _weights(paper), "", _nodes(paper), "", _handoffs(paper, lengths, args.wire))


def _head(config: ModelConfig, paper: Paper) -> str:
    kinds = {"window only": 0, "CSA": 4, "HCA": 128}
    layers = ", ".join(f"{len(config.layers_of(ratio))} {name}" for name, ratio in kinds.items())
    draft = f"a NextN draft, {paper.spec_tokens} tokens a step" if paper.draft else "no draft"
    requests = f"{paper.slots:,} requests of {paper.context:,} tokens"
    return f"{config.num_hidden_layers} layers ({layers}), {draft}; {paper.dtype}; {requests}"


def _table(*columns: str) -> Table:
    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _weights(paper: Paper) -> Table:
    table = _table("weights", "in memory", "in their files: memory as --weights-memory says")
    for mode, packed in (("dequantized", False), ("packed", True)):
        weights = paper.node(ROW_FORMATS[0], packed=packed).weights
        table.add_row(mode, size(weights.loaded), size(weights.mapped))
    return table


def _nodes(paper: Paper) -> Table:
    table = _table("rows", "page", "slot", "snapshot", "pools", "node, dequantized", "node, packed")
    for rows in ROW_FORMATS:
        whole, packed = paper.node(rows), paper.node(rows, packed=True)
        sizes = (whole.page_nbytes, whole.slot_nbytes, paper.snapshot_nbytes(rows))
        items = (f"{each:,} B" for each in sizes)
        table.add_row(rows.name, *items, size(whole.pools), size(whole.total), size(packed.total))
    return table


def _handoffs(paper: Paper, lengths: Sequence[int], wire: int | None) -> Table:
    """Bytes of one request's state, and seconds for all of them; most pages go while the prompt is still computed."""
    seconds = [] if wire is None else [f"s, {rows.name}" for rows in ROW_FORMATS]
    table = _table("prompt tokens", *(f"MiB, {rows.name}" for rows in ROW_FORMATS), *seconds)
    for n in lengths:
        nbytes = [paper.handoff_nbytes(rows, n) for rows in ROW_FORMATS]
        times = [] if wire is None else [f"{each / wire:.4f}" for each in nbytes]
        table.add_row(f"{n:,}", *(f"{each / _MIB:,.1f}" for each in nbytes), *times)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    args = parse_args(argv)
    console = Console(width=max(130, Console().width), soft_wrap=True, highlight=False)
    try:
        report(args, console)
    except (CheckpointError, LayoutError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    return 0
