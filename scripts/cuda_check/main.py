"""The checks that need a GPU, in under eight minutes: the same results as on the CPU, no wait of the host in a decode
step, a pair on one GPU, and tokens a second at the layer shapes of DeepSeek-V4-Flash.

    check_cuda.py                      every section, on cuda:0
    check_cuda.py --only parity        one of them (repeatable)
    check_cuda.py --device cpu         a rehearsal: small, and no word about a GPU

Each section has its own time; one that fails, crashes or does not end is named, and the others run all the same.

Exit codes: 0 all is well, or there is no GPU here (it says so); 1 a section failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster import ROOT

from cuda_check.lines import Line
from server.node.options import device_name

BUDGETS_S = {"facts": 40.0, "parity": 90.0, "waiting": 40.0, "pair": 110.0, "speed": 120.0}
"""What each section may take, in the order in which they run: less than eight minutes, also if none ends by itself."""
REHEARSAL_TIMES = 5
"""By how much longer a section may take on the CPU: it may be a busy one, and nobody pays for it by the minute."""
END_S = 15.0
"""For a section that was asked to end, with the servers that it has started."""
NO_DEVICE = 3
PROGRAM = ("-m", "cuda_check.section")
"""A section, for Python."""


@dataclass
class Ran:
    """What came of one section; ``trouble`` is empty if it came to its end."""

    name: str
    seconds: float
    lines: list[Line] = field(default_factory=list)
    trouble: str = ""
    has_device: bool = True

    @property
    def ok(self) -> bool:
        return not self.trouble and all(line.ok for line in self.lines)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="check_cuda.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", type=device_name, default="cuda:0", help="cuda:N, or cpu for a rehearsal (cuda:0)")
    parser.add_argument("--only", action="append", choices=list(BUDGETS_S), help="this section (repeatable)")
    return parser.parse_args(argv)


def run_section(name: str, device: str, budget_s: float, program: Sequence[str] = PROGRAM) -> Ran:
    """Runs a section in a process. One that takes longer is asked to end, then killed."""
    began = time.monotonic()
    command = [sys.executable, *program, name, device]
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, cwd=ROOT / "scripts", env=_environment(), stdout=said, stderr=errors)
        trouble = ""
        try:
            process.wait(budget_s)
        except subprocess.TimeoutExpired:
            trouble = f"no end within {budget_s:g} s"
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        said.seek(0)
        errors.seek(0)
        lines = [Line.of_json(line) for line in said if line.startswith("{")]
        last = (errors.read().strip().splitlines() or ["it said nothing"])[-1]
    code = process.returncode
    if not trouble and code not in (0, NO_DEVICE):
        trouble = f"ended with {code}: {last}"
    return Ran(name, time.monotonic() - began, lines, trouble, has_device=code != NO_DEVICE)


def _environment() -> dict[str, str]:
    """With this checkout's packages, whatever is installed."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def show(ran: Ran) -> None:
    print(f"\n{ran.name} ({ran.seconds:.0f} s)")
    for line in ran.lines:
        print(f"  {'ok' if line.ok else 'FAILED':<7} {line.what:<46} {line.found}")
    if ran.trouble:
        print(f"  FAILED  {ran.trouble}")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    done = []
    for name, budget_s in BUDGETS_S.items():
        if name != "facts" and args.only and name not in args.only:
            continue
        ran = run_section(name, args.device, budget_s * (REHEARSAL_TIMES if args.device == "cpu" else 1))
        if not ran.has_device:
            print(f"no GPU: {ran.lines[0].found}")
            return 0
        show(ran)
        done.append(ran)
    failed = [ran.name for ran in done if not ran.ok]
    where = "a rehearsal on the CPU, which says nothing about a GPU" if args.device == "cpu" else args.device
    print(f"\n{where}: {len(done) - len(failed)} sections of {len(done)} well in {sum(r.seconds for r in done):.0f} s")
    for name in failed:
        print(f"FAILED: {name}")
    return 1 if failed else 0
