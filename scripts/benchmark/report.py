"""What a run says of itself: its setting, and its tables on the terminal."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from .local_engine import kernels_can_be_chosen
from .measurement import Measurement
from .session import Session


def setting_of(session: Session, load_before: float) -> dict[str, Any]:
    """What a reader must know to compare these numbers with others."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "cpus": os.cpu_count(),
        "threads": session.threads,
        "rounds": session.sizes.rounds,
        "seconds": session.sizes.seconds,
        "kernels_can_be_chosen": kernels_can_be_chosen(),
        "baseline": session.baseline is not None,
        "python": platform.python_version(),
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
        "mooncake": _version_of("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"),
        "load_average_before": load_before,
        "load_average_after": os.getloadavg()[0],
    }


def machine() -> str:
    """The processor's name, as the system has it, and its widest vectors."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = facts.get("flags", "").split()
    vectors = next((name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), "")
    return ", ".join(part for part in (facts.get("model name", platform.machine()), vectors) if part)


def _version_of(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except ModuleNotFoundError:
            continue
    return "none"


def print_table(console: Console, measurements: Sequence[Measurement], setting: dict[str, Any]) -> None:
    """Medians with their spread, then the ratios of medians (with the 95 % interval of the rounds' ratios) and their
    differences, then what was not measured.
    """
    values = Table("measurement", "variant", "median", "min", "max", "n", "unit", title="values")
    ratios = Table("measurement", "of medians", "", title="ratios and differences")
    for table, columns in ((values, (2, 3, 4, 5)), (ratios, (2,))):
        for column in columns:
            table.columns[column].justify = "right"
    for m in measurements:
        for name, found in m.values.items():
            spread = (median(found), min(found), max(found))
            values.add_row(m.name, name, *map(shown, spread), str(len(found)), m.unit)
        for a, b in m.both(m.ratios):
            ratios.add_row(m.name, f"{a} / {b}", _ratio(m, a, b))
        for a, b in m.both(m.differences):
            ratios.add_row(m.name, f"{a} - {b}", f"{m.median(a) - m.median(b):.2f} {m.unit}")
    console.print(values)
    console.print(ratios)
    for m in measurements:
        for name, note in m.notes.items():
            console.print(f"{m.name}: {name}: {note}", highlight=False)
    console.print(
        f"{setting['machine']}; threads of one operation: {setting['threads']}; CPUs: {setting['cpus']}; load average: "
        f"{setting['load_average_before']:.1f} -> {setting['load_average_after']:.1f}; seconds by part: "
        + ", ".join(f"{name} {seconds:.0f}" for name, seconds in setting["part_s"].items()),
        highlight=False,
    )


def summary(m: Measurement) -> str:
    """One line, while the run goes on."""
    medians = [f"{name} {shown(median(found))}" for name, found in m.values.items()]
    ratios = [f"{a} / {b} {_ratio(m, a, b)}" for a, b in m.both(m.ratios)]
    return f"{m.name}, {m.unit}: {', '.join(medians)}; {', '.join(ratios)}"


def _ratio(m: Measurement, a: str, b: str) -> str:
    """With its interval, if there are enough rounds."""
    interval = m.interval(a, b)
    return f"{m.ratio(a, b):.3f}" + (f" ({interval[0]:.3f} .. {interval[1]:.3f})" if interval else "")


def shown(value: float) -> str:
    return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"
