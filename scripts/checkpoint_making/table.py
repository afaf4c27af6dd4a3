"""Prints which tensors a checkpoint has: one line for those that differ only in their layer and expert."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from server.model.official_tensors import TensorSpec

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def grouped(table: Mapping[str, TensorSpec]) -> dict[tuple[str, TensorSpec], int]:
    """How many tensors have each pattern (layer and expert numbers as ``*``), shape and dtype."""
    counts: dict[tuple[str, TensorSpec], int] = {}
    for key, spec in table.items():
        pattern = key if key.startswith("mtp.") else _NUMBER.sub("*", key)
        pattern = re.sub(r"experts\.\d+", "experts.*", pattern)
        counts[pattern, spec] = counts.get((pattern, spec), 0) + 1
    return counts


def totals(table: Mapping[str, TensorSpec]) -> dict[str, tuple[int, int]]:
    """Tensors and bytes of the backbone, of the draft (if any), and of all."""
    found = {"backbone": (0, 0)}
    for key, spec in table.items():
        part = "draft (mtp.*)" if key.startswith("mtp.") else "backbone"
        n, nbytes = found.get(part, (0, 0))
        found[part] = n + 1, nbytes + spec.nbytes
    found["all"] = len(table), sum(nbytes for _, nbytes in found.values())
    return found


def print_table(console: Console, table: Mapping[str, TensorSpec]) -> None:
    rows = Table("tensor", "shape", "dtype", "number", "bytes", box=None, pad_edge=False)
    for column in rows.columns[3:]:
        column.justify = "right"
    for (pattern, spec), n in grouped(table).items():
        rows.add_row(pattern, str(list(spec.shape)), spec.dtype, f"{n:,}", f"{n * spec.nbytes:,}")
    rows.add_section()
    for part, (n, nbytes) in totals(table).items():
        rows.add_row(part, "", "", f"{n:,}", f"{nbytes:,}")
    console.print(rows, markup=False)
