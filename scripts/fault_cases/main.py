"""Faults that PD servers had elsewhere, staged here one by one: does the detector that must fire, fire?

    faults.py list            every report, and how it is staged or why it cannot happen
    faults.py run NAME ...    stages one (or several), by an id of its reports
    faults.py all             stages every one, in one pair of processes
    faults.py matrix ...      every component x damage x place, and which check notices (see matrix --help)
    faults.py history         puts the table of reports into docs/failures.md

Exit codes: 0 every expected detector fired; 1 one stayed silent; 2 the servers could not be run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cluster.tool import Section, exit_code, log_folder
from hostile.rogue_peer import RogueFailed
from rich.console import Console
from rich.table import Table

from fault_cases import matrix
from fault_cases.catalog import ENTRIES, find, table
from fault_cases.reports import Entry
from fault_cases.stage import Silent, Stage, stage

PLAY_TIMEOUT_S = 240.0
REPORTS = Section("reports")


async def play(entries: Sequence[Entry], logs: Path, console: Console) -> list[str]:
    """Stages ``entries`` in one pair; the names of those whose detector stayed silent."""
    async with contextlib.AsyncExitStack() as stack:
        with console.status("starting a pair and one process that computes alone"):
            made = await stack.enter_async_context(stage(logs))
        return [entry.name for entry in entries if not await played(entry, made, console)]


async def played(entry: Entry, made: Stage, console: Console) -> bool:
    """Stages one entry and prints what was seen; whether its detector fired. The pair is calm again afterwards."""
    if entry.play is None:
        console.print(f"[bold]{entry.name}[/] is not staged: {entry.here}")
        return True
    started = time.monotonic()
    try:
        with console.status(f"{entry.name}: {entry.happened}"):
            async with asyncio.timeout(PLAY_TIMEOUT_S):
                seen = await entry.play(made)
        outcome, colour = "detected", "green"
    except (Silent, RogueFailed) as silence:
        seen, outcome, colour = [str(silence)], "SILENT", "red"
    except TimeoutError:
        seen, outcome, colour = [f"not over after {PLAY_TIMEOUT_S:g} s"], "SILENT", "red"
    console.print(
        f"[bold]{', '.join(entry.ids)}[/] [{colour}]{outcome}[/] ({time.monotonic() - started:.1f} s): {entry.happened}"
    )
    for line in seen:
        console.print(f"    {line}", markup=False, highlight=False)
    await made.calm()
    return outcome == "detected"


def show_list(console: Console) -> None:
    shown = Table("name", "what happened", "here", "staged")
    for entry in ENTRIES:
        shown.add_row("\n".join(entry.ids), entry.happened, entry.here, "yes" if entry.play else "no")
    console.print(shown)


def run(names: Sequence[str], logs: Path, console: Console) -> int:
    """Stages the entries of ``names`` (ids), every one without names; the exit code."""
    entries = list(dict.fromkeys(find(name) for name in names)) or list(ENTRIES)
    silent = asyncio.run(play(entries, logs, console))
    if silent:
        print(f"faults: the detector stayed silent: {', '.join(silent)}; logs in {logs}", file=sys.stderr)
    return 1 if silent else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["matrix"]:
        return matrix.main(arguments[1:])
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="faults.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("list", "run", "all", "matrix", "history"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="ids of reports, for run")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="where the nodes' logs go")
    args = parser.parse_args(arguments)
    console = Console()
    if args.command == "list":
        show_list(console)
        return 0
    if args.command == "history":
        REPORTS.write(table())
        return 0
    known = {one for entry in ENTRIES for one in entry.ids}
    if (args.command == "run") is not bool(args.names) or set(args.names) - known:
        unknown = ", ".join(sorted(set(args.names) - known)) or "names"
        parser.error(f"run takes one or more names, all takes none; not known: {unknown} (see faults.py list)")
    logs = log_folder(args.logs, "faults")
    return exit_code("faults", lambda: run(args.names, logs, console), logs=logs)
